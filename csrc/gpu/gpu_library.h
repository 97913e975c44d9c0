#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

#include "core/buffer.h"
#include "core/error.h"
#include "os/dynamic_library.h"

namespace samestep {

/// Constants of the CUDA runtime API, which HIP shares from ROCm 6 on. tests/fakes/check_header.cpp compares them with
/// CUDA's headers.
namespace gpu_abi {
inline constexpr int kInvalidValue = 1;
inline constexpr int kNotReady = 600;
inline constexpr int kFirstCaptureError = 900;     ///< cudaErrorStreamCaptureUnsupported
inline constexpr int kLastCaptureError = 908;      ///< cudaErrorStreamCaptureWrongThread
inline constexpr int kRelaxedCapture = 2;          ///< cudaStreamCaptureModeRelaxed
inline constexpr int kCopyEitherWay = 4;           ///< cudaMemcpyDefault: inferred from the addresses
inline constexpr unsigned kNonBlockingStream = 1;  ///< cudaStreamNonBlocking
inline constexpr unsigned kOrderOnlyEvent = 2;     ///< cudaEventDisableTiming
inline constexpr unsigned kPortable = 1;           ///< cudaHostAllocPortable, cudaHostRegisterPortable
inline constexpr int kDeviceMemory = 2;            ///< cudaMemoryTypeDevice
inline constexpr int kManagedMemory = 3;           ///< cudaMemoryTypeManaged
}  // namespace gpu_abi

/// A call of the runtime has failed. Python sees an Error.
class GpuError : public Error {
 public:
  using Error::Error;
};

/// The functions of the CUDA or HIP runtime that the package uses, looked up at run time: it is built without either
/// and runs with both. Their names differ only in a prefix.
///
/// Calls throw GpuError with the runtime's message, or UnavailableError if the capture of a stream into a graph does
/// not allow them. "The current device" is that of the calling thread, for which OnDevice makes one current: most calls
/// create a context of the current device, which occupies hundreds of MB. What may be called by any thread names its
/// device. Calls that would be unsafe while a stream of the process is being captured are made in relaxed mode, so that
/// they leave captures of others alone.
/// Sources: CUDA Runtime API, CUDA Driver API, HIP Runtime API.
class GpuLibrary : public std::enable_shared_from_this<GpuLibrary> {
  /// A function of the runtime, whose name here lacks the prefix.
  template <class... Args>
  using Function = LibraryFunction<GpuLibrary, Args...>;
  template <class, class...>
  friend class LibraryFunction;

  const DeviceKind kind_;
  const OpenedLibrary library_;

 public:
  using Stream = void*;
  using Event = void*;

  /// Opens the runtime at `path`. Throws UnavailableError, naming the file, if it does not load, lacks a symbol, or is
  /// a HIP runtime before version 6.
  static std::shared_ptr<GpuLibrary> open(DeviceKind kind, const std::string& path);

  DeviceKind kind() const { return kind_; }
  const std::string& path() const { return library_.path(); }
  /// "cuda" or "hip".
  const char* prefix() const { return kind_ == DeviceKind::rocm ? "hip" : "cuda"; }

  int device_count() const;
  int current_device() const;
  const Function<int> set_device{*this, "SetDevice"};
  /// The PCI address, which identifies the device in all processes of a host, whatever devices each can see.
  std::string bus_id(int device) const;
  /// The UUID, in hexadecimal digits, of a device or of the MIG instance that is one; "" if the driver tells none.
  std::string uuid(int device) const;
  /// The device that owns `data`; -1 if it is not device memory. To be called by any thread.
  int device_of(const void* data) const;

  void* allocate(std::size_t nbytes) const;
  void free(void* data, int device) const noexcept { give_back(free_, data, device); }
  /// Pinned host memory, for asynchronous copies.
  void* allocate_pinned(std::size_t nbytes) const;
  void free_pinned(void* data, int device) const noexcept { give_back(free_host_, data, device); }
  /// Pins memory of the host that was allocated otherwise. False, without effect, if the system refuses.
  bool pin(void* data, std::size_t nbytes) const noexcept;
  void unpin(void* data, int device) const noexcept { give_back(host_unregister_, data, device); }
  /// Source and destination may each be on the host or on a device.
  void copy(void* to, const void* from, std::size_t nbytes, Stream stream) const {
    memcpy_async_(to, from, nbytes, gpu_abi::kCopyEitherWay, stream);
  }

