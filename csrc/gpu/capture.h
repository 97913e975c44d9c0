#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "core/buffer.h"
#include "core/error.h"
#include "core/format.h"
#include "gpu/gpu_library.h"

namespace samestep {

/// The streams of the buffers of one call. Most calls have one, which is asked once whether it is being captured.
class CallStreams {
 public:
  explicit CallStreams(const GpuLibrary& gpu) : gpu_(gpu) {}

  void add(const ConstBuffer& buffer) {
    if (std::ranges::find(all_, buffer.stream) != all_.end()) return;
    all_.push_back(buffer.stream);
    const StreamHandle asked = buffer.stream == kNoStream ? kLegacyStream : buffer.stream;
    captured_ = gpu_.is_capturing(reinterpret_cast<GpuLibrary::Stream>(asked), buffer.device.index) || captured_;
  }

  /// Whether a stream is being captured into a graph.
  bool captured() const { return captured_; }
  /// Whether all buffers are used in one stream, which any thread may name. The thread of the LaunchQueue would put
  /// what belongs into the caller's per-thread stream into a stream of its own.
  bool is_one() const { return all_.size() == 1 && all_.front() != kNoStream && all_.front() != kPerThreadStream; }

  /// Throws UnavailableError if a stream is being captured, unless the operation `joins` the graph and can: from the
  /// only stream. (The default stream cannot be captured; it is in the way of others that are.) To be called before
  /// anything is enqueued or agreed on with other ranks: a replay would meet no peers that have agreed to it.
  void refuse_capture(std::string_view verb, bool joins = false) const {
    if (!captured_ || (joins && is_one() && all_.front() != kLegacyStream)) return;
    throw UnavailableError(str(
        verb,
        ": the array's stream is being captured into a graph, of which only what NCCL does in that one stream can "
        "become part, if it is not the per-thread default stream. Cure: call it outside of the capture, between two "
        "graphs (torch.compile: mode=\"default\", or torch.compiler.disable on the function that calls it)"));
  }

 private:
  const GpuLibrary& gpu_;
  std::vector<StreamHandle> all_;
  bool captured_ = false;
};

inline void refuse_capture(std::string_view verb, const GpuLibrary& gpu, const ConstBuffer& buffer) {
  CallStreams streams(gpu);
  streams.add(buffer);
  streams.refuse_capture(verb);
}

/// The device of `buffer`, which has elements: the runtime is asked where the array's library does not say it.
/// Throws InvalidArgumentError if the runtime does not know the address, as that of memory which has been freed.
inline int require_device(std::string_view verb, const GpuLibrary& gpu, const ConstBuffer& buffer) {
  const int device = buffer.device.index >= 0 ? buffer.device.index : gpu.device_of(buffer.data);
  if (device >= 0) return device;
  throw InvalidArgumentError(
      str(verb, ": the array says that it is in device memory, but ", gpu.path(), " does not know its address"));
}

}  // namespace samestep
