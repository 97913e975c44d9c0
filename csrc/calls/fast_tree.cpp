#include "calls/fast_tree.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>

#include "arrays/array_sources.h"
#include "arrays/device_copies.h"
#include "arrays/free_threading.h"
#include "calls/fast_views.h"
#include "collectives/recursive_run.h"
#include "communicator/fused_collectives.h"
#include "core/error.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace {

// Bounds the recursion, which would not end in a container that holds itself.
constexpr int kDeepest = 50;

bool is_container(PyObject* node) {
  // Exact types only: `copy_of` makes plain containers, so a subclass would lose its class.
  return PyDict_CheckExact(node) || PyList_CheckExact(node) || PyTuple_CheckExact(node);
}

/// The entries of a dict or list as they are now. Where other threads run, `own` gets a copy, which they cannot change.
PyObject* entries_of(PyObject* node, py::object& own) {
  if constexpr (!kFreeThreaded) return node;
  own = py::reinterpret_steal<py::object>(PyDict_CheckExact(node) ? PyDict_Copy(node) : PyList_AsTuple(node));
  if (!own) throw py::error_already_set();
  return own.ptr();
}

std::uint64_t hash_of(std::string_view text) {
  std::uint64_t h = 0xcbf2'9ce4'8422'2325 ^ text.size();  // FNV-1a, eight bytes at a time
  while (!text.empty()) {
    std::uint64_t word = 0;
    const std::size_t n = std::min(text.size(), sizeof word);
    std::memcpy(&word, text.data(), n);
    h = (h ^ word) * 0x0000'0100'0000'01b3;
    h ^= h >> 29;
    text.remove_prefix(n);
  }
  return h;
}

py::object copy_of(PyObject* node) {
  if (PyDict_CheckExact(node)) {
    auto copy = py::reinterpret_steal<py::object>(PyDict_Copy(node));
    PyObject *key = nullptr, *value = nullptr;
    // Over the copy, which no other thread has: a dict may get new values for its keys meanwhile.
    for (Py_ssize_t at = 0; PyDict_Next(copy.ptr(), &at, &key, &value) != 0;) {
      if (is_container(value)) PyDict_SetItem(copy.ptr(), key, copy_of(value).ptr());
    }
    return copy;
  }
  if (PyList_CheckExact(node)) {
    auto copy = py::reinterpret_steal<py::object>(PyList_GetSlice(node, 0, PY_SSIZE_T_MAX));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(copy.ptr()); ++i) {
      PyObject* const entry = PyList_GET_ITEM(copy.ptr(), i);
      if (is_container(entry)) PyList_SetItem(copy.ptr(), i, copy_of(entry).release().ptr());
    }
    return copy;
  }
  if (PyTuple_CheckExact(node)) {
    py::tuple copy(static_cast<std::size_t>(PyTuple_GET_SIZE(node)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(node); ++i) {
      PyTuple_SET_ITEM(copy.ptr(), i, copy_of(PyTuple_GET_ITEM(node, i)).release().ptr());
    }
    return copy;
  }
  return py::reinterpret_borrow<py::object>(node);
}

/// After a failure other ranks may still write into the leaves: they are kept for good.
template <class Action>
void run_on(const py::object& object, Action action) {
  const auto& tree = object.cast<const FastTree&>();
  try {
    const py::gil_scoped_release no_gil;
    action(tree.leaves());
  } catch (const InvalidArgumentError&) {  // nothing has started
    throw;
  } catch (...) {
    object.inc_ref();
    throw;
  }
  tree.bump_versions();
}

}  // namespace

std::unique_ptr<FastTree> FastTree::of(const py::object& tree, int device) {
  if (!is_container(tree.ptr())) return nullptr;
  std::unique_ptr<FastTree> plain(new FastTree(tree, device));
  if (!plain->visit(tree.ptr(), 0) || !plain->leaves_do_not_overlap()) return nullptr;
  for (const Array& array : plain->arrays_) plain->buffers_.push_back(array->buffer());
  return plain;
}

