#include "gpu/gpu_library.h"

// Which context is current in a thread, and so which device.

namespace samestep {
namespace {

// What GpuLibrary::enter says where there is more or less to undo than to set another device.
constexpr int kNothing = -1, kPushed = -2;

}  // namespace

void* GpuLibrary::context_of(int device) const {
  std::atomic<void*>& known = contexts_.at(static_cast<std::size_t>(device));
  if (void* const context = known.load(std::memory_order_acquire); context != nullptr) {  // pairs with the store
    return context;
  }
  int handle = 0;
  void* context = nullptr;
  check(initialize_(0), "Init");
  check(device_get_(&handle, device), "DeviceGet");
  check(primary_context_retain_(&context, handle), "DevicePrimaryCtxRetain");
  // Never released: it lives as long as the runtime's use of it.
  known.store(context, std::memory_order_release);  // pairs with the loads
  return context;
}

int GpuLibrary::enter(int device) const {
  if (context_push_ == nullptr) {
    const int before = current_device();
    if (before == device) return kNothing;
    set_device(device);  // which creates no context in HIP, not either where `leave` sets the one before
    return before;
  }
  void* const context = context_of(device);
  void* current = nullptr;
  check(context_get_current_(&current), "CtxGetCurrent");
  if (current == context) return kNothing;
  check(context_push_(context), "CtxPushCurrent");
  return kPushed;
}

void GpuLibrary::leave(int entered) const noexcept {  // an error says that the device is lost: the next call throws
  void* popped = nullptr;
  if (entered == kPushed) {
    context_pop_(&popped);
  } else if (entered != kNothing) {
    set_device.code(entered);
  }
}

int GpuLibrary::device_in_use() const {
  void* current = nullptr;
  if (context_push_ != nullptr && (context_get_current_(&current) != 0 || current == nullptr)) {
    for (std::size_t device = 0; device < contexts_.size(); ++device) {
      // Pairs with the store in context_of.
      if (contexts_[device].load(std::memory_order_acquire) != nullptr) return static_cast<int>(device);
    }
  }
  return current_device();
}

}  // namespace samestep
