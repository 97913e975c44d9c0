#include "jax/python_ranks.h"

#include <pybind11/pybind11.h>

#include "core/error.h"

namespace samestep {
namespace {

namespace py = pybind11;

/// What `take` makes of the result of a function of samestep. Throws UnavailableError with the text of Python's error.
template <class Take>
auto call_python(const char* module, const char* function, Take take) {
  const py::gil_scoped_acquire gil;  // XLA calls on a thread of its choice, which may be unknown to Python
  try {
    return take(py::module_::import(module).attr(function)());
  } catch (const py::error_already_set& error) {
    throw UnavailableError("samestep.jax cannot start: " + std::string(py::str(error.value())));
  }
}

}  // namespace

std::unique_ptr<DeviceRanks> open_device_ranks() {
  return call_python("samestep.jax.meeting", "open_ranks", [](const py::tuple& opened) {
    const void* const held = PyCapsule_GetPointer(py::object(opened[0]).ptr(), RanksCapsule::kName);
    if (held == nullptr) throw py::error_already_set();
    return std::make_unique<DeviceRanks>(*static_cast<const RanksCapsule*>(held), Seconds(py::float_(opened[1])));
  });
}

std::string problem_of_programs() {
  return call_python("samestep.jax.programs", "problem",
                     [](const py::object& text) { return std::string(py::str(text)); });
}

}  // namespace samestep
