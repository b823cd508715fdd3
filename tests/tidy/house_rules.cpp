#include "tests/tidy/house_rules.h"

#include <algorithm>
#include <cctype>
#include <regex>

namespace k3::test {

namespace {

constexpr std::size_t kMaxLines = 900;

struct Room {
  std::string_view name;
  std::string_view
      may_include;  // own headers aside: rooms ("rank/") and single headers, between blanks
  std::string_view never_sees;  // families of calls: mpi cuda nccl hdf5 print
};

// The table. Two headers of plain data cross between the lower rooms.
constexpr Room kRooms[] = {
    {"apps", " rank/ comm/ kernels/ loader/ generated/ ", " mpi cuda nccl hdf5 "},
    {"rank", " comm/ kernels/ loader/ ", " mpi cuda nccl hdf5 print "},
    {"comm", " loader/blocks.h ", " hdf5 print "},
    {"kernels", " loader/blocks.h comm/peer_view.h ", " mpi nccl hdf5 print "},
    {"loader", " ", " mpi cuda nccl print "},
};

struct Family {
  const char* name;
  const char* header;  // regex on the name of an included header
  const char* word;    // regex on code without comments and literals
};

constexpr Family kFamilies[] = {
    {"mpi", "^mpi\\.h$", "\\bMPIX?_[A-Za-z]\\w*"},
    {"cuda", "^(cuda|cublas|cooperative_groups|nvml).*", "\\bcu(da)?[A-Z]\\w*"},
    {"nccl", "^nccl.*", "\\bnccl[A-Z]\\w*"},
    {"hdf5", "^(hdf5|H5).*", "\\bH5[A-Z]+_?[a-zA-Z]\\w*"},
    {"print", "^iostream$", "\\b(std::(cout|cerr|clog)|f?printf|puts|fputs|perror)\\b"},
};

bool has_word(std::string_view list, std::string_view word) {
  return list.find(" " + std::string(word) + " ") != std::string_view::npos;
}

bool starts_with(std::string_view s, std::string_view prefix) {
  return s.substr(0, prefix.size()) == prefix;
}

std::string_view first_folder(std::string_view path) { return path.substr(0, path.find('/')); }

const Room* room_of(std::string_view path) {
  for (const Room& room : kRooms) {
    if (first_folder(path) == room.name) return &room;
  }
  return nullptr;
}

class Report {
 public:
  Report(std::string_view path, std::string_view text) : path_(path), text_(text) {}
  void add(std::size_t at, const std::string& what) {
    const auto line =
        1 + std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(at), '\n');
    lines.push_back(path_ + ":" + std::to_string(line) + ": " + what);
  }
  std::vector<std::string> lines;

 private:
  std::string path_;
  std::string_view text_;
};

template <class F>
void each_match(const std::string& text, const char* pattern, F&& f) {
  const std::regex re(pattern);
  for (std::sregex_iterator it(text.begin(), text.end(), re), end; it != end; ++it) f(*it);
}

bool may_include(const Room& room, std::string_view header) {
  const std::string folder = std::string(first_folder(header)) + "/";
  return first_folder(header) == room.name || has_word(room.may_include, folder) ||
         has_word(room.may_include, header);
}

void check_includes(const Room& room, std::string_view path, const std::string& code,
                    Report& report) {
  each_match(code, "(^|\n)[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"\n]+)", [&](const std::smatch& m) {
    const std::string header = m[3];
    const auto at = static_cast<std::size_t>(m.position(3));
    const std::string in = std::string(room.name) + "/";
    if (m[2] == "\"" && !may_include(room, header)) {
      report.add(at, "includes \"" + header + "\", which " + in + " may not");
    }
    for (const Family& f : kFamilies) {
      if (has_word(room.never_sees, f.name) && std::regex_search(header, std::regex(f.header))) {
        report.add(at, "includes <" + header + ">, which " + in + " never sees");
      }
    }
    if (starts_with(header, "boost/program_options") && !starts_with(path, "apps/options")) {
      report.add(at, "includes <" + header + ">; apps/options is its only user");
    }
  });
}

}  // namespace

