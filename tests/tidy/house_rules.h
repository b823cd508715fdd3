// Who may know what, checked on text: the includes, the identifiers and the length of a source file.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace k3::test {

// What `text`, the content of `path` (from the repository's root: "rank/plan.cpp"), does that its room may not; one line
// each: "rank/plan.cpp:12: includes <mpi.h>, which rank/ never sees". Empty: nothing.
std::vector<std::string> broken_rules(std::string_view path, std::string_view text);

// The types that a header defines in its namespaces, "k3::Plan"; those inside other types are left out.
std::vector<std::string> types_in(std::string_view header);

// `text` without comments, and without the inside of literals unless keep_literals; line ends stay.
std::string strip(std::string_view text, bool keep_literals);

}  // namespace k3::test
