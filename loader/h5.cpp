#include "loader/h5.h"

#include <hdf5.h>
#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <type_traits>

#include "loader/atomic_file.h"

namespace k3::h5 {
namespace {

static_assert(sizeof(hid_t) == sizeof(std::int64_t), "HDF5 1.10 or later");

herr_t keep_innermost(unsigned n, const H5E_error2_t* error, void* out) {
  if (n == 0 && error->desc) *static_cast<std::string*>(out) = error->desc;
  return 0;
}

// One operation on one object: keeps HDF5 from printing, and turns its failures into one line.
class Op {
 public:
  enum Kind { kReads, kWrites };

  Op(Kind kind, std::string label, const char* verb)
      : kind_(kind), label_(std::move(label)), verb_(verb) {
    // Per thread in thread-safe builds of the library, hence here and not once.
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }

  hid_t id(hid_t id) const {
    if (id < 0) fail();
    return id;
  }
  void ok(int status) const {
    if (status < 0) fail();
  }
  [[noreturn]] void fail() const {
    std::string message = "HDF5 gave no reason";
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_innermost, &message);
    fail(message);
  }
  [[noreturn]] void fail(const std::string& message) const {
    const std::string line = label_ + ": " + verb_ + ": " + message;
    if (kind_ == kReads) throw std::invalid_argument(line);
    throw std::system_error(std::make_error_code(std::errc::io_error), line);
  }

