// What an HDF5 file says, as one stream of bytes: for digests. Two files with the same names, types, shapes and values give
// the same stream, however HDF5 laid them out (chunks, free space, order of creation, byte order, strings of fixed length).
//
// The stream, depth first, children and attributes by the bytes of their names:
//   group:     field("group")     field(path)                        its attributes, its children
//   dataset:   field("dataset")   field(path) field(type) shape data its attributes
//   attribute: field("attribute") field(name) field(type) shape data
// field(text) = u64 length, bytes. shape = u64 number of axes, u64 each. Numbers little-endian; a string is a field.
// type: "i1".."i8", "u1".."u8", "f4", "f8" (class and bytes) or "s".
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>

namespace k3::h5 {

using ContentSink = std::function<void(std::span<const std::byte>)>;

// Hands the stream of the file at `path` to `sink`, piece by piece. Throws std::invalid_argument naming the file and the
// object where it cannot be read, holds a type that no log of ours has, or a link that leads elsewhere.
void visit_content(const std::string& path, const ContentSink& sink);

}  // namespace k3::h5