bool FastTree::visit(PyObject* node, int depth) {
  if (depth > kDeepest) return false;
  if (PyDict_CheckExact(node)) return visit_dict(node, depth);
  const bool is_list = PyList_CheckExact(node);
  if (!is_list && !PyTuple_CheckExact(node)) return add_leaf(node);
  py::object own;
  PyObject* const entries = is_list ? entries_of(node, own) : node;
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(entries);
  // [a, [b]] and [[a], b] have the same leaves, but must not have the same digest.
  mix_container(n, is_list ? Kind::list : Kind::tuple);
  for (Py_ssize_t i = 0; i < n; ++i) {
    if (!visit(PySequence_Fast_GET_ITEM(entries, i), depth + 1)) return false;
  }
  return true;
}

bool FastTree::visit_dict(PyObject* given, int depth) {
  py::object own;
  PyObject* const node = entries_of(given, own);
  std::vector<std::pair<std::string_view, PyObject*>> items;
  items.reserve(static_cast<std::size_t>(PyDict_GET_SIZE(node)));
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(node, &at, &key, &value) != 0;) {  // a step has pushed them out of the cache
    for (const auto* object : {key, value}) {
      __builtin_prefetch(object);
      __builtin_prefetch(reinterpret_cast<const char*>(object) + 64);
    }
  }
  for (Py_ssize_t at = 0; PyDict_Next(node, &at, &key, &value) != 0;) {
    Py_ssize_t nbytes = 0;
    const char* const text = PyUnicode_CheckExact(key) ? PyUnicode_AsUTF8AndSize(key, &nbytes) : nullptr;
    if (text == nullptr) {
      PyErr_Clear();  // half a surrogate pair
      return false;
    }
    items.emplace_back(std::string_view(text, static_cast<std::size_t>(nbytes)), value);
  }
  const auto by_key = [](const auto& a, const auto& b) { return a.first < b.first; };  // UTF-8 sorts as code points do
  if (!std::is_sorted(items.begin(), items.end(), by_key)) std::sort(items.begin(), items.end(), by_key);
  mix_container(PyDict_GET_SIZE(node), Kind::dict);
  for (const auto& [name, child] : items) {
    mix(hash_of(name));
    if (!visit(child, depth + 1)) return false;
  }
  return true;
}

bool FastTree::add_leaf(PyObject* object) {
  constinit static CachedAttribute numpy_array("numpy", "ndarray");
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != numpy_array.get() && !sources::facts_of(Py_TYPE(object)).torch)
    return false;
  Array array;
  if (borrow_anywhere(object, /*written=*/true, array) == nullptr) return false;
  const bool on_device = array->device.kind != DeviceKind::cpu;
  if (on_device && (device_ < 0 || array->device.index != device_)) return false;
  if (arrays_.empty()) on_device_ = on_device;
  if (on_device != on_device_) return false;
  mix(std::uint64_t{static_cast<std::uint8_t>(array->dtype)} << 8 | static_cast<std::uint8_t>(array->n_dims) |
      std::uint64_t{on_device} << 16);
  for (int i = 0; i < array->n_dims; ++i) mix(static_cast<std::uint64_t>(array->shape[i]));
  objects_.push_back(py::reinterpret_borrow<py::object>(object));
  arrays_.push_back(std::move(array));
  return true;
}

bool FastTree::leaves_do_not_overlap() const {
  std::vector<std::pair<const std::byte*, const std::byte*>> runs;
  for (const Array& array : arrays_) {
    const auto* const begin = static_cast<const std::byte*>(array->data);
    if (array->count != 0) runs.emplace_back(begin, begin + array->nbytes());
  }
  if (!std::is_sorted(runs.begin(), runs.end())) std::sort(runs.begin(), runs.end());
  // If any two runs overlap, so do two adjacent ones in this order. One array under two names overlaps, too: the
  // general path sends it once.
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].first < runs[i - 1].second) return false;
  }
  return true;
}