 private:
  Kind kind_;
  std::string label_;
  const char* verb_;
};

// ---- types ----------------------------------------------------------------------------------------------------------

template <class T>
hid_t memory_type() {
  if constexpr (std::is_same_v<T, float>) return H5T_NATIVE_FLOAT;
  if constexpr (std::is_same_v<T, double>) return H5T_NATIVE_DOUBLE;
  if constexpr (std::is_same_v<T, std::int32_t>) return H5T_NATIVE_INT32;
  if constexpr (std::is_same_v<T, std::int64_t>) return H5T_NATIVE_INT64;
  if constexpr (std::is_same_v<T, std::uint64_t>) return H5T_NATIVE_UINT64;
}

template <class T>
hid_t file_type() {
  if constexpr (std::is_same_v<T, float>) return H5T_IEEE_F32LE;
  if constexpr (std::is_same_v<T, double>) return H5T_IEEE_F64LE;
  if constexpr (std::is_same_v<T, std::int32_t>) return H5T_STD_I32LE;
  if constexpr (std::is_same_v<T, std::int64_t>) return H5T_STD_I64LE;
  if constexpr (std::is_same_v<T, std::uint64_t>) return H5T_STD_U64LE;
}

Handle string_type(const Op& op) {
  Handle type(op.id(H5Tcopy(H5T_C_S1)));
  op.ok(H5Tset_size(type.id(), H5T_VARIABLE));
  op.ok(H5Tset_cset(type.id(), H5T_CSET_UTF8));
  return type;
}

std::vector<const char*> pointers_to(std::span<const std::string> values) {
  std::vector<const char*> out;
  out.reserve(values.size());
  for (const std::string& v : values) out.push_back(v.c_str());
  return out;
}

// ---- shapes ---------------------------------------------------------------------------------------------------------

Handle space_of(const Op& op, const std::vector<hsize_t>& dims,
                const std::vector<hsize_t>& max_dims = {}) {
  return Handle(op.id(H5Screate_simple(static_cast<int>(dims.size()), dims.data(),
                                       max_dims.empty() ? nullptr : max_dims.data())));
}

std::vector<std::uint64_t> dims_of(const Op& op, hid_t space) {
  const int n = H5Sget_simple_extent_ndims(space);
  op.ok(n);
  std::vector<hsize_t> dims(static_cast<std::size_t>(n));
  if (n > 0) op.ok(H5Sget_simple_extent_dims(space, dims.data(), nullptr));
  return {dims.begin(), dims.end()};
}

std::uint64_t product(const std::vector<std::uint64_t>& dims) {
  return std::accumulate(dims.begin(), dims.end(), std::uint64_t{1}, std::multiplies<>());
}

// ---- strings out of a file: variable-length or fixed ------------------------------------------------------------------

// read(memory type, buffer) is H5Dread or H5Aread.
using ReadInto = std::function<herr_t(hid_t, void*)>;

std::vector<std::string> read_strings(const Op& op, hid_t stored_type, hid_t space,
                                      std::uint64_t count, const ReadInto& read) {
  if (H5Tget_class(stored_type) != H5T_STRING) op.fail("holds no strings");
  std::vector<std::string> out;
  if (count == 0) return out;
  if (H5Tis_variable_str(stored_type) > 0) {
    // The stored type's own character set: HDF5 does not convert between them.
    std::vector<char*> pointers(count, nullptr);
    op.ok(read(stored_type, pointers.data()));
    for (const char* p : pointers) out.emplace_back(p ? p : "");
    H5Dvlen_reclaim(stored_type, space, H5P_DEFAULT, pointers.data());
    return out;
  }
  const std::size_t width = H5Tget_size(stored_type);
  std::vector<char> bytes(width * count);
  op.ok(read(stored_type, bytes.data()));
  for (std::uint64_t i = 0; i < count; ++i) {
    const char* begin = bytes.data() + i * width;
    out.emplace_back(begin, std::find(begin, begin + width, '\0'));
  }
  return out;
}

// ---- attributes -----------------------------------------------------------------------------------------------------

void write_attribute(const Op& op, hid_t object, const std::string& name, hid_t stored,
                     hid_t memory, const Handle& space, const void* data, bool empty) {
  const htri_t exists = H5Aexists(object, name.c_str());
  op.ok(exists);
  if (exists > 0) op.ok(H5Adelete(object, name.c_str()));
  const Handle attribute(
      op.id(H5Acreate2(object, name.c_str(), stored, space.id(), H5P_DEFAULT, H5P_DEFAULT)));
  if (!empty) op.ok(H5Awrite(attribute.id(), memory, data));
}

template <class T>
void write_number(const Op& op, hid_t object, std::string_view name, T value) {
  const Handle space(op.id(H5Screate(H5S_SCALAR)));
  write_attribute(op, object, std::string(name), file_type<T>(), memory_type<T>(), space, &value,
                  false);
}

template <class T>
void write_numbers(const Op& op, hid_t object, std::string_view name, const std::vector<T>& v) {
  write_attribute(op, object, std::string(name), file_type<T>(), memory_type<T>(),
                  space_of(op, {v.size()}), v.data(), v.empty());
}

struct OpenAttribute {
  Handle attribute, type, space;
  std::uint64_t count = 0;
};

OpenAttribute open_attribute(const Op& op, hid_t object, std::string_view name) {
  OpenAttribute a;
  a.attribute = Handle(op.id(H5Aopen(object, std::string(name).c_str(), H5P_DEFAULT)));
  a.type = Handle(op.id(H5Aget_type(a.attribute.id())));
  a.space = Handle(op.id(H5Aget_space(a.attribute.id())));
  a.count = product(dims_of(op, a.space.id()));
  return a;
}

template <class T>
std::vector<T> read_numbers(const Op& op, hid_t object, std::string_view name) {
  const OpenAttribute a = open_attribute(op, object, name);
  std::vector<T> out(a.count);
  if (!out.empty()) op.ok(H5Aread(a.attribute.id(), memory_type<T>(), out.data()));
  return out;
}

std::vector<std::string> read_attribute_strings(const Op& op, hid_t object, std::string_view name) {
  const OpenAttribute a = open_attribute(op, object, name);
  return read_strings(op, a.type.id(), a.space.id(), a.count,
                      [&](hid_t type, void* out) { return H5Aread(a.attribute.id(), type, out); });
}

template <class T>
T only(const Op& op, std::vector<T> values) {
  if (values.size() != 1) op.fail("has " + std::to_string(values.size()) + " values, expected 1");
  return std::move(values[0]);
}

// ---- files ----------------------------------------------------------------------------------------------------------

Handle access_list(const Op& op) {
  Handle list(op.id(H5Pcreate(H5P_FILE_ACCESS)));
#if H5_VERSION_GE(1, 10, 7)
  // Parallel file systems often refuse locks, and files here appear by rename, never half-written.
  op.ok(H5Pset_file_locking(list.id(), false, true));
#endif
  return list;
}

}  // namespace

Handle& Handle::operator=(Handle&& other) noexcept {
  if (this != &other) {
    close();
    id_ = other.id_;
    other.id_ = -1;
  }
  return *this;
}

void Handle::close() noexcept {
  // Closes whatever kind of object it is.
  if (id_ > 0) H5Idec_ref(id_);
  id_ = -1;
}

// ---- Dataset --------------------------------------------------------------------------------------------------------

std::vector<std::uint64_t> Dataset::dims() const {
  const Op op(Op::kReads, label_, "read its shape");
  const Handle space(op.id(H5Dget_space(handle_.id())));
  return dims_of(op, space.id());
}

std::uint64_t Dataset::rows() const {
  const std::vector<std::uint64_t> d = dims();
  return d.empty() ? 1 : d[0];
}

