// A stand-in for libcudart (or, with FAKE_HIP, for libamdhip64) on machines without a GPU. For tests only.
//
// Device memory is reserved address space without access: the host dies when it touches it. Streams are threads that
// do one thing after another, some after a random delay, so that work which nobody ordered comes in the wrong order.
// Only the default stream is simpler than in reality: it waits for no other stream, nor they for it.
//
//   FAKE_GPU_DEVICES       how many devices there are (4); those that a program takes away so, are lost
//   FAKE_GPU_ERROR         what the first call returns, such as 35 for an old driver
//   FAKE_GPU_DELAY_US      longest delay before a thing in a stream (0)
//   FAKE_GPU_IGNORE_WAITS  "library" or "user": streams made by the package, or by others, wait for no event
//   FAKE_GPU_LARGEST       most bytes that can be allocated at once
//   FAKE_GPU_HOST_ACCESS   1: the host reaches device memory, as a GPU-aware MPI library does
//   FAKE_GPU_SAME          all devices are this physical one

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "fake_streams.h"

#ifdef FAKE_HIP
#define GPU(name) hip##name
#define GPU_HOST_ALLOC hipHostMalloc
#define GPU_HOST_FREE hipHostFree
#else
#define GPU(name) cuda##name
#define GPU_HOST_ALLOC cudaHostAlloc
#define GPU_HOST_FREE cudaFreeHost
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace fake;

enum Code {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kInvalidHandle = 400,
  kNotReady = 600
};

struct Block {
  char* seen;   // what the caller holds
  char* bytes;  // where the elements are
  std::size_t nbytes;
  int device;                              // -1: pinned memory of the host
  std::shared_ptr<void> mapped = nullptr;  // device memory: held also by copies that have not run yet
};

// Never destroyed: threads of streams may run when the process ends.
struct World {
  std::mutex mutex;
  std::map<char*, Block> blocks;
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::map<void*, std::shared_ptr<Stream>> destroyed;  // whose work has not ended
  std::map<int, std::shared_ptr<Stream>> default_streams;
  std::map<void*, std::shared_ptr<Event>> events;
};
World& world() {
  static auto& only = *new World;
  return only;
}
thread_local int device_of_thread = 0;

int n_devices() { return static_cast<int>(setting("FAKE_GPU_DEVICES", 4)); }

const Block* find(const void* data, std::size_t nbytes) {
  auto& blocks = world().blocks;
  char* const at = static_cast<char*>(const_cast<void*>(data));
  auto after = blocks.upper_bound(at);
  if (after == blocks.begin()) return nullptr;
  const Block& block = (--after)->second;
  const char* const end = block.seen + block.nbytes;
  return at + nbytes <= end && (at < end || at == block.seen) ? &block : nullptr;
}

std::shared_ptr<Stream> stream_of(void* handle) {
  const std::lock_guard lock(world().mutex);
  if (reinterpret_cast<std::uintptr_t>(handle) <= 2) {
    auto& stream = world().default_streams[device_of_thread];
    if (!stream) stream = std::make_shared<Stream>(device_of_thread, false);
    return stream;
  }
  const auto found = world().streams.find(handle);
  return found == world().streams.end() ? nullptr : found->second;
}

std::shared_ptr<Event> event_of(void* handle) {
  const std::lock_guard lock(world().mutex);
  const auto found = world().events.find(handle);
  return found == world().events.end() ? nullptr : found->second;
}

std::deque<std::shared_ptr<Stream>> all_streams() {
  std::deque<std::shared_ptr<Stream>> all;
  const std::lock_guard lock(world().mutex);
  for (auto& [_, stream] : world().streams) all.push_back(stream);
  for (auto& [_, stream] : world().destroyed) all.push_back(stream);
  for (auto& [_, stream] : world().default_streams) all.push_back(stream);
  return all;
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
std::atomic<long> n_crossed{0};  // bytes copied between the host and devices

}  // namespace