py::list FastTree::objects() const {
  py::list objects;
  for (const py::object& object : objects_) objects.append(object);
  return objects;
}

bool FastTree::has_integers() const {
  return std::ranges::any_of(buffers_, [](const Buffer& buffer) { return is_integer(buffer.dtype); });
}

bool FastTree::is_list_of_alike() const {
  if (PyDict_CheckExact(tree_.ptr()) || buffers_.empty()) return false;
  const auto entries = py::reinterpret_steal<py::object>(PySequence_Fast(tree_.ptr(), "no list"));
  const std::span items(PySequence_Fast_ITEMS(entries.ptr()),
                        static_cast<std::size_t>(PySequence_Fast_GET_SIZE(entries.ptr())));
  const Buffer& first = buffers_[0];
  return items.size() == buffers_.size() && std::ranges::none_of(items, is_container) &&
         std::ranges::all_of(buffers_, [&](const Buffer& buffer) {
           return buffer.dtype == first.dtype && buffer.count == first.count;
         });
}

py::object FastTree::copy() const { return copy_of(tree_.ptr()); }

void FastTree::bump_versions() const {
  for (const py::object& object : objects_) samestep::bump_version(object.ptr());
}

void bind_fast_tree(py::module_& m) {
  py::class_<FastTree>(m, "FastTree", "A tree of arrays that can be read and written as they lie.")
      .def_property_readonly("digest", &FastTree::digest)
      .def_property_readonly("leaves", &FastTree::objects)
      .def_property_readonly("on_device", &FastTree::on_device)
      .def_property_readonly("has_integers", &FastTree::has_integers)
      .def("copy", &FastTree::copy);
  m.attr("MIN_UNPACKED_BYTES") = FusedCollectives::kMinUnpackedBytes;
  m.attr("TREE_BUCKET_BYTES") = kTreeBucketBytes;
  m.def("fast_tree", &FastTree::of, "tree"_a, "device"_a = -1,
        "A FastTree, or None where a container, key or leaf is not what most trees are made of. All leaves are in host "
        "memory, or all on this device.");
  py::class_<FusedCollectives>(m, "FusedCollectives",
                               "Collectives over plain trees; see csrc/communicator/fused_collectives.h.")
      .def(py::init<std::shared_ptr<Communicator>>(), "communicator"_a)
      .def(
          "bcast",
          [](FusedCollectives& self, const py::object& tree, int root, double timeout) {
            run_on(tree, [&](auto& leaves) { self.bcast(leaves, root, Deadline::after(Seconds(timeout))); });
          },
          "tree"_a, "root"_a, "timeout"_a)
      .def(
          "allreduce",
          [](FusedCollectives& self, const py::object& tree, int op, double factor, double timeout, double divisor) {
            const Reduction reduction{static_cast<ReduceOp>(op), factor, divisor};
            run_on(tree, [&](auto& leaves) { self.allreduce(leaves, reduction, Deadline::after(Seconds(timeout))); });
          },
          "tree"_a, "op"_a, "factor"_a, "timeout"_a, "divisor"_a = 1.0)
      .def(
          "allreduce_list",
          [](FusedCollectives& self, const py::object& tree, int op, double factor, double timeout) {
            const auto& given = tree.cast<const FastTree&>();
            const Reduction reduction{static_cast<ReduceOp>(op), factor};
            if (!given.is_list_of_alike()) return false;
            require_reducible(given.leaves()[0].dtype, reduction);
            if (!RecursiveRun::supports(given.leaves()[0].dtype, reduction.op)) return false;
            run_on(tree,
                   [&](auto& leaves) { self.allreduce_list(leaves, reduction, Deadline::after(Seconds(timeout))); });
            return true;
          },
          "tree"_a, "op"_a, "factor"_a, "timeout"_a, "False, without effect, for other trees, dtypes and operators.");
}

}  // namespace samestep