std::uint64_t Dataset::cols() const {
  std::vector<std::uint64_t> d = dims();
  if (!d.empty()) d[0] = 1;
  return product(d);
}

template <class T>
void Dataset::append(std::span<const T> values) {
  const std::vector<std::uint64_t> old = dims();
  const std::uint64_t width = cols();
  if (old.empty() || width == 0 || values.size() % width != 0) {
    throw std::invalid_argument(label_ + ": append: " + std::to_string(values.size()) +
                                " values are not whole rows of " + std::to_string(width));
  }
  if (values.empty()) return;
  const Op op(Op::kWrites, label_, "append");
  std::vector<hsize_t> start(old.size(), 0);
  std::vector<hsize_t> count(old.begin(), old.end());
  start[0] = old[0];
  count[0] = values.size() / width;
  std::vector<hsize_t> grown(old.begin(), old.end());
  grown[0] += count[0];
  if (H5Dset_extent(handle_.id(), grown.data()) < 0) {
    throw std::invalid_argument(label_ + ": append: the dataset cannot grow");
  }
  const Handle in_file(op.id(H5Dget_space(handle_.id())));
  op.ok(H5Sselect_hyperslab(in_file.id(), H5S_SELECT_SET, start.data(), nullptr, count.data(),
                            nullptr));
  const Handle in_memory = space_of(op, count);
  if constexpr (std::is_same_v<T, std::string>) {
    const std::vector<const char*> pointers = pointers_to(values);
    op.ok(H5Dwrite(handle_.id(), string_type(op).id(), in_memory.id(), in_file.id(), H5P_DEFAULT,
                   pointers.data()));
  } else {
    op.ok(H5Dwrite(handle_.id(), memory_type<T>(), in_memory.id(), in_file.id(), H5P_DEFAULT,
                   values.data()));
  }
}

