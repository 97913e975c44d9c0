#pragma once

#include <cstddef>
#include <functional>
#include <string>

// What the stand-in of NCCL asks of the stand-in of the GPU runtime. A real NCCL asks the driver for it.

namespace fake {

/// Where the bytes of device memory really lie, for "kernels": null unless [data, data + nbytes) is live memory of
/// `device`.
std::byte* reach(const void* data, std::size_t nbytes, int device);

/// Puts `work` at the end of a stream. False if there is no such stream on `device`.
bool enqueue(void* stream, int device, std::function<void()> work);

/// Whether a stream is being captured into a graph.
bool is_captured(void* stream);

/// Says, for as long as it lives, that the stream whose work runs in this thread is stuck while `can_go` is false.
/// `can_go` is called by other threads too.
class Stuck {
 public:
  explicit Stuck(std::function<bool()> can_go);
  ~Stuck();
};

/// Returns once all streams of a device are empty.
void drain(int device);

int current_device();
/// Name of the physical device behind a visible one.
std::string bus_id(int device);
/// The same, but of the MIG instance if the device is one.
std::string uuid(int device);

}  // namespace fake
