#include "apps/job.h"

#include <charconv>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <system_error>

#include <fmt/core.h>

#include "apps/build_info.h"
#include "apps/device.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "comm/nccl_comm.h"
#include "loader/gguf.h"
#include "rank/fault.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

NamedTexts library_versions() {
  return {{"mpi", mpi_library_version()},
          {"hdf5", K3_HDF5_VERSION},
          {"nccl", build_info().cuda ? nccl_library_version() : "not built"}};
}

}  // namespace

int run_job(World& world, Comm& comm, JobNotes& notes,
            const std::function<std::optional<RunConfig>()>& prepare,
            const std::function<void(const RunConfig&)>& work) {
  std::optional<RunConfig> config;
  on_rank_0(comm, [&] { config = prepare(); });
  config = share_config(comm, config);
  if (!config) return kExitOk;
  comm.set_time_limit(config->time_limit_s);
  if (config->threads == 0) config->threads = threads_per_rank(world, comm);
  stop_on_signals();
  try {
    work(*config);
    return kExitOk;
  } catch (...) {
    // After close_log() this changes nothing.
    const Fault fault = fault_of(std::current_exception());
    notes.show.finish();
    if (notes.log) {
      notes.log->close(fault.exit_code == kExitInterrupted ? "interrupted" : "failed", "",
                       fault.line);
    }
    throw;
  }
}

void with_engine(World& world, Comm& comm, JobNotes& notes, const RunConfig& config,
                 const std::function<std::optional<Fault>(Engine&)>& drive,
                 const std::function<void(Engine&)>& look) {
  const RankDevice device = make_rank_device(config, world, comm);
  Engine engine(config, device.comm(comm), *device.backend, [&](const Progress& p) {
    if (world.rank() == 0) notes.show(p);
    if (stop_asked()) throw Interrupted("stopped on request while loading");
  });
  if (look) look(engine);
  std::optional<Fault> fault;
  if (world.rank() == 0) {
    fault = drive(engine);
  } else {
    engine.serve();
  }
  comm.agree(fault);
}

std::optional<Fault> guarded(Engine& engine, const std::function<void()>& work) {
  std::optional<Fault> fault;
  try {
    work();
  } catch (const Interrupted&) {
    fault = fault_of(std::current_exception());
  } catch (const std::system_error&) {
    fault = fault_of(std::current_exception());
  } catch (const std::invalid_argument&) {
    fault = fault_of(std::current_exception());
  } catch (const NonFiniteError&) {
    fault = fault_of(std::current_exception());
  }
  engine.stop(fault ? fault->exit_code : kExitOk);
  return fault;
}

void begin_notes(JobNotes& notes, Engine& engine) {
  for (const std::string& w : engine.warnings()) print_line("warning: " + w);
  if (!notes.log) return;
  notes.log->chosen(engine.config());
  notes.log->model(engine.file(), engine.model());
  notes.log->warnings(engine.warnings());
  notes.log->ranks("loaded", engine.reports());
}

std::optional<Fault> close_log(JobNotes& notes, const std::optional<Fault>& fault,
                               const std::string& reason) {
  if (!notes.log) return fault;
  const bool interrupted = fault && fault->exit_code == kExitInterrupted;
  notes.log->close(!fault        ? "finished"
                   : interrupted ? "interrupted"
                                 : "failed",
                   reason, fault ? fault->line : "");
  const std::optional<std::string> trouble = notes.log->trouble();
  if (!trouble || (fault && !interrupted)) return fault;
  return Fault{kExitEnvironment,
               *trouble + "; the output is whole, the log ends at its last snapshot"};
}

std::string default_model() {
  const fs::path built = K3_DEFAULT_MODEL;
  std::error_code ignored;
  if (fs::exists(built, ignored)) return built.string();
  const fs::path self = fs::read_symlink("/proc/self/exe", ignored);
  const fs::path installed = self.parent_path().parent_path() / "share/k3/k3-nano.gguf";
  if (fs::exists(installed, ignored)) return installed.string();
  throw std::invalid_argument(
      fmt::format("--model: not given, and k3-nano.gguf is neither {} nor {}", built.string(),
                  installed.string()));
}

