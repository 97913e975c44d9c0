#include "gpu/gpu_library.h"

#include <array>
#include <optional>

#include "core/error.h"
#include "core/format.h"

namespace samestep {

using namespace gpu_abi;

namespace {

Symbol find_in(const OpenedLibrary& library, const std::string& name) {
  if (void* const address = library.find(name.c_str())) return {address};
  throw UnavailableError(str("the GPU runtime ", library.path(), " has no ", name,
                             ": it is too old, or no CUDA or HIP runtime; `samestep doctor` shows what was found"));
}

/// Throws where a HIP runtime has numbers other than those of gpu_abi: before version 6 its kinds of memory.
void require_hip_6(const OpenedLibrary& library) {
  int (*const get_version)(int*) = find_in(library, "hipRuntimeGetVersion");
  int version = 0;  // 6.3.42134 is 60342134
  const bool known = get_version(&version) == 0;
  if (known && version >= 60000000) return;
  const std::string text = known ? str(version / 10000000, ".", version / 100000 % 100) : std::string("unknown");
  throw UnavailableError(str("the HIP runtime ", library.path(), " is of version ", text,
                             "; ROCm 6 or newer is required, or SAMESTEP_HIP_LIBRARY for another file"));
}

bool is_of_capture(int code) { return code >= kFirstCaptureError && code <= kLastCaptureError; }

}  // namespace

/// Lets the calling thread make calls that CUDA forbids while another thread captures a stream. They would end that
/// capture.
class GpuLibrary::Relaxed {
 public:
  explicit Relaxed(const GpuLibrary& gpu) : gpu_(gpu) { gpu_.exchange_capture_mode_.code(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;
  ~Relaxed() { gpu_.exchange_capture_mode_.code(&mode_); }

 private:
  const GpuLibrary& gpu_;
  int mode_ = kRelaxedCapture;  // of the thread before, in between
};

void GpuLibrary::give_back(const Function<void*>& how, void* what, int device) const noexcept {
  try {
    const OnDevice on(*this, device);
    const Relaxed relaxed(*this);
    how.code(what);
  } catch (const Error&) {  // the device is lost, and what it held with it
  }
}

GpuLibrary::GpuLibrary(DeviceKind kind, const OpenedLibrary& library) : kind_(kind), library_(library) {
  if (!is_hip()) find_driver();
}

std::shared_ptr<GpuLibrary> GpuLibrary::open(DeviceKind kind, const std::string& path) {
  const OpenedLibrary library(path);
  if (kind == DeviceKind::rocm) require_hip_6(library);
  return std::shared_ptr<GpuLibrary>(new GpuLibrary(kind, library));
}

Symbol GpuLibrary::find(const std::string& name) const { return find_in(library_, prefix() + name); }

void GpuLibrary::find_driver() {
  // A real runtime loads it from where the loader finds it. A stand-in is both in one file, or has none: then devices
  // are set, as with HIP.
  std::optional<OpenedLibrary> found;
  try {
    found = library_.find("cuCtxPushCurrent_v2") != nullptr ? library_ : OpenedLibrary("libcuda.so.1");
  } catch (const UnavailableError&) {
    return;
  }
  const OpenedLibrary& driver = *found;
  initialize_ = find_in(driver, "cuInit");
  device_get_ = find_in(driver, "cuDeviceGet");
  driver.find("cuDeviceGetUuid_v2", device_get_uuid_);
  primary_context_retain_ = find_in(driver, "cuDevicePrimaryCtxRetain");
  context_get_current_ = find_in(driver, "cuCtxGetCurrent");
  context_push_ = find_in(driver, "cuCtxPushCurrent_v2");
  context_pop_ = find_in(driver, "cuCtxPopCurrent_v2");
}

void GpuLibrary::check(int code, const char* name) const {
  if (code == 0) [[likely]]
    return;
  get_last_error_();  // else the next call in this thread would report the error again
  const std::string text = str(prefix(), name, " failed: ", get_error_string_(code), " (", code, ")");
  if (is_of_capture(code)) throw UnavailableError(text);
  throw GpuError(text);
}

int GpuLibrary::device_count() const {
  int count = 0;
  get_device_count_(&count);
  return count;
}

int GpuLibrary::current_device() const {
  int device = 0;
  get_device_(&device);
  return device;
}

std::string GpuLibrary::bus_id(int device) const {
  std::array<char, 64> text{};
  device_get_pci_bus_id_(text.data(), static_cast<int>(text.size()) - 1, device);
  return text.data();
}

std::string GpuLibrary::uuid(int device) const {
  std::array<unsigned char, 16> bytes{};
  int handle = 0;
  if (device_get_uuid_ == nullptr || initialize_(0) != 0 || device_get_(&handle, device) != 0) return "";
  if (device_get_uuid_(bytes.data(), handle) != 0) return "";
  std::string text;
  for (const unsigned char byte : bytes) {
    for (const int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
  }
  return text;
}

int GpuLibrary::device_of(const void* data) const {
  struct Attributes {
    int type, device;
    std::array<char, 240> others;  // more than any version writes
  } attributes{};
  const OnDevice on(*this, device_in_use());
  const int code = pointer_get_attributes_.code(&attributes, data);
  if (code == kInvalidValue && is_hip()) {  // HIP reports this for host memory; CUDA succeeds
    get_last_error_();
    return -1;
  }
  pointer_get_attributes_.check(code);
  // Pinned host memory also has a device, which does not own it.
  return attributes.type == kDeviceMemory || attributes.type == kManagedMemory ? attributes.device : -1;
}

void* GpuLibrary::allocate(std::size_t nbytes) const {
  void* data = nullptr;
  const Relaxed relaxed(*this);
  malloc_(&data, nbytes);
  return data;
}

void* GpuLibrary::allocate_pinned(std::size_t nbytes) const {
  void* data = nullptr;
  const Relaxed relaxed(*this);
  host_alloc_(&data, nbytes, kPortable);
  return data;
}

bool GpuLibrary::pin(void* data, std::size_t nbytes) const noexcept {
  const Relaxed relaxed(*this);
  // A refusal is no error: the limit of locked memory may be small, and the caller has other memory. So it must not
  // stay behind as the thread's last error either.
  const bool pinned = host_register_.code(data, nbytes, kPortable) == 0;
  if (!pinned) get_last_error_();
  return pinned;
}

GpuLibrary::Stream GpuLibrary::make_stream() const {
  Stream stream = nullptr;
  const Relaxed relaxed(*this);
  // An ordinary stream waits for everything in the legacy default stream, and the user's work there for it.
  stream_create_(&stream, kNonBlockingStream);
  return stream;
}

void GpuLibrary::synchronize(Stream stream) const {
  const Relaxed relaxed(*this);
  stream_synchronize_(stream);
}

GpuLibrary::Event GpuLibrary::make_event() const {
  Event event = nullptr;
  // Without timing, which only costs time: events here order streams and show that work has ended.
  event_create_(&event, kOrderOnlyEvent);
  return event;
}

bool GpuLibrary::is_complete(Event event) const {
  const Relaxed relaxed(*this);
  const int code = event_query_.code(event);
  // CUDA does not keep this as the thread's last error; HIP does, and the user's next check would find it.
  if (code == kNotReady && is_hip()) get_last_error_();
  if (code == kNotReady) return false;
  if (is_of_capture(code)) {  // no loss of the device; ROCm has no relaxed mode for queries
    get_last_error_();
    return false;
  }
  event_query_.check(code);
  return true;
}

bool GpuLibrary::is_capturing(Stream stream, int device) const {
  int status = 0;
  const OnDevice on(*this, device >= 0 ? device : device_in_use());  // whose default stream may be meant
  const int code = stream_is_capturing_.code(stream, &status);
  if (is_of_capture(code)) {  // the legacy default stream, while one that waits for it is captured
    get_last_error_();
    return true;
  }
  stream_is_capturing_.check(code);
  return status != 0;
}

}  // namespace samestep
