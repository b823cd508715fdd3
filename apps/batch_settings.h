// What decides a batch's answers beside its input, kept beside its output: a resumed batch has the same, or is refused.
#pragma once

#include <string>

#include "apps/batch_request.h"
#include "apps/batch_run.h"
#include "rank/run_config.h"
#include "rank/run_log.h"

namespace k3 {

// `fingerprint`: of the model. The layout counts only where answers are promised to be the same to the last bit.
NamedTexts batch_settings(const RunConfig& config, const BatchDefaults& defaults,
                          const std::string& fingerprint);

// `resumed`: compares with what `path` holds and throws std::invalid_argument naming the first setting that differs;
// otherwise, or where there is no such file, writes it.
void keep_settings(const std::string& path, const NamedTexts& settings, bool resumed);

}  // namespace k3
