#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "arrays/array_view.h"
#include "communicator/communicator.h"
#include "core/deadline.h"
#include "core/reduce_op.h"
#include "gpu/gpu_library.h"

namespace samestep {

constexpr std::size_t kTreeBucketBytes = 4 << 20;  ///< of small leaves of a tree in one message

/// Registers the runtime of a kind of devices, for the life of the process.
void register_gpu(std::shared_ptr<GpuLibrary> gpu);

/// The runtime for the memory of `view`, or null.
GpuLibrary* gpu_of(const ArrayView& view);

/// Lets later work in the stream of `later` come after what that of `earlier` has so far. False if `later` alone is
/// being captured into a graph, which what comes before cannot be part of.
bool order_streams_of(const ArrayView& later, const ArrayView& earlier);

/// Where copies of an array are enqueued.
struct DeviceStream {
  GpuLibrary* gpu;
  int device;
  StreamHandle stream;
  bool operator==(const DeviceStream&) const = default;
};

/// A call of a group that may wait for so long.
struct WaitLimit {
  std::shared_ptr<Communicator> group;
  Deadline deadline;
};

/// Waits for the work that is now queued in the streams of the reachable device arrays among `arrays`. To be called
/// before the first copy, and without the GIL: copies between a device and memory of the host that is not pinned block
/// in the runtime, where neither a deadline nor Ctrl-C ends them, until the stream has come so far.
///
/// Sets `device.index` of the arrays. Throws UnavailableError if a stream is being captured into a graph, what a signal
/// handler raises, and after the deadline TimeoutError, when this rank has left the group: the others would wait for
/// it.
void await_streams(std::span<ArrayView> arrays, const WaitLimit* limit = nullptr);

/// Copies of reachable arrays in device memory, as they lie, each after what is in the array's stream; see
/// `await_streams`. They run beside the caller until `finish`, or the destructor, which waits once for each stream,
/// also for what other threads have put into it meanwhile.
class DeviceCopies {
 public:
  DeviceCopies() = default;
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;
  ~DeviceCopies();

  /// Between the memory of `view` and the host: one of `to` and `from` is `view.data`.
  void begin(const ArrayView& view, void* to, const void* from);
  /// All `arrays` in one copy between device and host, where they lie one after the other at `run`, if they are few
  /// bytes of one device and stream; false if not. They are packed on the device.
  bool begin_packed(std::span<const ArrayView> arrays, char* run, bool to_host);
  void finish();

 private:
  std::vector<DeviceStream> used_;
  std::vector<std::shared_ptr<std::byte>> packed_;  // memory of the device, until the copies have ended
};

/// Copies a reachable array to another one of the same device, dtype and shape, in the stream of `to`. Later work in
/// both streams comes after it, so nobody waits. False, without effect, if they overlap in part or are not on one
/// device. Throws UnavailableError if a stream is being captured. To be called without the GIL: the runtime may block.
bool copy_on_device(const ArrayView& from, const ArrayView& to);

/// "cpu", "cuda", "rocm" or "other".
const char* device_name(DeviceKind kind);

/// Throws InvalidArgumentError unless elements can be copied: they are on the host, or one run of memory on a device
/// whose runtime has been registered, which is row-major unless `in_any_order`. Sets `view.stream`. With the GIL held.
void require_reachable(PyObject* object, ArrayView& view, bool in_any_order = false);

/// Copies the elements of a reachable array to host memory: of the host in row-major order, of a device as they lie,
/// which `copies` begins. Not for arrays without elements.
void pack_elements(const ArrayView& from, void* to, DeviceCopies& copies);

/// Whether NCCL itself has this reduction.
bool reduces_on_device(DType dtype, ReduceOp op);

}  // namespace samestep
