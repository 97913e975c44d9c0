// A stand-in for libcudart (or, with FAKE_HIP, for libamdhip64) on machines without a GPU. For tests only.
//
// Device memory is reserved address space without access: the host dies when it touches it. Streams are threads that
// do one thing after another, some after a random delay, so that work which nobody ordered comes in the wrong order.
// As in CUDA 12 a context of a device is made by SetDevice, and by calls in a thread that has none, on device 0. In HIP
// only by calls.
// The legacy default stream and streams made without flags wait for each other. A full stream blocks its callers.
//
//   FAKE_GPU_DEVICES       how many devices there are (4); those that a program takes away so, are lost
//   FAKE_GPU_ERROR         what the first call returns, such as 35 for an old driver
//   FAKE_GPU_DELAY_US      longest delay before a thing in a stream (0)
//   FAKE_GPU_IGNORE_WAITS  "library" or "user": streams made by the package, or by others, wait for no event
//   FAKE_GPU_QUEUE         how many things a stream takes before callers have to wait (1000)
//   CUDA_LAUNCH_BLOCKING   1: kernels end before the call that launches them
//   FAKE_GPU_SECRET_PINNED 1: no other process reads pinned memory by CMA
//   FAKE_GPU_LARGEST       most bytes that can be allocated at once
//   FAKE_GPU_HOST_ACCESS   1: the host reaches device memory, as a GPU-aware MPI library does
//   FAKE_GPU_NO_REGISTER   1: memory of others cannot be pinned
//   FAKE_GPU_SAME          all devices are this physical one
//   FAKE_GPU_MIG           1: those are MIG instances of it
//   FAKE_HIP_VERSION       the version of HIP (60342134)

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

#include "fake_elements.h"
#include "fake_runtime.h"

namespace {

using namespace fake;

const Block* find(const void* data, std::size_t nbytes) {
  auto& blocks = world().blocks;
  char* const at = static_cast<char*>(const_cast<void*>(data));
  auto after = blocks.upper_bound(at);
  if (after == blocks.begin()) return nullptr;
  const Block& block = (--after)->second;
  const char* const end = block.seen + block.nbytes;
  return at + nbytes <= end && (at < end || at == block.seen) ? &block : nullptr;
}

void drain_all_of(int device) {
  for (auto& stream : all_streams()) {
    if (stream->device == device) stream->drain();
  }
}

/// Keeps device memory for a copy in a stream of another device, which `Free` does not wait for.
std::shared_ptr<void> keep(const void* data) {
  const std::lock_guard lock(world().mutex);
  const Block* block = find(data, 0);
  return block != nullptr ? block->mapped : nullptr;
}

/// Bytes that a copy may use: device memory through its other mapping, anything else as it is.
char* bytes_of(const void* data, std::size_t nbytes) {
  const std::lock_guard lock(world().mutex);
  const Block* block = find(data, nbytes);
  if (block != nullptr) return block->bytes + (static_cast<const char*>(data) - block->seen);
  return find(data, 0) != nullptr ? nullptr : static_cast<char*>(const_cast<void*>(data));  // null: past the end
}

bool is_of_device(const void* data) {
  const std::lock_guard lock(world().mutex);
  const Block* block = find(data, 0);
  return block != nullptr && block->device >= 0;
}
/// Memory that the kernel does not read for another process, as memory of a driver may be. Null without memfd_secret.
std::shared_ptr<void> secret_memory(std::size_t nbytes) {
  const std::size_t page = 4096, size = (nbytes + page) / page * page;
  const int fd = static_cast<int>(::syscall(SYS_memfd_secret, 0));
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(size)) != 0) return nullptr;
  void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (memory == MAP_FAILED) return nullptr;
  return {memory, [size](void* data) { ::munmap(data, size); }};
}

}  // namespace

