#include "bindings/device_copies.h"

#include <array>

#include "core/error.h"
#include "nccl/nccl_form.h"

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

bool reduces_on_device(DType dtype, ReduceOp op) { return nccl_form(dtype, {op, 1.0}).has_value(); }

}  // namespace samestep
