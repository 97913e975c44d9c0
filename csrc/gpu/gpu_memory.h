#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gpu/gpu_library.h"

namespace samestep {

/// Owns a stream, made at its first use: many groups never work on device memory.
class GpuStream {
 public:
  GpuStream(std::shared_ptr<GpuLibrary> gpu, int device) : gpu_(std::move(gpu)), device_(device) {}
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;
  ~GpuStream() {
    if (stream_ != nullptr) gpu_->destroy_stream(stream_);
  }
  GpuLibrary::Stream get() const {
    std::call_once(made_, [this] {
      const OnDevice on(*gpu_, device_);
      stream_ = gpu_->make_stream();
    });
    return stream_;
  }

 private:
  std::shared_ptr<GpuLibrary> gpu_;
  int device_;
  mutable std::once_flag made_;
  mutable GpuLibrary::Stream stream_ = nullptr;
};

/// Owns an event.
class GpuEvent {
 public:
  explicit GpuEvent(std::shared_ptr<GpuLibrary> gpu) : gpu_(std::move(gpu)), event_(gpu_->make_event()) {}
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;
  ~GpuEvent() { gpu_->destroy_event(event_); }

  void record(GpuLibrary::Stream stream) const { gpu_->record(event_, stream); }
  void make_wait(GpuLibrary::Stream stream) const { gpu_->wait(stream, event_); }
  bool is_complete() const { return gpu_->is_complete(event_); }

 private:
  std::shared_ptr<GpuLibrary> gpu_;
  GpuLibrary::Event event_;
};

/// A pool of pinned host memory, because pinning takes as long as copying, or of memory of one device, because freeing
/// waits for the device.
///
/// Pinned memory comes from `source` if there is one and the runtime can pin it. Of what is free, the pool keeps what
/// was used last, 64 MiB, or twice the largest block that was asked for: what is done again and again pins nothing. Of
/// a device, it keeps everything: blocks of lengths that are powers of two, as many of each as were in use at a time.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  static constexpr int kPinned = -1;
  /// Memory of the host, null if there is none.
  using Source = std::function<std::shared_ptr<std::byte>(std::size_t nbytes)>;

  /// `device`: whose memory; `kPinned`: of the host.
  BufferPool(std::shared_ptr<GpuLibrary> gpu, int device, Source source = {})
      : gpu_(std::move(gpu)), device_(device), source_(std::move(source)) {}
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool();

  /// At least `nbytes`, which return to the pool when the last pointer is dropped.
  std::shared_ptr<std::byte> take(std::size_t nbytes);

 private:
  struct Block {
    void* data = nullptr;
    std::size_t nbytes = 0;
    std::shared_ptr<std::byte> from_source = nullptr;  // else of the runtime
  };

  Block allocate(std::size_t nbytes) const;
  void recycle(const Block& block);
  void release(const Block& block) const noexcept;

  std::shared_ptr<GpuLibrary> gpu_;
  int device_;
  Source source_;
  std::mutex mutex_;
  std::vector<Block> free_;  // in the order in which they were given back
  // Bytes of pinned memory:
  std::size_t cached_nbytes_ = 0;
  std::size_t most_cached_nbytes_ = std::size_t{64} << 20;
};

}  // namespace samestep