namespace fake {

std::byte* reach(const void* data, std::size_t nbytes, int device) {
  const std::lock_guard lock(world().mutex);
  const Block* block = find(data, nbytes);
  if (block == nullptr || block->device != device) return nullptr;
  return reinterpret_cast<std::byte*>(block->bytes + (static_cast<const char*>(data) - block->seen));
}

bool is_captured(void* stream) {
  const auto found = stream_of(stream);
  const std::lock_guard lock(captures().mutex);
  return found && found->capture != nullptr;
}

bool enqueue(void* stream, int device, std::function<void()> work) {
  const auto found = stream_of(stream);
  if (!found || found->device != device) return false;
  if (submit(found, std::move(work), /*writes=*/true) != kSuccess) return false;
  if (setting("CUDA_LAUNCH_BLOCKING", 0) != 0 && found->capture == nullptr) found->drain();
  return true;
}

Stuck::Stuck(std::function<bool()> can_go) {
  if (current_stream != nullptr) current_stream->stick(std::move(can_go));
}
Stuck::~Stuck() {
  if (current_stream != nullptr) current_stream->stick({});
}

void drain(int device) { drain_all_of(device); }

int current_device() { return use_device(); }  // of calls of NCCL, which makes a context, too

std::string uuid(int device) {
  return setting("FAKE_GPU_MIG", 0) != 0 ? "instance " + std::to_string(device) : bus_id(device);
}

std::string bus_id(int device) {
  const long same = setting("FAKE_GPU_SAME", -1);
  return "0000:0" + std::to_string(same >= 0 ? same : device) + ":00.0";
}

}  // namespace fake

EXPORT int GPU(GetDeviceCount)(int* count) {
  if (const long code = setting("FAKE_GPU_ERROR", 0)) return static_cast<int>(code);
  *count = n_devices();
  return *count > 0 ? kSuccess : 100;
}
EXPORT int GPU(RuntimeGetVersion)(int* version) {
#ifdef FAKE_HIP
  *version = static_cast<int>(setting("FAKE_HIP_VERSION", 60342134));
#else
  *version = 12040;
#endif
  return kSuccess;
}
EXPORT int GPU(GetDevice)(int* device) {
  *device = device_of_thread();
  return kSuccess;
}
EXPORT int GPU(SetDevice)(int device) {
  if (device < 0 || device >= n_devices()) return last_error = kInvalidDevice;
  current.chosen = device;
#ifdef FAKE_HIP
  current.n = 0;  // the next call that works makes the context
  return kSuccess;
#else
  make_context(device);
  if (current.n == 0) current.n = 1;
  current.stack[current.n - 1] = device;
  return ended(kSuccess);
#endif
}
#ifndef FAKE_HIP
EXPORT int cuInit(unsigned) { return kSuccess; }
EXPORT int cuDeviceGet(int* handle, int device) {
  *handle = device;
  return device >= 0 && device < n_devices() ? kSuccess : kInvalidDevice;
}
/// The handle of a context is the address of its entry.
EXPORT int cuDeviceGetUuid_v2(char* bytes, int device) {
  std::memset(bytes, 0, 16);
  std::strncpy(bytes, fake::uuid(device).c_str(), 16);
  return kSuccess;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  make_context(device);
  *context = &contexts().exist[device];
  return kSuccess;
}
EXPORT int cuCtxGetCurrent(void** context) {
  *context = current.n == 0 ? nullptr : &contexts().exist[current.stack[current.n - 1]];
  return kSuccess;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  if (current.n == kDeepest) std::abort();
  current.stack[current.n++] = static_cast<int>(static_cast<std::atomic<bool>*>(context) - contexts().exist);
  return kSuccess;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
  cuCtxGetCurrent(context);
  if (*context == nullptr) return 201;  // CUDA_ERROR_INVALID_CONTEXT
  --current.n;
  return kSuccess;
}
#endif
EXPORT int GPU(DeviceGetPCIBusId)(char* text, int length, int device) {
  if (device < 0 || device >= n_devices()) return kInvalidDevice;
  std::strncpy(text, fake::bus_id(device).c_str(), static_cast<std::size_t>(length));
  return kSuccess;
}
EXPORT const char* GPU(GetErrorString)(int code) {
  switch (code) {
    case kSuccess:
      return "no error";
    case kInvalidValue:
      return "invalid argument";
    case kOutOfMemory:
      return "out of memory";
    case 35:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case 100:
      return "no CUDA-capable device is detected";
    case kInvalidDevice:
      return "invalid device ordinal";
    case kInvalidHandle:
      return "invalid resource handle";
    case kNotReady:
      return "device not ready";
    case 214:
      return "uncorrectable ECC error encountered";
    case 700:
      return "an illegal memory access was encountered";
    case kCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case kCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case kCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case kCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    default:
      return "unknown error";
  }
}
EXPORT int GPU(GetLastError)() {
  const int code = sticky_error() != kSuccess ? sticky_error().load() : last_error;
  last_error = kSuccess;
  return code;
}
EXPORT int GPU(PeekAtLastError)() { return sticky_error() != kSuccess ? sticky_error().load() : last_error; }
EXPORT int GPU(DeviceSynchronize)() {
  ++made().waits;
  if (const int code = forbid_while_capturing()) return ended(code);
  drain_all_of(use_device());
  return kSuccess;
}