template <class T>
std::vector<T> Dataset::read() const {
  const Op op(Op::kReads, label_, "read");
  const Handle space(op.id(H5Dget_space(handle_.id())));
  const std::uint64_t count = product(dims_of(op, space.id()));
  const auto read_into = [&](hid_t type, void* out) {
    return H5Dread(handle_.id(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, out);
  };
  if constexpr (std::is_same_v<T, std::string>) {
    const Handle type(op.id(H5Dget_type(handle_.id())));
    return read_strings(op, type.id(), space.id(), count, read_into);
  } else {
    std::vector<T> out(count);
    if (count > 0) op.ok(read_into(memory_type<T>(), out.data()));
    return out;
  }
}

// ---- Group: children ------------------------------------------------------------------------------------------------

std::string Group::label_of(std::string_view name) const {
  return label_ + ": " + std::string(name);
}

Group Group::group(std::string_view name) {
  if (has(name)) return open_group(name);
  const Op op(Op::kWrites, label_of(name), "create group");
  const Handle links(op.id(H5Pcreate(H5P_LINK_CREATE)));
  op.ok(H5Pset_create_intermediate_group(links.id(), 1));
  Handle made(op.id(
      H5Gcreate2(handle_.id(), std::string(name).c_str(), links.id(), H5P_DEFAULT, H5P_DEFAULT)));
  return Group(std::move(made), label_of(name));
}

Group Group::open_group(std::string_view name) const {
  const Op op(Op::kReads, label_of(name), "open group");
  Handle opened(op.id(H5Gopen2(handle_.id(), std::string(name).c_str(), H5P_DEFAULT)));
  return Group(std::move(opened), label_of(name));
}

bool Group::has(std::string_view name) const {
  const Op op(Op::kReads, label_of(name), "look up");
  // H5Lexists fails where a group on the way is missing, so each step is asked for.
  for (std::size_t end = name.find('/');; end = name.find('/', end + 1)) {
    const std::string path(name.substr(0, end));
    if (!path.empty()) {
      const htri_t exists = H5Lexists(handle_.id(), path.c_str(), H5P_DEFAULT);
      op.ok(exists);
      if (exists == 0) return false;
    }
    if (end == std::string_view::npos) return true;
  }
}

std::vector<std::string> Group::names() const {
  const Op op(Op::kReads, label_, "list");
  H5G_info_t info;
  op.ok(H5Gget_info(handle_.id(), &info));
  std::vector<std::string> names;
  for (hsize_t i = 0; i < info.nlinks; ++i) {
    const auto get = [&](char* out, std::size_t size) {
      return H5Lget_name_by_idx(handle_.id(), ".", H5_INDEX_NAME, H5_ITER_INC, i, out, size,
                                H5P_DEFAULT);
    };
    const ssize_t length = get(nullptr, 0);
    if (length < 0) op.fail();
    std::string name(static_cast<std::size_t>(length) + 1, '\0');
    if (get(name.data(), name.size()) < 0) op.fail();
    name.pop_back();
    names.push_back(std::move(name));
  }
  return names;
}

// ---- Group: attributes ----------------------------------------------------------------------------------------------

void Group::set(std::string_view name, std::string_view value) {
  const Op op(Op::kWrites, label_of(name), "write attribute");
  const Handle type = string_type(op);
  const Handle space(op.id(H5Screate(H5S_SCALAR)));
  const std::string text(value);
  const char* pointer = text.c_str();
  write_attribute(op, handle_.id(), std::string(name), type.id(), type.id(), space, &pointer,
                  false);
}

void Group::set(std::string_view name, double value) {
  write_number(Op(Op::kWrites, label_of(name), "write attribute"), handle_.id(), name, value);
}
void Group::set(std::string_view name, std::int64_t value) {
  write_number(Op(Op::kWrites, label_of(name), "write attribute"), handle_.id(), name, value);
}
void Group::set(std::string_view name, std::uint64_t value) {
  write_number(Op(Op::kWrites, label_of(name), "write attribute"), handle_.id(), name, value);
}

void Group::set(std::string_view name, const std::vector<std::string>& values) {
  const Op op(Op::kWrites, label_of(name), "write attribute");
  const Handle type = string_type(op);
  const std::vector<const char*> pointers = pointers_to(values);
  write_attribute(op, handle_.id(), std::string(name), type.id(), type.id(),
                  space_of(op, {values.size()}), pointers.data(), values.empty());
}

void Group::set(std::string_view name, const std::vector<double>& values) {
  write_numbers(Op(Op::kWrites, label_of(name), "write attribute"), handle_.id(), name, values);
}
void Group::set(std::string_view name, const std::vector<std::int64_t>& values) {
  write_numbers(Op(Op::kWrites, label_of(name), "write attribute"), handle_.id(), name, values);
}

bool Group::has_attribute(std::string_view name) const {
  const Op op(Op::kReads, label_of(name), "look up attribute");
  const htri_t exists = H5Aexists(handle_.id(), std::string(name).c_str());
  op.ok(exists);
  return exists > 0;
}

std::vector<std::string> Group::strings_attribute(std::string_view name) const {
  const Op op(Op::kReads, label_of(name), "read attribute");
  return read_attribute_strings(op, handle_.id(), name);
}
std::vector<double> Group::doubles_attribute(std::string_view name) const {
  const Op op(Op::kReads, label_of(name), "read attribute");
  return read_numbers<double>(op, handle_.id(), name);
}
std::vector<std::int64_t> Group::ints_attribute(std::string_view name) const {
  const Op op(Op::kReads, label_of(name), "read attribute");
  return read_numbers<std::int64_t>(op, handle_.id(), name);
}
std::string Group::string_attribute(std::string_view name) const {
  return only(Op(Op::kReads, label_of(name), "read attribute"), strings_attribute(name));
}
double Group::double_attribute(std::string_view name) const {
  return only(Op(Op::kReads, label_of(name), "read attribute"), doubles_attribute(name));
}
std::int64_t Group::int_attribute(std::string_view name) const {
  return only(Op(Op::kReads, label_of(name), "read attribute"), ints_attribute(name));
}

// ---- Group: datasets ------------------------------------------------------------------------------------------------

template <class T>
void Group::write(std::string_view name, std::span<const T> values) {
  write(name, values, 0);
}

template <class T>
void Group::write(std::string_view name, std::span<const T> values, std::uint64_t cols) {
  if (cols > 0 && values.size() % cols != 0) {
    throw std::invalid_argument(label_of(name) + ": write: " + std::to_string(values.size()) +
                                " values are not whole rows of " + std::to_string(cols));
  }
  const bool replaces = has(name);
  const Op op(Op::kWrites, label_of(name), "write");
  const std::string path(name);
  if (replaces) op.ok(H5Ldelete(handle_.id(), path.c_str(), H5P_DEFAULT));
  const Handle space =
      cols > 0 ? space_of(op, {values.size() / cols, cols}) : space_of(op, {values.size()});
  const auto create = [&](hid_t stored) {
    return Handle(op.id(H5Dcreate2(handle_.id(), path.c_str(), stored, space.id(), H5P_DEFAULT,
                                   H5P_DEFAULT, H5P_DEFAULT)));
  };
  const auto put = [&](const Handle& to, hid_t memory, const void* data) {
    if (!values.empty()) op.ok(H5Dwrite(to.id(), memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, data));
  };
  if constexpr (std::is_same_v<T, std::string>) {
    const Handle type = string_type(op);
    put(create(type.id()), type.id(), pointers_to(values).data());
  } else {
    put(create(file_type<T>()), memory_type<T>(), values.data());
  }
}

template <class T>
Dataset Group::create(std::string_view name, std::uint64_t cols, std::uint64_t chunk_rows) {
  const Op op(Op::kWrites, label_of(name), "create dataset");
  std::vector<hsize_t> dims{0}, max_dims{H5S_UNLIMITED}, chunk{std::max<hsize_t>(chunk_rows, 1)};
  if (cols > 0) {
    for (auto* list : {&dims, &max_dims, &chunk}) list->push_back(cols);
  }
  const Handle space = space_of(op, dims, max_dims);
  const Handle layout(op.id(H5Pcreate(H5P_DATASET_CREATE)));
  op.ok(H5Pset_chunk(layout.id(), static_cast<int>(chunk.size()), chunk.data()));
  Handle text;
  hid_t type = -1;
  if constexpr (std::is_same_v<T, std::string>) {
    text = string_type(op);
    type = text.id();
  } else {
    type = file_type<T>();
  }
  Handle made(op.id(H5Dcreate2(handle_.id(), std::string(name).c_str(), type, space.id(),
                               H5P_DEFAULT, layout.id(), H5P_DEFAULT)));
  return Dataset(std::move(made), label_of(name));
}

Dataset Group::open(std::string_view name) const {
  const Op op(Op::kReads, label_of(name), "open dataset");
  Handle opened(op.id(H5Dopen2(handle_.id(), std::string(name).c_str(), H5P_DEFAULT)));
  return Dataset(std::move(opened), label_of(name));
}

// ---- File -----------------------------------------------------------------------------------------------------------

File File::create(const std::string& path) {
  const Op op(Op::kWrites, path, "create");
  const Handle access = access_list(op);
  Handle made(op.id(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.id())));
  return File(std::move(made), path);
}

