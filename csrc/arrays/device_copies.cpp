#include "arrays/device_copies.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "gpu/capture.h"
#include "gpu/gpu_memory.h"
#include "kernels/stream.h"
#include "kernels/strided.h"
#include "nccl/nccl_reduction.h"
#include "process/user_call.h"
#include "waiting/await.h"

namespace samestep {
namespace {

/// By kind; each is held for good, since streams may be at work when the process ends.
constinit std::array<std::atomic<GpuLibrary*>, 2> registered = {};

}  // namespace

void register_gpu(std::shared_ptr<GpuLibrary> gpu) {
  const std::size_t place = gpu->kind() == DeviceKind::rocm ? 1 : 0;
  const auto* const held = new std::shared_ptr<GpuLibrary>(std::move(gpu));
  registered[place].store(held->get(), std::memory_order_release);  // pairs with gpu_of
}

GpuLibrary* gpu_of(const ArrayView& view) {
  if (view.device.kind != DeviceKind::cuda && view.device.kind != DeviceKind::rocm) return nullptr;
  const std::size_t place = view.device.kind == DeviceKind::rocm ? 1 : 0;
  return registered[place].load(std::memory_order_acquire);  // pairs with register_gpu
}

namespace {

/// Never freed, as the runtime itself.
const std::shared_ptr<BufferPool>& memory_for_packing(GpuLibrary* gpu, int device) {
  static auto& mutex = *new std::mutex;
  static auto& pools = *new std::map<std::pair<GpuLibrary*, int>, std::shared_ptr<BufferPool>>;
  const std::lock_guard lock(mutex);
  std::shared_ptr<BufferPool>& pool = pools[{gpu, device}];
  if (pool == nullptr) {
    pool = std::make_shared<BufferPool>(gpu->shared_from_this(), device, BufferPool::Kind::of_device);
  }
  return pool;
}

/// Of an array with elements, whose runtime has been registered.
DeviceStream stream_of(GpuLibrary* gpu, const ArrayView& view) {
  // `__cuda_array_interface__` does not say on which device the memory is.
  const int device = require_device("copy", *gpu, view.buffer());
  // Numba names no stream for arrays of the legacy default stream, so that is the one to follow.
  return {gpu, device, view.stream == kNoStream ? 0 : view.stream};
}

[[noreturn]] void throw_late(const WaitLimit& limit) {
  const std::string& called = user_call();
  const std::string text = str("rank ", limit.group->rank(), ": ", called.empty() ? "a copy of arrays" : called,
                               " in group '", limit.group->name(), "' has waited ", limit.deadline.timeout().count(),
                               " s for this rank's device, which has not finished the work queued before it");
  const auto error = std::make_exception_ptr(TimeoutError(text));
  limit.group->abandon(error, text);
  std::rethrow_exception(error);
}

void await_end(const GpuEvent& end, const WaitLimit* limit) {
  const auto is_reached = [&end] { return end.is_complete(); };
  await(is_reached, [&](Seconds) {
    if (limit != nullptr && limit->deadline.passed() && !is_reached()) throw_late(*limit);
  });
}

}  // namespace

bool order_streams_of(const ArrayView& later, const ArrayView& earlier) {
  GpuLibrary* const gpu = gpu_of(later);
  if (gpu == nullptr) return true;
  const DeviceStream to = stream_of(gpu, later), from = stream_of(gpu, earlier);
  if (to == from) return true;
  const bool captured = gpu->is_capturing(reinterpret_cast<GpuLibrary::Stream>(to.stream), to.device);
  if (gpu->is_capturing(reinterpret_cast<GpuLibrary::Stream>(from.stream), from.device) != captured) return !captured;
  order_streams(*gpu, from.device, to.stream, from.stream);
  return true;
}

void await_streams(std::span<ArrayView> arrays, const WaitLimit* limit) {
  std::vector<DeviceStream> streams;  // most arrays of a call are used in one
  for (ArrayView& view : arrays) {
    GpuLibrary* const gpu = gpu_of(view);
    if (gpu == nullptr || view.nbytes() == 0) continue;
    const DeviceStream used = stream_of(gpu, view);
    view.device.index = used.device;
    if (std::ranges::find(streams, used) != streams.end()) continue;
    refuse_capture("copy", *gpu, view.buffer());
    streams.push_back(used);
  }
  std::deque<GpuEvent> ends;
  for (const DeviceStream& used : streams) {
    ends.emplace_back(used.gpu->shared_from_this(), used.device)
        .record(reinterpret_cast<GpuLibrary::Stream>(used.stream));
  }
  for (const GpuEvent& end : ends) await_end(end, limit);
}

void DeviceCopies::begin(const ArrayView& view, void* to, const void* from) {
  GpuLibrary* const gpu = gpu_of(view);
  if (gpu == nullptr) throw UnavailableError("device memory cannot be reached: no runtime has been opened");
  if (view.nbytes() == 0) return;
  const DeviceStream used = stream_of(gpu, view);
  const OnDevice on(*gpu, used.device);
  gpu->copy(to, from, view.nbytes(), reinterpret_cast<GpuLibrary::Stream>(used.stream));
  if (std::ranges::find(used_, used) == used_.end()) used_.push_back(used);
}

bool DeviceCopies::begin_packed(std::span<const ArrayView> arrays, char* run, bool to_host) {
  if (arrays.size() < 2) return false;
  std::optional<DeviceStream> used;
  std::size_t nbytes = 0;
  for (const ArrayView& array : arrays) {
    if (array.nbytes() == 0) continue;
    GpuLibrary* const gpu = gpu_of(array);
    nbytes += array.nbytes();
    if (gpu == nullptr || nbytes > kTreeBucketBytes) return false;
    const DeviceStream here = stream_of(gpu, array);
    if (used && *used != here) return false;
    used = here;
  }
  if (!used) return false;
  const OnDevice on(*used->gpu, used->device);
  auto* const stream = reinterpret_cast<GpuLibrary::Stream>(used->stream);
  packed_.push_back(memory_for_packing(used->gpu, used->device)->take(nbytes));
  used_.push_back(*used);
  if (!to_host) used->gpu->copy(packed_.back().get(), run, nbytes, stream);
  std::byte* at = packed_.back().get();
  for (const ArrayView& array : arrays) {
    if (array.nbytes() == 0) continue;
    used->gpu->copy(to_host ? at : array.data, to_host ? array.data : at, array.nbytes(), stream);
    at += array.nbytes();
  }
  if (to_host) used->gpu->copy(run, packed_.back().get(), nbytes, stream);
  return true;
}

void DeviceCopies::finish() {
  for (const DeviceStream& used : std::exchange(used_, {})) {
    const OnDevice on(*used.gpu, used.device);
    used.gpu->synchronize(reinterpret_cast<GpuLibrary::Stream>(used.stream));
  }
  packed_.clear();
}

DeviceCopies::~DeviceCopies() {
  try {
    finish();
  } catch (const Error&) {
    // The device is lost, and copies may not have ended: the memory is never given to anybody again.
    for (auto& memory : packed_) new std::shared_ptr<std::byte>(std::move(memory));
  }
}

bool copy_on_device(const ArrayView& from, const ArrayView& to) {
  GpuLibrary* const gpu = gpu_of(from);
  if (gpu == nullptr || gpu != gpu_of(to)) return false;
  refuse_capture("copy", *gpu, from.buffer());
  refuse_capture("copy", *gpu, to.buffer());
  if (from.nbytes() == 0 || from.data == to.data) return true;
  if (share_memory(from.data, from.nbytes(), to.data, to.nbytes())) return false;
  const DeviceStream before = stream_of(gpu, from), used = stream_of(gpu, to);
  if (before.device != used.device) return false;
  const OnDevice on(*gpu, used.device);
  if (used != before) order_streams(*gpu, used.device, used.stream, before.stream);
  gpu->copy(to.data, from.data, from.nbytes(), reinterpret_cast<GpuLibrary::Stream>(used.stream));
  if (used != before) order_streams(*gpu, used.device, before.stream, used.stream);
  return true;
}

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

void require_reachable(PyObject* object, ArrayView& view, bool in_any_order) {
  if (view.device.kind == DeviceKind::cpu) return;
  if (gpu_of(view) == nullptr) {
    throw InvalidArgumentError(
        str("the array is on a ", device_name(view.device.kind), " device; copy it to the host first"));
  }
  const std::optional<std::uint64_t> order = view.memory_order();
  if (!order.has_value() || (*order != 0 && !in_any_order)) {
    throw InvalidArgumentError(
        str("an array ", order ? "that is not row-major" : "with gaps", " in device memory; pass a contiguous copy"));
  }
  // Here, with the GIL, because this may call Python; the copies run without it.
  find_stream(object, view);
}

void pack_elements(const ArrayView& from, void* to, DeviceCopies& copies) {
  if (from.device.kind != DeviceKind::cpu) {
    copies.begin(from, to, from.data);
  } else if (from.contiguous) {
    kernels::copy(to, from.data, from.nbytes());
  } else {
    kernels::pack(from.data, from.extents(), from.steps(), itemsize(from.dtype), to);
  }
}

bool reduces_on_device(DType dtype, ReduceOp op) { return to_nccl_reduction(dtype, {op, 1.0}, 2).has_value(); }

}  // namespace samestep
