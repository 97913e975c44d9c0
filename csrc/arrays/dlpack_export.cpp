#include "arrays/dlpack_export.h"

#include <memory>
#include <vector>

#include "arrays/array_sources.h"

namespace samestep {

namespace py = pybind11;

namespace {

/// What a capsule points at, with all that it needs.
template <class Managed>
struct Exported {
  Managed managed{};
  std::vector<std::int64_t> shape, strides;
  PyObject* owner = nullptr;

  static void release(Managed* managed) {
    const auto* self = static_cast<Exported*>(managed->context);
    // Nothing may be done with objects of an interpreter that ends or has ended: this is 0 from the beginning of its
    // end. The memory ends with the process.
    if (Py_IsInitialized() == 0) return;
    // A consumer may drop the tensor on any of its threads, with or without the GIL.
    const PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(self->owner);
    PyGILState_Release(gil);
    delete self;
  }
};

template <class Managed>
py::object capsule(const DLPackExport& of, const char* name) {
  auto exported = std::make_unique<Exported<Managed>>();
  exported->shape = of.shape;
  exported->strides.resize(of.shape.size());
  std::int64_t step = 1;
  for (std::size_t i = of.shape.size(); i-- > 0;) {
    exported->strides[i] = step;
    step *= of.shape[i];
  }
  Managed& managed = exported->managed;
  managed.tensor = {of.data,
                    {of.kind == DeviceKind::rocm ? dlpack::DeviceType::rocm : dlpack::DeviceType::cuda, of.device},
                    static_cast<std::int32_t>(of.shape.size()),
                    sources::dlpack_type(of.dtype),
                    exported->shape.data(),
                    exported->strides.data(),
                    0};
  managed.context = exported.get();
  managed.deleter = &Exported<Managed>::release;
  // The layout before 1.0 has neither version nor flags. The flags stay 0, because the memory is writable.
  if constexpr (requires { managed.version; }) managed.version = {1, 0};
  exported->owner = of.owner.inc_ref().ptr();
  PyObject* made = PyCapsule_New(&managed, name, [](PyObject* unused) {  // a consumer renames what it takes
    const char* const still = PyCapsule_GetName(unused);
    auto* const left = static_cast<Managed*>(PyCapsule_GetPointer(unused, still));
    if (std::string_view(still).starts_with("dltensor")) left->deleter(left);
  });
  if (made == nullptr) throw py::error_already_set();
  exported.release();
  return py::reinterpret_steal<py::object>(made);
}

}  // namespace

py::object to_dlpack(const DLPackExport& of, bool versioned) {
  return versioned ? capsule<dlpack::ManagedTensorVersioned>(of, "dltensor_versioned")
                   : capsule<dlpack::ManagedTensor>(of, "dltensor");
}

}  // namespace samestep