File File::open(const std::string& path) {
  const Op op(Op::kReads, path, "open");
  const Handle access = access_list(op);
  Handle opened(op.id(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.id())));
  return File(std::move(opened), path);
}

File File::create_in_memory(const std::string& name) {
  const Op op(Op::kWrites, name, "create in memory");
  constexpr std::size_t kGrowth = 1 << 20;
  const Handle access(op.id(H5Pcreate(H5P_FILE_ACCESS)));
  op.ok(H5Pset_fapl_core(access.id(), kGrowth, false));
  Handle made(op.id(H5Fcreate(name.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.id())));
  return File(std::move(made), name);
}

Group File::root() const {
  const Op op(Op::kReads, name_, "open root group");
  Handle opened(op.id(H5Gopen2(handle_.id(), "/", H5P_DEFAULT)));
  return Group(std::move(opened), name_);
}

void File::flush() {
  const Op op(Op::kWrites, name_, "flush");
  op.ok(H5Fflush(handle_.id(), H5F_SCOPE_GLOBAL));
}

std::uint64_t File::bytes() const {
  const Op op(Op::kReads, name_, "measure");
  op.ok(H5Fflush(handle_.id(), H5F_SCOPE_GLOBAL));
  const ssize_t size = H5Fget_file_image(handle_.id(), nullptr, 0);
  if (size < 0) op.fail();
  return static_cast<std::uint64_t>(size);
}

void File::snapshot(const std::string& path) const {
  const Op op(Op::kWrites, name_, "take snapshot");
  std::vector<std::byte> image(bytes());
  const ssize_t got = H5Fget_file_image(handle_.id(), image.data(), image.size());
  if (got < 0 || static_cast<std::size_t>(got) != image.size()) op.fail();
  AtomicFile file(path);
  file.write(image);
  file.commit();
}

// ---- the types of datasets ------------------------------------------------------------------------------------------

#define K3_H5_INSTANTIATE(T)                                                          \
  template void Dataset::append<T>(std::span<const T>);                               \
  template std::vector<T> Dataset::read<T>() const;                                   \
  template void Group::write<T>(std::string_view, std::span<const T>);                \
  template void Group::write<T>(std::string_view, std::span<const T>, std::uint64_t); \
  template Dataset Group::create<T>(std::string_view, std::uint64_t, std::uint64_t)

K3_H5_INSTANTIATE(float);
K3_H5_INSTANTIATE(double);
K3_H5_INSTANTIATE(std::int32_t);
K3_H5_INSTANTIATE(std::int64_t);
K3_H5_INSTANTIATE(std::uint64_t);
K3_H5_INSTANTIATE(std::string);

}  // namespace k3::h5
