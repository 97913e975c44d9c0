#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "arrays/array_view.h"
#include "communicator/signature.h"
#include "core/buffer.h"

namespace samestep {

/// A tree of the usual kind: dicts with string keys, lists and tuples, whose leaves are writable contiguous NumPy
/// arrays and torch tensors, without aliases, all in host memory or all on one device. Other trees are handled in
/// Python.
class FastTree {
 public:
  /// Null if `tree` is no plain tree. `device`: the one on which its leaves may be; -1 for none. With the GIL held.
  static std::unique_ptr<FastTree> of(const pybind11::object& tree, int device = -1);

  /// The leaves in the order of samestep.trees: dicts by sorted key.
  const std::vector<Buffer>& leaves() const { return buffers_; }
  /// The same leaves as objects of Python.
  pybind11::list objects() const;
  bool on_device() const { return on_device_; }
  /// 64 bits of names, dtypes, shapes and the kind of memory: the same on ranks that hold the same tree.
  std::uint64_t digest() const { return digest_; }
  bool has_integers() const;
  /// Whether the tree is a list or tuple of arrays of one dtype and length.
  bool is_list_of_alike() const;

  /// New containers around the same leaves.
  pybind11::object copy() const;
  /// See samestep::bump_version, for every leaf.
  void bump_versions() const;

 private:
  FastTree(pybind11::object tree, int device) : tree_(std::move(tree)), device_(device) {}
  bool visit(PyObject* node, int depth);
  bool visit_dict(PyObject* given, int depth);
  bool add_leaf(PyObject* object);
  bool leaves_do_not_overlap() const;
  enum class Kind : std::uint8_t { list = 0xfd, tuple, dict };  // more than an array has dimensions, see `add_leaf`
  void mix_container(Py_ssize_t n_entries, Kind kind) {
    mix(static_cast<std::uint64_t>(n_entries) << 8 | static_cast<std::uint8_t>(kind));
  }
  void mix(std::uint64_t word) { digest_ = samestep::mix(digest_, word); }

  pybind11::object tree_;
  int device_;
  bool on_device_ = false;
  std::vector<pybind11::object> objects_;  // the tree may lose some meanwhile, to another thread
  std::vector<Array> arrays_;
  std::vector<Buffer> buffers_;
  std::uint64_t digest_ = 0;
};

}  // namespace samestep