  /// A stream that does not synchronize with the default stream.
  Stream make_stream() const;
  void destroy_stream(Stream stream, int device) const noexcept { give_back(stream_destroy_, stream, device); }
  void synchronize(Stream stream) const;
  /// An event without timing.
  Event make_event() const;
  void destroy_event(Event event, int device) const noexcept { give_back(event_destroy_, event, device); }
  const Function<Event, Stream> record{*this, "EventRecord"};
  /// Lets later work in `stream` wait for what `event` has recorded.
  void wait(Stream stream, Event event) const { stream_wait_event_(stream, event, 0); }
  /// False, too, while a capture of a stream does not let the event be queried.
  bool is_complete(Event event) const;
  /// Whether work in `stream` would become part of a graph instead of being executed; for the legacy default stream
  /// also whether it would end the capture of another one. `device`: of the stream; -1 if it is not known.
  bool is_capturing(Stream stream, int device) const;

 private:
  friend class OnDevice;
  class Relaxed;

  GpuLibrary(DeviceKind kind, const OpenedLibrary& library);
  Symbol find(const std::string& name) const;
  void find_driver();
  void check(int code, const char* name) const;
  void give_back(const Function<void*>& how, void* what, int device) const noexcept;
  /// Makes a device current. What `leave` takes to undo it.
  int enter(int device) const;
  void leave(int entered) const noexcept;
  /// The context of a device that the runtime and all libraries share; made at the first call.
  void* context_of(int device) const;
  /// The current device of a thread that has a context, else one that the process uses.
  int device_in_use() const;

  bool is_hip() const { return kind_ == DeviceKind::rocm; }

  const char* (*get_error_string_)(int) = find("GetErrorString");
  int (*get_last_error_)() = find("GetLastError");
  const Function<int*> get_device_count_{*this, "GetDeviceCount"};
  const Function<int*> get_device_{*this, "GetDevice"};
  const Function<char*, int, int> device_get_pci_bus_id_{*this, "DeviceGetPCIBusId"};
  const Function<void*, const void*> pointer_get_attributes_{*this, "PointerGetAttributes"};
  const Function<void**, std::size_t> malloc_{*this, "Malloc"};
  const Function<void*> free_{*this, "Free"};
  // The two runtimes name these two functions differently.
  const Function<void**, std::size_t, unsigned> host_alloc_{*this, is_hip() ? "HostMalloc" : "HostAlloc"};
  const Function<void*> free_host_{*this, is_hip() ? "HostFree" : "FreeHost"};
  const Function<void*, std::size_t, unsigned> host_register_{*this, "HostRegister"};
  const Function<void*> host_unregister_{*this, "HostUnregister"};
  const Function<void*, const void*, std::size_t, int, Stream> memcpy_async_{*this, "MemcpyAsync"};
  const Function<Stream*, unsigned> stream_create_{*this, "StreamCreateWithFlags"};
  const Function<Stream> stream_destroy_{*this, "StreamDestroy"};
  const Function<Stream> stream_synchronize_{*this, "StreamSynchronize"};
  const Function<Stream, Event, unsigned> stream_wait_event_{*this, "StreamWaitEvent"};
  const Function<Event*, unsigned> event_create_{*this, "EventCreateWithFlags"};
  const Function<Event> event_destroy_{*this, "EventDestroy"};
  const Function<Event> event_query_{*this, "EventQuery"};
  const Function<Stream, int*> stream_is_capturing_{*this, "StreamIsCapturing"};
  const Function<int*> exchange_capture_mode_{*this, "ThreadExchangeStreamCaptureMode"};
  // Of CUDA's driver; null with HIP.
  int (*initialize_)(unsigned) = nullptr;
  int (*device_get_)(int*, int) = nullptr;
  int (*device_get_uuid_)(unsigned char*, int) = nullptr;  // null before driver 470
  int (*primary_context_retain_)(void**, int) = nullptr;
  int (*context_get_current_)(void**) = nullptr;
  int (*context_push_)(void*) = nullptr;
  int (*context_pop_)(void**) = nullptr;
  mutable std::array<std::atomic<void*>, 64> contexts_{};  // by device; each is set once, and pairs with loads
};

/// Makes a device current for the calling thread until the end of the scope. What was current before is so again: that
/// no device was, too, since to set device 0 would create a context there.
class OnDevice {
 public:
  OnDevice(const GpuLibrary& gpu, int device) : gpu_(gpu), entered_(gpu.enter(device)) {}
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { gpu_.leave(entered_); }

 private:
  const GpuLibrary& gpu_;
  int entered_;
};

}  // namespace samestep