EXPORT int GPU(Malloc)(void** out, std::size_t nbytes) {
  ++made().blocks;
  if (const int code = forbid_while_capturing()) return ended(code);
  ++n_allocated();
  if (const long largest = setting("FAKE_GPU_LARGEST", 0); largest > 0 && nbytes > static_cast<std::size_t>(largest))
    return ended(kOutOfMemory);
  const std::size_t page = 4096, size = (nbytes + page - 1) / page * page + page;  // a page more, so that none touch
  const int fd = ::memfd_create("fake-gpu", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(size)) != 0) return kOutOfMemory;
  void* bytes = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void* seen = setting("FAKE_GPU_HOST_ACCESS", 0) == 1
                   ? ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                   : ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ::close(fd);
  if (bytes == MAP_FAILED || seen == MAP_FAILED) return kOutOfMemory;
  std::memset(bytes, 0xCD, nbytes);  // as left by others
  const std::lock_guard lock(world().mutex);
  std::shared_ptr<void> mapped(bytes, [seen, size](void* data) {
    ::munmap(data, size);
    ::munmap(seen, size);
  });
  world().blocks[static_cast<char*>(seen)] = {static_cast<char*>(seen), static_cast<char*>(bytes), nbytes, use_device(),
                                              std::move(mapped)};
  *out = seen;
  return ended(kSuccess);
}
EXPORT int GPU(Free)(void* data) {
  if (data == nullptr) return kSuccess;
  if (const int code = forbid_while_capturing()) return ended(code);
  int device = -1;
  {
    const std::lock_guard lock(world().mutex);
    const auto found = world().blocks.find(static_cast<char*>(data));
    if (found == world().blocks.end() || found->second.device < 0) return ended(kInvalidValue);
    device = found->second.device;
  }
  drain_all_of(device);
  const std::lock_guard lock(world().mutex);
  const auto found = world().blocks.find(static_cast<char*>(data));
  world().blocks.erase(found);
  return kSuccess;
}
EXPORT int GPU_HOST_ALLOC(void** out, std::size_t nbytes, unsigned) {
  ++n_pinned();
  ++made().blocks;
  if (const int code = forbid_while_capturing()) return ended(code);
  std::shared_ptr<void> memory;
  if (setting("FAKE_GPU_SECRET_PINNED", 0) != 0) {
    memory = secret_memory(nbytes);
  } else {
    memory.reset(std::malloc(nbytes > 0 ? nbytes : 1), &std::free);
  }
  if (memory == nullptr) return ended(kOutOfMemory);
  *out = memory.get();
  const std::lock_guard lock(world().mutex);
  char* const data = static_cast<char*>(*out);
  world().blocks[data] = {data, data, nbytes, -1, std::move(memory)};
  return kSuccess;
}
EXPORT int GPU_HOST_FREE(void* data) {
  if (const int code = forbid_while_capturing()) return ended(code);
  drain_all_of(use_device());
  const std::lock_guard lock(world().mutex);
  return ended(world().blocks.erase(static_cast<char*>(data)) == 0 ? kInvalidValue : kSuccess);
}
/// Pins memory of the host, which belongs to others. As in reality, not twice, and it must be unpinned before it is
/// freed.
EXPORT int GPU(HostRegister)(void* data, std::size_t nbytes, unsigned) {
  if (const int code = forbid_while_capturing()) return ended(code);
  if (setting("FAKE_GPU_NO_REGISTER", 0) == 1) return ended(kInvalidValue);
  const std::lock_guard lock(world().mutex);
  char* const at = static_cast<char*>(data);
  if (find(at, 0) != nullptr || nbytes == 0) return ended(kInvalidValue);
  ++n_pinned();
  world().blocks[at] = {at, at, nbytes, -1};
  return kSuccess;
}
EXPORT int GPU(HostUnregister)(void* data) {
  if (const int code = forbid_while_capturing()) return ended(code);
  drain_all_of(use_device());
  const std::lock_guard lock(world().mutex);
  return ended(world().blocks.erase(static_cast<char*>(data)) != 0 ? kSuccess : kInvalidValue);
}
struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
};
EXPORT int GPU(PointerGetAttributes)(PointerAttributes* out, const void* data) {
  looks().await_release();
  use_device();
  const std::lock_guard lock(world().mutex);
  const Block* block = find(data, 0);
  *out = {block == nullptr ? 0 : block->device < 0 ? 1 : 2, block == nullptr ? -2 : block->device, nullptr, nullptr};
  return kSuccess;
}

