// Link count_allocations.cpp into a test and it counts every operator new of the program, from any
// thread.
#pragma once

#include <cstdint>

namespace k3::test {

std::uint64_t allocations_so_far();

}  // namespace k3::test
