#include "bindings/device_copies.h"

#include <array>

#include "core/error.h"
#include "core/format.h"
#include "gpu/capture.h"
#include "kernels/stream.h"
#include "kernels/strided.h"
#include "nccl/nccl_reduction.h"

namespace samestep {
namespace {

std::array<std::shared_ptr<GpuLibrary>, 2>& registered() {
  static auto& gpus = *new std::array<std::shared_ptr<GpuLibrary>, 2>;  // streams may be at work when the process ends
  return gpus;
}

void copy(const ArrayView& view, void* to, const void* from) {
  GpuLibrary* const gpu = gpu_of(view);
  if (gpu == nullptr) throw UnavailableError("device memory cannot be reached: no runtime has been opened");
  if (view.nbytes() == 0) return;
  const int device = view.device.index >= 0 ? view.device.index : gpu->device_of(view.data);
  const OnDevice on(*gpu, device);
  auto* const stream = view.stream == kNoStream ? nullptr : reinterpret_cast<GpuLibrary::Stream>(view.stream);
  gpu->copy(to, from, view.nbytes(), stream);
  gpu->synchronize(stream);
}

}  // namespace

void register_gpu(std::shared_ptr<GpuLibrary> gpu) {
  const std::size_t place = gpu->kind() == DeviceKind::rocm ? 1 : 0;
  registered()[place] = std::move(gpu);
}

GpuLibrary* gpu_of(const ArrayView& view) {
  if (view.device.kind == DeviceKind::cuda) return registered()[0].get();
  return view.device.kind == DeviceKind::rocm ? registered()[1].get() : nullptr;
}

void copy_to_host(const ArrayView& from, void* to) { copy(from, to, from.data); }

void copy_to_device(const void* from, const ArrayView& to) { copy(to, to.data, from); }

const char* device_name(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::cpu:
      return "cpu";
    case DeviceKind::cuda:
      return "cuda";
    case DeviceKind::rocm:
      return "rocm";
    case DeviceKind::other:
      break;
  }
  return "other";
}

void require_reachable(PyObject* object, ArrayView& view) {
  if (view.device.kind == DeviceKind::cpu) return;
  if (gpu_of(view) == nullptr) {
    throw InvalidArgumentError(
        str("the array is on a ", device_name(view.device.kind), " device; copy it to the host first"));
  }
  if (!view.contiguous) throw InvalidArgumentError("an array with gaps in device memory; pass a contiguous copy");
  find_stream(object, view);
  refuse_capture("copy", *gpu_of(view), {view.data, 0, view.dtype, view.device, view.stream});
}

void pack_elements(const ArrayView& from, void* to) {
  if (from.device.kind != DeviceKind::cpu) {
    copy_to_host(from, to);
  } else if (from.contiguous) {
    kernels::copy(to, from.data, from.nbytes());
  } else {
    const auto n_dims = static_cast<std::size_t>(from.n_dims);
    kernels::pack(from.data, {from.shape, n_dims}, {from.strides, n_dims}, itemsize(from.dtype), to);
  }
}

bool reduces_on_device(DType dtype, ReduceOp op) { return to_nccl_reduction(dtype, {op, 1.0}).has_value(); }

}  // namespace samestep
