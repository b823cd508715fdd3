#include "loader/h5_content.h"

#include <hdf5.h>
#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

namespace k3::h5 {
namespace {

static_assert(std::endian::native == std::endian::little, "values are handed on as they lie");

// Owns one identifier of any kind.
class Id {
 public:
  explicit Id(hid_t id) : id_(id) {}
  Id(Id&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
  Id& operator=(Id&&) = delete;
  ~Id() {
    if (id_ >= 0) H5Idec_ref(id_);
  }
  operator hid_t() const { return id_; }

 private:
  hid_t id_;
};

class Visitor {
 public:
  Visitor(std::string path, const ContentSink& sink) : path_(std::move(path)), sink_(sink) {
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }

  void file() {
    const Id f = id(H5Fopen(path_.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), "/", "cannot be opened");
    const Id root = id(H5Gopen2(f, "/", H5P_DEFAULT), "/", "cannot be opened");
    group(root, "/");
  }

 private:
  [[noreturn]] void fail(const std::string& at, const std::string& what) const {
    throw std::invalid_argument(path_ + ": " + at + ": " + what);
  }
  Id id(hid_t value, const std::string& at, const char* what) const {
    if (value < 0) fail(at, what);
    return Id(value);
  }
  void ok(herr_t status, const std::string& at) const {
    if (status < 0) fail(at, "cannot be read");
  }

  void raw(const void* data, std::size_t n) { sink_({static_cast<const std::byte*>(data), n}); }
  void number(std::uint64_t v) { raw(&v, sizeof v); }
  void field(std::string_view text) {
    number(text.size());
    raw(text.data(), text.size());
  }

  void group(hid_t g, const std::string& at) {
    field("group");
    field(at);
    attributes(g, at);
    for (const std::string& name : children(g, at)) {
      const std::string child = at == "/" ? "/" + name : at + "/" + name;
      H5L_info_t link;
      ok(H5Lget_info(g, name.c_str(), &link, H5P_DEFAULT), child);
      if (link.type != H5L_TYPE_HARD) fail(child, "is a link; expected what it stands for");
      const Id object = id(H5Oopen(g, name.c_str(), H5P_DEFAULT), child, "cannot be opened");
      switch (H5Iget_type(object)) {
        case H5I_GROUP:
          group(object, child);
          break;
        case H5I_DATASET:
          dataset(object, child);
          break;
        default:
          fail(child, "is neither group nor dataset");
      }
    }
  }

  std::vector<std::string> children(hid_t g, const std::string& at) const {
    H5G_info_t info;
    ok(H5Gget_info(g, &info), at);
    std::vector<std::string> names;
    for (hsize_t i = 0; i < info.nlinks; ++i) {
      const auto get = [&](char* out, std::size_t room) {
        return H5Lget_name_by_idx(g, ".", H5_INDEX_NAME, H5_ITER_INC, i, out, room, H5P_DEFAULT);
      };
      names.push_back(name_of(get, at));
    }
    return names;
  }

  template <class Get>
  std::string name_of(const Get& get, const std::string& at) const {
    const ssize_t n = get(nullptr, 0);
    if (n < 0) fail(at, "a name cannot be read");
    std::string name(static_cast<std::size_t>(n) + 1, '\0');
    if (get(name.data(), name.size()) < 0) fail(at, "a name cannot be read");
    name.pop_back();
    return name;
  }

  void attributes(hid_t object, const std::string& at) {
    const int n = H5Aget_num_attrs(object);
    if (n < 0) fail(at, "attributes cannot be counted");
    std::vector<std::string> names;
    for (hsize_t i = 0; i < static_cast<hsize_t>(n); ++i) {
      const auto get = [&](char* out, std::size_t room) {
        return H5Aget_name_by_idx(object, ".", H5_INDEX_NAME, H5_ITER_INC, i, out, room,
                                  H5P_DEFAULT);
      };
      names.push_back(name_of(get, at));
    }
    for (const std::string& name : names) {
      const std::string label = at + "@" + name;
      const Id a = id(H5Aopen(object, name.c_str(), H5P_DEFAULT), label, "cannot be opened");
      field("attribute");
      field(name);
      values(Id(H5Aget_type(a)), Id(H5Aget_space(a)), label,
             [&](hid_t type, void* out) { return H5Aread(a, type, out); });
    }
  }

  void dataset(hid_t d, const std::string& at) {
    field("dataset");
    field(at);
    values(Id(H5Dget_type(d)), Id(H5Dget_space(d)), at, [&](hid_t type, void* out) {
      return H5Dread(d, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, out);
    });
    attributes(d, at);
  }

  template <class Read>
  void values(const Id& type, const Id& space, const std::string& at, const Read& read) {
    if (type < 0 || space < 0) fail(at, "has no type or shape");
    const H5T_class_t kind = H5Tget_class(type);
    const std::size_t bytes = H5Tget_size(type);
    const hssize_t n_point = H5Sget_simple_extent_npoints(space);
    if (n_point < 0) fail(at, "has no shape");
    const auto n = static_cast<std::size_t>(n_point);
    if (kind == H5T_STRING) {
      field("s");
      shape(space, at);
      strings(type, space, n, at, read);
      return;
    }
    const bool whole = kind == H5T_INTEGER;
    if ((!whole && kind != H5T_FLOAT) || bytes > 8) {
      fail(at, "has a type that is neither number nor text");
    }
    const char mark = !whole ? 'f' : H5Tget_sign(type) == H5T_SGN_NONE ? 'u' : 'i';
    field(std::string(1, mark) + std::to_string(bytes));
    shape(space, at);
    const Id little(H5Tcopy(type));
    ok(H5Tset_order(little, H5T_ORDER_LE), at);
    std::vector<std::byte> data(n * bytes);
    if (n > 0) ok(read(little, data.data()), at);
    raw(data.data(), data.size());
  }

  void shape(const Id& space, const std::string& at) {
    const int n_axis = H5Sget_simple_extent_ndims(space);
    if (n_axis < 0) fail(at, "has no shape");
    std::vector<hsize_t> dims(static_cast<std::size_t>(n_axis));
    if (n_axis > 0) ok(H5Sget_simple_extent_dims(space, dims.data(), nullptr), at);
    number(dims.size());
    for (const hsize_t d : dims) number(d);
  }

  template <class Read>
  void strings(const Id& type, const Id& space, std::size_t n, const std::string& at,
               const Read& read) {
    if (n == 0) return;
    if (H5Tis_variable_str(type) > 0) {
      const Id memory(H5Tcopy(type));
      std::vector<char*> texts(n, nullptr);
      ok(read(memory, texts.data()), at);
      for (const char* t : texts) field(t == nullptr ? std::string_view() : std::string_view(t));
      H5Dvlen_reclaim(memory, space, H5P_DEFAULT, texts.data());
      return;
    }
    const std::size_t room = H5Tget_size(type);
    std::vector<char> texts(n * room);
    ok(read(type, texts.data()), at);
    for (std::size_t i = 0; i < n; ++i) {
      const char* t = texts.data() + i * room;
      field({t, strnlen(t, room)});
    }
  }

  std::string path_;
  const ContentSink& sink_;
};

}  // namespace

void visit_content(const std::string& path, const ContentSink& sink) { Visitor(path, sink).file(); }

}  // namespace k3::h5
