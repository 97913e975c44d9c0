#include <pybind11/pybind11.h>

namespace samestep {
void bind_errors(pybind11::module_& m);
void bind_arrays(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_communicator(pybind11::module_& m);
void bind_fast_calls(pybind11::module_& m);
void bind_fast_messages(pybind11::module_& m);
void bind_fast_methods(pybind11::module_& m);
void bind_fast_tree(pybind11::module_& m);
void bind_compiled_calls(pybind11::module_& m);
void bind_node(pybind11::module_& m);
void bind_worlds(pybind11::module_& m);
void bind_devices(pybind11::module_& m);
}  // namespace samestep

// Without the declaration an import turns the GIL of a free-threaded interpreter on again: see free_threading.h.
PYBIND11_MODULE(_core, m, pybind11::mod_gil_not_used()) {
  m.doc() = "The C++ core of samestep. Not public: use the functions of the package.";
  samestep::bind_errors(m);
  samestep::bind_arrays(m);
  samestep::bind_kernels(m);
  // pybind11 needs a base class before those that derive from it: Communicator comes before the groups of devices.
  samestep::bind_communicator(m);
  samestep::bind_fast_calls(m);
  samestep::bind_fast_messages(m);
  samestep::bind_fast_methods(m);
  samestep::bind_fast_tree(m);
  samestep::bind_compiled_calls(m);
  samestep::bind_node(m);
  samestep::bind_worlds(m);
  samestep::bind_devices(m);
}