std::vector<std::string> types_in(std::string_view header) {
  std::vector<std::string> out;
  std::string scope;
  // By the house's format: what stands in a namespace is not indented.
  each_match("\n" + strip(header, false),
             "\n(?:inline )?namespace ([\\w:]+) \\{|"
             "\n(?:class|struct|union|enum class|enum) (?:alignas\\(\\w+\\) "
             ")?(\\w+)(?![\\w<])(?=[^;(\n]*\\{)",
             [&](const std::smatch& m) {
               if (m[1].matched) {
                 scope = m[1].str() + "::";
               } else {
                 out.push_back(scope + m[2].str());
               }
             });
  return out;
}

std::string strip(std::string_view text, bool keep_literals) {
  std::string out;
  std::size_t i = 0;
  const auto copy = [&](std::size_t end, bool keep) {
    for (end = std::min(end, text.size()); i < end; ++i) {
      if (keep || text[i] == '\n') out += text[i];
    }
  };
  const auto past = [&](std::string_view mark, std::size_t from) {
    const std::size_t at = text.find(mark, from);
    return at == std::string_view::npos ? text.size() : at + mark.size();
  };
  while (i < text.size()) {
    const std::string_view rest = text.substr(i);
    if (starts_with(rest, "//")) {
      copy(std::min(text.find('\n', i), text.size()), false);
    } else if (starts_with(rest, "/*")) {
      copy(past("*/", i + 2), false);
    } else if (starts_with(rest, "R\"")) {
      const std::string_view mark = rest.substr(2, rest.find('(') - 2);
      copy(past(")" + std::string(mark) + "\"", i), keep_literals);
    } else if (text[i] == '"' ||
               (text[i] == '\'' &&
                !(i > 0 && std::isalnum(static_cast<unsigned char>(text[i - 1]))))) {
      std::size_t end = i + 1;
      while (end < text.size() && text[end] != text[i] && text[end] != '\n')
        end += text[end] == '\\' ? 2 : 1;
      copy(end + 1, keep_literals);
    } else {
      copy(i + 1, true);
    }
  }
  return out;
}

std::vector<std::string> broken_rules(std::string_view path, std::string_view text) {
  Report report(path, text);
  const auto n_line = static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
  if (n_line > kMaxLines) {
    report.add(text.size(), "has " + std::to_string(n_line) + " lines, " +
                                std::to_string(kMaxLines) + " at most");
  }
  const std::string words = strip(text, false);
  Report in_words(path, words);
  if (!starts_with(path, "comm/launcher")) {
    each_match(words, "\\b(secure_)?getenv\\b|\\benviron\\b", [&](const std::smatch& m) {
      in_words.add(static_cast<std::size_t>(m.position()),
                   "reads the environment; comm/launcher is the only place");
    });
  }
  if (!starts_with(path, "tests/tidy/")) {
    // In literals too: inline assembly is one.
    const std::string code = strip(text, true);
    Report in_code(path, code);
    each_match(code, "\\bcuMulticast\\w*|\\bmultimem\\b", [&](const std::smatch& m) {
      in_code.add(
          static_cast<std::size_t>(m.position()),
          "uses " + m.str() + ": no multicast objects, whose misuse stops every GPU of a host");
    });
    report.lines.insert(report.lines.end(), in_code.lines.begin(), in_code.lines.end());
  }
  if (const Room* room = room_of(path)) {
    const std::string code = strip(text, true);
    Report in_code(path, code);
    check_includes(*room, path, code, in_code);
    for (const Family& f : kFamilies) {
      if (!has_word(room->never_sees, f.name)) continue;
      each_match(words, f.word, [&](const std::smatch& m) {
        in_words.add(static_cast<std::size_t>(m.position()),
                     "uses " + m.str() + ", which " + std::string(room->name) + "/ never sees");
      });
    }
    report.lines.insert(report.lines.end(), in_code.lines.begin(), in_code.lines.end());
  }
  report.lines.insert(report.lines.end(), in_words.lines.begin(), in_words.lines.end());
  return report.lines;
}

}  // namespace k3::test