EXPORT int GPU(MemcpyAsync)(void* to, const void* from, std::size_t nbytes, int, void* stream) {
  if (is_of_device(to) != is_of_device(from)) {
    const long n = static_cast<long>(nbytes);
    n_crossed() += n;
    for (long longest = longest_copy(); longest < n && !longest_copy().compare_exchange_weak(longest, n);) {
    }
  }
  char* const out = bytes_of(to, nbytes);
  char* const in = bytes_of(from, nbytes);
  const auto found = stream_of(stream);
  if (nbytes != 0 && (out == nullptr || in == nullptr)) return ended(kInvalidValue);
  if (!found) return ended(kInvalidHandle);
  return ended(submit(
      found,
      [=, in_kept = keep(from), out_kept = keep(to)] {
        if (nbytes != 0) std::memmove(out, in, nbytes);
      },
      /*writes=*/out != to));
}

/// A kernel of an array library: floats of 16 bits to 32, or back with one rounding.
EXPORT int fakeConvert(void* to, const void* from, std::size_t count, int widens, void* stream_handle) {
  const auto stream = stream_of(stream_handle);
  if (!stream) return kInvalidHandle;
  char* const out = bytes_of(to, count * (widens != 0 ? 4 : 2));
  char* const in = bytes_of(from, count * (widens != 0 ? 2 : 4));
  if (count != 0 && (out == nullptr || in == nullptr)) return kInvalidValue;
  return ended(submit(
      stream,
      [=, in_kept = keep(from), out_kept = keep(to)] {
        for (std::size_t i = 0; i < count; ++i) {
          float wide;
          std::uint16_t half;
          if (widens != 0) {
            std::memcpy(&half, in + 2 * i, 2);
            wide = from_float16(half);
            std::memcpy(out + 4 * i, &wide, 4);
          } else {
            std::memcpy(&wide, in + 4 * i, 4);
            half = to_float16(wide);
            std::memcpy(out + 2 * i, &half, 2);
          }
        }
      },
      /*writes=*/true));
}
