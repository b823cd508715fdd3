// One source, several instruction sets: functions marked K3_CLONES are compiled for each and chosen when the program
// starts. With -ffp-contract=off and a fixed order of additions all of them give the same bits. Sanitizers and clang take
// the plain version: their start-up code is not ready when the choice is made.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define K3_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define K3_CLONES
#endif