std::string full_version_text(const std::string& program) {
  std::string out = version_text(program);
  for (const auto& [name, version] : library_versions()) out += "\n" + name + ": " + version;
  return out + "\n";
}

std::optional<RunConfig> share_config(Comm& comm, const std::optional<RunConfig>& config) {
  std::string bytes;
  if (comm.rank() == 0 && config) bytes = to_bytes(*config);
  std::uint64_t size = bytes.size();
  comm.broadcast(Point::kRunConfig, std::as_writable_bytes(std::span(&size, 1)), 0);
  if (size == 0) return std::nullopt;
  bytes.resize(size);
  comm.broadcast(Point::kRunConfig, std::as_writable_bytes(std::span(bytes)), 0);
  RunConfig shared = run_config_from_bytes(bytes);
  settle(shared);
  return shared;
}

RunFacts run_facts(const std::string& program, const std::string& command_line,
                   const RunConfig& config, const World& world) {
  const BuildInfo& b = build_info();
  RunFacts facts;
  facts.program = program;
  facts.command_line = command_line;
  facts.options = describe(config);
  facts.build = {{"version", b.version},       {"commit", b.commit},
                 {"build_type", b.build_type}, {"flags", b.flags},
                 {"compiler", b.compiler},     {"cuda", b.cuda ? "built" : "not built"},
                 {"cuda_note", b.cuda_note}};
  facts.libraries = library_versions();
  facts.launcher = world.facts().launcher;
  facts.job = world.facts().job;
  facts.world = world.size();
  return facts;
}

std::string read_text(const std::string& path) {
  std::ostringstream text;
  if (path == "-") {
    text << std::cin.rdbuf();
    if (std::cin.bad()) throw std::system_error(EIO, std::generic_category(), "standard input");
    return text.str();
  }
  // ifstream opens directories and fails only when read.
  std::error_code forbidden;  // opening it says so
  if (!fs::exists(path, forbidden) && !forbidden) {
    throw std::invalid_argument(path + ": no such file");
  }
  if (fs::is_directory(path, forbidden)) throw std::invalid_argument(path + ": is a directory");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::system_error(errno ? errno : EIO, std::generic_category(), path);
  text << file.rdbuf();
  if (file.bad()) throw std::system_error(EIO, std::generic_category(), path);
  return text.str();
}

std::vector<std::string> part_paths(const ModelFile& file) {
  std::vector<std::string> paths;
  for (const PartInfo& part : file.parts()) paths.push_back(part.path);
  return paths;
}

void refuse_to_replace(const std::string& option, const std::string& output,
                       const std::vector<std::string>& inputs) {
  std::error_code absent;
  if (!fs::is_regular_file(output, absent)) return;
  for (const std::string& input : inputs) {
    if (fs::equivalent(output, input, absent)) {
      throw std::invalid_argument(
          fmt::format("{} {}: would replace the input {}", option, output, input));
    }
  }
}

std::vector<std::int32_t> parse_ids(const std::string& text, const std::string& where) {
  std::vector<std::int32_t> ids;
  std::istringstream words(text);
  std::string word;
  while (words >> word) {
    std::int32_t id = 0;
    const char* end = word.data() + word.size();
    const auto [stop, error] = std::from_chars(word.data(), end, id);
    if (error != std::errc() || stop != end || id < 0) {
      throw std::invalid_argument(
          fmt::format("{}: word {}: '{}' is not a token id", where, ids.size(), printable(word)));
    }
    ids.push_back(id);
  }
  if (ids.empty()) throw std::invalid_argument(where + ": holds no token ids");
  return ids;
}

void check_ids(const std::vector<std::int32_t>& ids, std::int64_t n_vocab,
               const std::string& where) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= n_vocab || ids[i] < 0) {
      throw std::invalid_argument(
          fmt::format("{}: word {}: id {} is outside the model's vocabulary of {} tokens (0 to {})",
                      where, i, ids[i], n_vocab, n_vocab - 1));
    }
  }
}

}  // namespace k3
