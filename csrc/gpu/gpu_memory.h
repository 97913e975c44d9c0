#pragma once

#include <algorithm>
#include <cstdint>
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
    if (stream_ != nullptr) gpu_->destroy_stream(stream_, device_);
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

/// Owns an event of a device.
class GpuEvent {
 public:
  GpuEvent(std::shared_ptr<GpuLibrary> gpu, int device) : gpu_(std::move(gpu)), device_(device) {
    const OnDevice on(*gpu_, device_);
    event_ = gpu_->make_event();
  }
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;
  ~GpuEvent() { gpu_->destroy_event(event_, device_); }

  void record(GpuLibrary::Stream stream) const {
    const OnDevice on(*gpu_, device_);
    gpu_->record(event_, stream);
  }
  void make_wait(GpuLibrary::Stream stream) const {
    const OnDevice on(*gpu_, device_);
    gpu_->wait(stream, event_);
  }
  bool is_complete() const {
    const OnDevice on(*gpu_, device_);
    return gpu_->is_complete(event_);
  }

 private:
  std::shared_ptr<GpuLibrary> gpu_;
  int device_;
  GpuLibrary::Event event_ = nullptr;
};

/// Lets later work in `later` come after what `earlier` has so far, a stream of `device`.
inline void order_streams(GpuLibrary& gpu, int device, StreamHandle later, StreamHandle earlier) {
  const GpuEvent reached(gpu.shared_from_this(), device);
  reached.record(reinterpret_cast<GpuLibrary::Stream>(earlier));
  reached.make_wait(reinterpret_cast<GpuLibrary::Stream>(later));
}

/// A pool of events of one device: to create one takes a call of the driver.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  EventPool(std::shared_ptr<GpuLibrary> gpu, int device) : gpu_(std::move(gpu)), device_(device) {}

  /// An event, which returns to the pool when the last pointer is dropped.
  std::shared_ptr<GpuEvent> take() {
    std::unique_ptr<GpuEvent> event;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        event = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (event == nullptr) event = std::make_unique<GpuEvent>(gpu_, device_);
    return {event.release(), [self = shared_from_this()](GpuEvent* used) {
              const std::lock_guard lock(self->mutex_);
              self->free_.emplace_back(used);
            }};
  }

  /// Events for the work that each of `streams` has so far.
  std::vector<std::shared_ptr<GpuEvent>> record(const std::vector<StreamHandle>& streams) {
    std::vector<std::shared_ptr<GpuEvent>> recorded;
    std::vector<StreamHandle> seen{kNoStream};
    for (const StreamHandle stream : streams) {
      if (std::ranges::find(seen, stream) != seen.end()) continue;
      seen.push_back(stream);
      recorded.push_back(take());
      recorded.back()->record(reinterpret_cast<GpuLibrary::Stream>(stream));
    }
    return recorded;
  }

 private:
  std::shared_ptr<GpuLibrary> gpu_;
  int device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<GpuEvent>> free_;
};

/// A pool of pinned host memory, because pinning takes as long as copying, or of memory of one device, because freeing
/// waits for the device.
///
/// Pinned memory comes from `source` if there is one and the runtime can pin it. Of what is free, the pool keeps what
/// was used last: 64 MiB, or twice as much as was in use at a time, so that what is done again and again pins and
/// unpins nothing. To unpin waits for the device, and so perhaps for a rank that waits for this one. Of a device, it
/// keeps everything: blocks of lengths that are powers of two, as many of each as were in use at a time.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  enum class Kind : std::uint8_t { of_device, pinned };
  /// Memory of the host, null if there is none.
  using Source = std::function<std::shared_ptr<std::byte>(std::size_t nbytes)>;

  BufferPool(std::shared_ptr<GpuLibrary> gpu, int device, Kind kind, Source source = {})
      : gpu_(std::move(gpu)), device_(device), is_pinned_(kind == Kind::pinned), source_(std::move(source)) {}
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
  bool is_pinned_;
  Source source_;
  std::mutex mutex_;
  std::vector<Block> free_;  // in the order in which they were given back
  // Bytes of pinned memory:
  std::size_t used_nbytes_ = 0;
  std::size_t cached_nbytes_ = 0;
  std::size_t most_cached_nbytes_ = std::size_t{64} << 20;
};

}  // namespace samestep
