#include <pybind11/pybind11.h>

#include <array>
#include <cstring>
#include <optional>

#include "bindings/array_view.h"
#include "core/error.h"
#include "kernels/hash128.h"

namespace samestep {

namespace py = pybind11;

namespace {

constexpr std::size_t kHashWithoutGilAbove = 64 * 1024;  // bytes; below, releasing it costs more

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
    if (view.nbytes() > kHashWithoutGilAbove) no_gil.emplace();
    hash = kernels::hash128(view.data, view.nbytes());
  }
  char bytes[sizeof hash];
  std::memcpy(bytes, hash.data(), sizeof hash);
  return {bytes, sizeof bytes};
}

}  // namespace

void bind_hash(py::module_& m) {
  m.def("hash128", &hash_of, py::arg("array"),
        "16 bytes that depend on every byte of a contiguous host array, on its position and on their number.");
}

}  // namespace samestep
