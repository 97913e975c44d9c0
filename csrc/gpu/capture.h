#pragma once

#include <optional>
#include <string_view>

#include "core/buffer.h"
#include "core/error.h"
#include "core/format.h"
#include "gpu/gpu_library.h"

namespace samestep {

/// Throws UnavailableError if the stream of `buffer` is being captured into a graph. To be called before anything is
/// enqueued or agreed on with other ranks: a replay of the graph would meet no peers that have agreed to it.
inline void refuse_capture(std::string_view verb, const GpuLibrary& gpu, const ConstBuffer& buffer) {
  const StreamHandle stream = buffer.stream == kNoStream ? kLegacyStream : buffer.stream;
  if (!gpu.is_capturing(reinterpret_cast<GpuLibrary::Stream>(stream), buffer.device.index)) return;
  throw UnavailableError(
      str(verb,
          ": the array's stream is being captured into a graph, which operations of samestep cannot become part "
          "of. Cure: call it outside of the capture, between two graphs (torch.compile: mode=\"default\", or "
          "torch.compiler.disable on the function that calls it)"));
}

/// `refuse_capture` for the buffers of one call, most of which are used in one stream: it is asked about once.
class RefuseCapture {
 public:
  explicit RefuseCapture(const GpuLibrary& gpu) : gpu_(gpu) {}
  void operator()(std::string_view verb, const ConstBuffer& buffer) {
    if (buffer.stream == last_) return;
    refuse_capture(verb, gpu_, buffer);
    last_ = buffer.stream;
  }

 private:
  const GpuLibrary& gpu_;
  std::optional<StreamHandle> last_;
};

}  // namespace samestep
