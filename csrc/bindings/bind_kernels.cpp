#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arrays/array_view.h"
#include "arrays/device_copies.h"
#include "core/error.h"
#include "core/format.h"
#include "kernels/divide.h"
#include "kernels/hash128.h"
#include "kernels/weighted_sum.h"

namespace samestep {

namespace py = pybind11;

namespace {

constexpr std::size_t kWithoutGilAbove = 64 * 1024;  // bytes; below, giving the GIL away costs more than the work

/// The same leaf of one or two trees.
struct Leaf {
  std::optional<DType> dtype;
  std::vector<kernels::WeightedTerm> terms;
};

/// Flat memory of `count` sums.
Array view_flat(const py::handle& object, const char* what, std::size_t count) {
  Array flat = view_of(object.ptr(), what);
  if (!flat->contiguous || flat->device.kind != DeviceKind::cpu || static_cast<std::size_t>(flat->count) != count) {
    throw InvalidArgumentError(str(what, ": needs ", count, " contiguous elements in host memory"));
  }
  return flat;
}

/// Collects the weighted arrays of each leaf, and keeps their memory alive.
class WeightedLeaves {
 public:
  WeightedLeaves(std::size_t n_leaves, DType wide) : leaf_terms_(n_leaves), wide_(wide) {}

  void add(std::size_t i, PyObject* object, double weight, std::size_t count) {
    // A leaf may be None. Without any term or sum the kernel writes what changes no sum.
    if (object == Py_None) return;
    Array array = view_of(object);
    require_reachable(object, array.mutable_view(), /*in_any_order=*/true);
    Leaf& leaf = leaf_terms_[i];
    const bool fits = kernels::sum_dtype(array->dtype) == wide_ &&
                      kernels::sum_words(array->dtype) * static_cast<std::size_t>(array->count) == count;
    if (!fits || leaf.dtype.value_or(array->dtype) != array->dtype) {
      throw InvalidArgumentError(str("add_weighted: leaf ", i, " does not fit its place of ", count, " elements"));
    }
    leaf.dtype = array->dtype;
    leaf.terms.push_back({data_of(array.view()), weight});
    arrays_.push_back(std::move(array));
  }
  const std::vector<Leaf>& leaves() const { return leaf_terms_; }

  bool needs_copies() const { return !copied_.empty(); }
  /// To be called before the terms are read, and without the GIL: a device may be waited for.
  void copy() {
    await_streams(copied_);
    DeviceCopies copies;
    for (std::size_t i = 0; i < copied_.size(); ++i) {
      if (copied_[i].nbytes() != 0) pack_elements(copied_[i], copies_[i].get(), copies);
    }
    copies.finish();
  }

 private:
  /// Where the elements will be once `copy` has returned.
  const void* data_of(const ArrayView& view) {
    if (view.contiguous && view.device.kind == DeviceKind::cpu) return view.data;
    copied_.push_back(view);
    copies_.push_back(std::make_unique<std::byte[]>(view.nbytes()));
    return copies_.back().get();
  }

  std::vector<Leaf> leaf_terms_;
  DType wide_;
  std::vector<Array> arrays_;
  std::vector<ArrayView> copied_;  // those that cannot be added where they lie
  std::vector<std::unique_ptr<std::byte[]>> copies_;
};

void add_weighted(const std::vector<std::pair<py::list, double>>& trees, const std::vector<std::size_t>& starts,
                  const py::list& sums, const py::object& out) {
  const std::size_t n_leaves = starts.size() - 1, count = starts.back();
  const Array result = view_flat(out, "add_weighted: out", count);
  require_writable(result.view(), "add_weighted: out");
  std::vector<Array> added;
  for (const py::handle& sum : sums) {
    added.push_back(view_flat(sum, "add_weighted: sums", count));
    if (added.back()->dtype != result->dtype) throw InvalidArgumentError("add_weighted: sums and out differ in dtype");
  }
  WeightedLeaves weighted(n_leaves, result->dtype);
  for (const auto& [leaves, weight] : trees) {
    if (leaves.size() != n_leaves) throw InvalidArgumentError("add_weighted: trees differ in their leaves");
    for (std::size_t i = 0; i < n_leaves; ++i) {
      const py::object leaf = leaves[i];
      weighted.add(i, leaf.ptr(), weight, starts[i + 1] - starts[i]);
    }
  }
  // The arrays that hold references are declared before, so they are released after the GIL has been taken again.
  std::optional<py::gil_scoped_release> no_gil;
  if (weighted.needs_copies() || result->nbytes() > kWithoutGilAbove) no_gil.emplace();
  weighted.copy();
  std::vector<const void*> parts(added.size());
  for (std::size_t i = 0; i < n_leaves; ++i) {
    const std::size_t offset = starts[i] * itemsize(result->dtype);
    for (std::size_t k = 0; k < added.size(); ++k) parts[k] = static_cast<const std::byte*>(added[k]->data) + offset;
    const Leaf& leaf = weighted.leaves()[i];
    kernels::add_weighted(leaf.dtype.value_or(result->dtype), leaf.terms, parts,
                          static_cast<std::byte*>(result->data) + offset, starts[i + 1] - starts[i]);
  }
}

bool divide_in_place(const py::object& flat, double divisor) {
  const Array array = view_of(flat.ptr(), "divide_in_place");
  const bool fits = array->contiguous && array->device.kind == DeviceKind::cpu;
  const bool whole = array->dtype == DType::int64;
  if (!fits || (!whole && array->dtype != DType::float32 && array->dtype != DType::float64)) {
    throw InvalidArgumentError("divide_in_place: needs contiguous sums in host memory");
  }
  require_writable(array.view(), "divide_in_place");
  std::optional<py::gil_scoped_release> no_gil;
  if (array->nbytes() > kWithoutGilAbove) no_gil.emplace();
  const auto count = static_cast<std::size_t>(array->count);
  if (!whole) return kernels::divide_in_place(array->dtype, array->data, count, divisor);
  kernels::divide_integers(array->data, count, divisor);
  return true;
}

py::bytes hash_of(const py::object& object) {
  const Array array = view_of(object.ptr());
  const ArrayView& view = array.view();
  // Bytes are hashed as they lie: those between the elements would count as well.
  if (!view.contiguous || view.device.kind != DeviceKind::cpu) {
    throw InvalidArgumentError("hash128: the array must be contiguous and in host memory");
  }
  std::array<std::uint64_t, 2> hash;
  {
    std::optional<py::gil_scoped_release> no_gil;
    if (view.nbytes() > kWithoutGilAbove) no_gil.emplace();
    hash = kernels::hash128(view.data, view.nbytes());
  }
  char bytes[sizeof hash];
  std::memcpy(bytes, hash.data(), sizeof hash);
  return {bytes, sizeof bytes};
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("hash128", &hash_of, py::arg("array"),
        "16 bytes that depend on every byte of a contiguous host array, on its position and on their number.");
  m.def("add_weighted", &add_weighted, py::arg("trees"), py::arg("starts"), py::arg("sums"), py::arg("out"),
        "out = sums[n-1] + (... + (sums[0] + the sum of weight times array)) in one pass: at most two pairs of leaves "
        "and weight. Leaf i, any array or None, is out[starts[i]:starts[i + 1]]; that of device memory "
        "as its elements lie. See csrc/kernels/weighted_sum.h.");
  m.def("divide_in_place", &divide_in_place, py::arg("flat"), py::arg("divisor"),
        "Divides sums of float32 or float64; or of int64 as `add_weighted` makes them, of which the first word becomes "
        "the quotient, rounded down. Returns whether all quotients are finite.");
}

}  // namespace samestep
