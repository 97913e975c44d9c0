#include <pybind11/pybind11.h>

namespace samestep {
using Bind = void(pybind11::module_&);
Bind bind_errors, bind_arrays, bind_kernels, bind_communicator, bind_fast_calls, bind_fast_messages, bind_fast_methods,
    bind_fast_tree, bind_compiled_calls, bind_node, bind_worlds, bind_devices;

// pybind11 needs a base class before those that derive from it: Communicator comes before the groups of devices.
constexpr Bind* kInOrder[] = {
    bind_errors,       bind_arrays,    bind_kernels,        bind_communicator, bind_fast_calls, bind_fast_messages,
    bind_fast_methods, bind_fast_tree, bind_compiled_calls, bind_node,         bind_worlds,     bind_devices,
};
}  // namespace samestep

// Without the declaration an import turns the GIL of a free-threaded interpreter on again: see free_threading.h.
PYBIND11_MODULE(_core, m, pybind11::mod_gil_not_used()) {
  m.doc() = "The C++ core of samestep. Not public: use the functions of the package.";
  for (samestep::Bind* const bind : samestep::kInOrder) bind(m);
}