namespace fake {

std::byte* reach(const void* data, std::size_t nbytes, int device) {
  const std::lock_guard lock(world().mutex);
  const Block* block = find(data, nbytes);
  if (block == nullptr || block->device != device) return nullptr;
  return reinterpret_cast<std::byte*>(block->bytes + (static_cast<const char*>(data) - block->seen));
}

bool enqueue(void* stream, int device, std::function<void()> work) {
  const auto found = stream_of(stream);
  if (!found || found->device != device) return false;
  found->push(std::move(work), /*writes=*/true);
  return true;
}

Stuck::Stuck(std::function<bool()> can_go) {
  if (current_stream != nullptr) current_stream->stick(std::move(can_go));
}
Stuck::~Stuck() {
  if (current_stream != nullptr) current_stream->stick({});
}

int current_device() { return device_of_thread; }

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
  *version = 12040;
  return kSuccess;
}
EXPORT int GPU(GetDevice)(int* device) {
  *device = device_of_thread;
  return kSuccess;
}
EXPORT int GPU(SetDevice)(int device) {
  if (device < 0 || device >= n_devices()) return kInvalidDevice;
  device_of_thread = device;
  return kSuccess;
}
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
    default:
      return "unknown error";
  }
}
EXPORT int GPU(GetLastError)() { return kSuccess; }
EXPORT int GPU(DeviceSynchronize)() {
  drain_all_of(device_of_thread);
  return kSuccess;
}

EXPORT int GPU(Malloc)(void** out, std::size_t nbytes) {
  if (const long largest = setting("FAKE_GPU_LARGEST", 0); largest > 0 && nbytes > static_cast<std::size_t>(largest))
    return kOutOfMemory;
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
  world().blocks[static_cast<char*>(seen)] = {static_cast<char*>(seen), static_cast<char*>(bytes), nbytes,
                                              device_of_thread, std::move(mapped)};
  *out = seen;
  return kSuccess;
}
EXPORT int GPU(Free)(void* data) {
  if (data == nullptr) return kSuccess;
  int device = -1;
  {
    const std::lock_guard lock(world().mutex);
    const auto found = world().blocks.find(static_cast<char*>(data));
    if (found == world().blocks.end() || found->second.device < 0) return kInvalidValue;
    device = found->second.device;
  }
  drain_all_of(device);
  const std::lock_guard lock(world().mutex);
  const auto found = world().blocks.find(static_cast<char*>(data));
  world().blocks.erase(found);
  return kSuccess;
}
EXPORT int GPU_HOST_ALLOC(void** out, std::size_t nbytes, unsigned) {
  *out = std::malloc(nbytes > 0 ? nbytes : 1);
  if (*out == nullptr) return kOutOfMemory;
  const std::lock_guard lock(world().mutex);
  char* const data = static_cast<char*>(*out);
  world().blocks[data] = {data, data, nbytes, -1};
  return kSuccess;
}
EXPORT int GPU_HOST_FREE(void* data) {
  drain_all_of(device_of_thread);
  const std::lock_guard lock(world().mutex);
  if (world().blocks.erase(static_cast<char*>(data)) == 0) return kInvalidValue;
  std::free(data);
  return kSuccess;
}
struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
};
EXPORT int GPU(PointerGetAttributes)(PointerAttributes* out, const void* data) {
  const std::lock_guard lock(world().mutex);
  const Block* block = find(data, 0);
  *out = {block == nullptr ? 0 : block->device < 0 ? 1 : 2, block == nullptr ? -2 : block->device, nullptr, nullptr};
  return kSuccess;
}

EXPORT int GPU(MemcpyAsync)(void* to, const void* from, std::size_t nbytes, int, void* stream) {
  if (is_of_device(to) != is_of_device(from)) n_crossed += static_cast<long>(nbytes);
  char* const out = bytes_of(to, nbytes);
  char* const in = bytes_of(from, nbytes);
  const auto found = stream_of(stream);
  if (nbytes != 0 && (out == nullptr || in == nullptr)) return kInvalidValue;
  if (!found) return kInvalidHandle;
  found->push(
      [=, in_kept = keep(from), out_kept = keep(to)] {
        if (nbytes != 0) std::memmove(out, in, nbytes);
      },
      /*writes=*/out != to);
  return kSuccess;
}

EXPORT int GPU(StreamCreateWithFlags)(void** out, unsigned flags) {
  const std::lock_guard lock(world().mutex);
  auto stream = std::make_shared<Stream>(device_of_thread, flags != 0);
  *out = stream.get();
  world().streams[*out] = std::move(stream);
  return kSuccess;
}
EXPORT int GPU(StreamDestroy)(void* handle) {
  const auto stream = stream_of(handle);
  if (!stream) return kInvalidHandle;
  {
    const std::lock_guard lock(world().mutex);
    world().streams.erase(handle);
    world().destroyed[handle] = stream;
  }
  std::thread([stream, handle] {  // what it holds is still done
    stream->end();
    const std::lock_guard lock(world().mutex);
    world().destroyed.erase(handle);
  })
      .detach();
  return kSuccess;
}
EXPORT int GPU(StreamQuery)(void* handle) {
  const auto stream = stream_of(handle);
  if (!stream) return kInvalidHandle;
  return stream->idle() ? kSuccess : kNotReady;
}
EXPORT int GPU(StreamSynchronize)(void* handle) {
  const auto stream = stream_of(handle);
  if (!stream) return kInvalidHandle;
  stream->drain();
  return kSuccess;
}

EXPORT int GPU(EventCreateWithFlags)(void** out, unsigned) {
  const std::lock_guard lock(world().mutex);
  auto event = std::make_shared<Event>();
  *out = event.get();
  world().events[*out] = std::move(event);
  return kSuccess;
}
EXPORT int GPU(EventDestroy)(void* handle) {
  const std::lock_guard lock(world().mutex);
  return world().events.erase(handle) != 0 ? kSuccess : kInvalidHandle;
}
EXPORT int GPU(EventRecord)(void* handle, void* stream_handle) {
  const auto event = event_of(handle);
  const auto stream = stream_of(stream_handle);
  if (!event || !stream) return kInvalidHandle;
  std::uint64_t number;
  {
    const std::lock_guard lock(event->mutex);
    number = ++event->recorded;
    event->device = stream->device;
  }
  stream->push([=] { event->happen(number); });
  return kSuccess;
}
EXPORT int GPU(EventQuery)(void* handle) {
  const auto event = event_of(handle);
  if (!event) return kInvalidHandle;
  const std::lock_guard lock(event->mutex);
  if (event->device >= n_devices()) return kInvalidDevice;  // it has gone
  return event->happened == event->recorded ? kSuccess : kNotReady;
}
EXPORT int GPU(EventSynchronize)(void* handle) {
  const auto event = event_of(handle);
  if (!event) return kInvalidHandle;
  std::unique_lock lock(event->mutex);
  event->changed.wait(lock, [&] { return event->happened == event->recorded; });
  return kSuccess;
}
EXPORT int GPU(StreamWaitEvent)(void* stream_handle, void* handle, unsigned) {
  const auto event = event_of(handle);
  const auto stream = stream_of(stream_handle);
  if (!event || !stream) return kInvalidHandle;
  const char* const ignored = std::getenv("FAKE_GPU_IGNORE_WAITS");
  if (ignored != nullptr && (std::strcmp(ignored, "library") == 0) == stream->of_library) return kSuccess;
  std::uint64_t number;
  {
    const std::lock_guard lock(event->mutex);
    number = event->recorded;
  }
  stream->push([=] { event->wait_for(number); });
  return kSuccess;
}

/// What only tests call: what is in the stream waits so long.
EXPORT int fakeDelay(void* stream_handle, long microseconds) {
  const auto stream = stream_of(stream_handle);
  if (!stream) return kInvalidHandle;
  stream->push([=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
  return kSuccess;
}
/// The stream stops here until `fakeRelease`. One hold at a time.
EXPORT int fakeHold(void* stream_handle) {
  const auto stream = stream_of(stream_handle);
  if (!stream) return kInvalidHandle;
  stream->held = true;
  stream->push([raw = stream.get()] { Stream::pass(raw->held); });
  return kSuccess;
}
EXPORT int fakeRelease(void* stream_handle) {
  const auto stream = stream_of(stream_handle);
  if (!stream) return kInvalidHandle;
  stream->held = false;
  return kSuccess;
}
/// Whether streams of the package stop before what writes to device memory.
EXPORT void fakeHoldWrites(int held) { Stream::writes_are_held() = held != 0; }
EXPORT long fakeCrossed() { return n_crossed; }
/// Returns once all streams have done what they can without a release or another process.
EXPORT void fakeRunUnblocked() {
  while (true) {
    const unsigned long before = n_steps();
    bool settled = true;
    for (auto& stream : all_streams()) settled = settled && (stream->idle() || stream->stuck());
    if (settled && n_steps() == before) return;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}
/// Blocks of device and pinned memory that exist, streams and events: to find leaks.
EXPORT void fakeCounts(long* out) {
  const std::lock_guard lock(world().mutex);
  out[0] = out[1] = 0;
  for (const auto& [_, block] : world().blocks) ++out[block.device < 0 ? 1 : 0];
  out[2] = static_cast<long>(world().streams.size());
  out[3] = static_cast<long>(world().events.size());
}
