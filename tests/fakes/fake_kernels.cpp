// A stand-in for NVRTC and for what the CUDA driver does with kernels (with FAKE_HIP: hipRTC, and that part of the HIP
// runtime). For tests only.
//
// Kernels are compiled by the machine's C++ compiler and run in the thread of their stream, one thread of the device
// after another. So their own text is what is tested: its arithmetic of places, sizes and remainders. What is not: how
// threads of a device meet, and how fast they are.
//
//   FAKE_GPU_CAPABILITY  of all devices (90)
//   FAKE_NVRTC_EDIT      "old=>new": a mistake in the text, to see that it is found out
//   FAKE_NVRTC_FAIL      1: nothing compiles
//   FAKE_NVRTC_COUNT     a file that is given a line for each compilation

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "fake_gpu.h"

#ifdef FAKE_HIP
#define RTC(name) hiprtc##name
#define DRIVER(name) hip##name
#define LAUNCH hipModuleLaunchKernel
#define CODE(name) hiprtcGetCode##name
#else
#define RTC(name) nvrtc##name
#define DRIVER(name) cu##name
#define LAUNCH cuLaunchKernel
#define CODE(name) nvrtcGetCUBIN##name
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kBadInput = 3, kBadOption = 5, kCompilation = 6;                            // of the compiler
constexpr int kInvalidValue = 1, kNoBinary = 209, kInvalidHandle = 400, kNotFound = 500;  // of the driver
constexpr std::size_t kMostArguments = 4096;                                              // bytes

std::string text_of(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : otherwise;
}

struct Program {
  std::string source, log, image;
};

struct Header {  // of an image, before the library
  char magic[8];
  char capability[8];
  std::uint64_t nbytes;
};

constexpr const char* kBefore = R"(
#define __device__ static
#define __global__
struct Index { unsigned x, y, z; };
static thread_local Index blockIdx, threadIdx, blockDim, gridDim;
)";

std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \n"), end = text.find_last_not_of(" \n");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

/// For each kernel a function that takes what a launch is given, and the sizes of its arguments.
std::string entries(const std::string& source) {
  const std::string mark = "__global__ void ";
  std::ostringstream out;
  for (std::size_t at = source.find(mark); at != std::string::npos; at = source.find(mark, at + 1)) {
    const std::size_t open = source.find('(', at), close = source.find(')', open);
    const std::string name = source.substr(at + mark.size(), open - at - mark.size());
    std::stringstream arguments(source.substr(open + 1, close - open - 1));
    std::string call, sizes;
    int n = 0;
    for (std::string argument; std::getline(arguments, argument, ',');) {
      argument = trimmed(argument);
      const std::string type = argument.substr(0, argument.find_last_of(" *&") + 1);
      call += (n > 0 ? ", " : "") + ("*(std_remove<" + type + ">*)a[" + std::to_string(n) + "]");
      sizes += "sizeof(" + type + "), ";
      ++n;
    }
    out << "extern \"C\" unsigned long fake_sizes_" << name << "[] = {" << sizes << "0};\n"
        << "extern \"C\" void fake_run_" << name << "(void** a, const unsigned* grid, const unsigned* block) {\n"
        << "  gridDim = {grid[0], grid[1], grid[2]}; blockDim = {block[0], block[1], block[2]};\n"
        << "  for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)\n"
        << "  for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)\n"
        << "  for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)\n"
        << "  for (threadIdx.y = 0; threadIdx.y < block[1]; ++threadIdx.y)\n"
        << "  for (threadIdx.x = 0; threadIdx.x < block[0]; ++threadIdx.x) " << name << "(" << call << ");\n}\n";
  }
  return "template <class T> using std_remove = T;\n" + out.str();
}

std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A library of these kernels, "" with a log if the text is wrong.
std::string built(const std::string& source, std::string& log) {
  std::string folder = text_of("TMPDIR", "/tmp") + "/fake-nvrtc-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return "";
  std::ofstream(folder + "/kernels.cpp") << kBefore << source << entries(source);
  const std::string words =
      text_of("CXX", "c++") +
      " -std=c++17 -O1 -w -fsanitize=alignment -fsanitize-undefined-trap-on-error -fPIC -shared -o " + folder +
      "/kernels.so " + folder + "/kernels.cpp 2>" + folder + "/log";
  const bool ok = std::system(words.c_str()) == 0;
  log = file_text(folder + "/log");
  const std::string image = ok ? file_text(folder + "/kernels.so") : "";
  for (const char* name : {"/kernels.cpp", "/kernels.so", "/log"}) ::unlink((folder + name).c_str());
  ::rmdir(folder.c_str());
  return image;
}

struct Kernel {
  void (*run)(void**, const unsigned*, const unsigned*);
  const unsigned long* sizes;
};

std::mutex mutex;
std::set<void*> modules;
std::set<Kernel*>& kernels() {
  static auto& all = *new std::set<Kernel*>;
  return all;
}

}  // namespace

// ---- the compiler

EXPORT int RTC(Version)(int* major, int* minor) {
  *major = 12;
  *minor = 4;
  return 0;
}
EXPORT const char* RTC(GetErrorString)(int code) { return code == kCompilation ? "compilation" : "invalid input"; }
EXPORT int RTC(CreateProgram)(Program** out, const char* source, const char*, int n_headers, const char* const*,
                              const char* const*) {
  if (source == nullptr || n_headers != 0) return kBadInput;
  *out = new Program{source, "", ""};
  return 0;
}
EXPORT int RTC(CompileProgram)(Program* program, int n_options, const char* const* options) {
  const std::string capability = text_of("FAKE_GPU_CAPABILITY", "90");
  for (int i = 0; i < n_options; ++i) {
    const std::string option = options[i];
    if (option != "--gpu-architecture=sm_" + capability && option != "--std=c++17") {
      program->log = "fake: no such option: " + option;
      return kBadOption;
    }
  }
  if (const std::string counted = text_of("FAKE_NVRTC_COUNT", ""); !counted.empty()) {
    std::ofstream(counted, std::ios::app) << "compiled\n";
  }
  if (text_of("FAKE_NVRTC_FAIL", "") == "1") {
    program->log = "fake: this compiler is broken";
    return kCompilation;
  }
  std::string source = program->source;
  const std::string edit = text_of("FAKE_NVRTC_EDIT", "");
  if (const std::size_t cut = edit.find("=>"); cut != std::string::npos) {
    const std::size_t at = source.find(edit.substr(0, cut));
    if (at == std::string::npos) return kBadInput;
    source.replace(at, cut, edit.substr(cut + 2));
  }
  const std::string library = built(source, program->log);
  if (library.empty()) return kCompilation;
  Header header{"FAKEBIN", "", library.size()};
  std::strncpy(header.capability, capability.c_str(), sizeof header.capability - 1);
  program->image = std::string(reinterpret_cast<char*>(&header), sizeof header) + library;
  return 0;
}
EXPORT int RTC(GetProgramLogSize)(Program* program, std::size_t* out) {
  *out = program->log.size() + 1;
  return 0;
}
EXPORT int RTC(GetProgramLog)(Program* program, char* out) {
  std::memcpy(out, program->log.c_str(), program->log.size() + 1);
  return 0;
}
EXPORT int CODE(Size)(Program* program, std::size_t* out) {
  *out = program->image.size();
  return program->image.empty() ? kBadInput : 0;
}
EXPORT int CODE()(Program* program, char* out) {
  std::copy(program->image.begin(), program->image.end(), out);
  return 0;
}
EXPORT int RTC(DestroyProgram)(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}

// ---- the driver

EXPORT int DRIVER(DeviceGet)(int* out, int device) {
  *out = device;
  return 0;
}
#ifndef FAKE_HIP
EXPORT int DRIVER(DeviceGetAttribute)(int* out, int attribute, int) {
  const int capability = std::atoi(text_of("FAKE_GPU_CAPABILITY", "90").c_str());
  if (attribute != 75 && attribute != 76) return kInvalidValue;
  *out = attribute == 75 ? capability / 10 : capability % 10;
  return 0;
}
#endif
EXPORT int DRIVER(ModuleLoadData)(void** out, const void* image) {
  Header header;
  std::memcpy(&header, image, sizeof header);
  if (std::memcmp(header.magic, "FAKEBIN", 8) != 0) return kInvalidValue;
  if (text_of("FAKE_GPU_CAPABILITY", "90") != header.capability) return kNoBinary;
  std::string path = text_of("TMPDIR", "/tmp") + "/fake-module-XXXXXX";
  const int fd = ::mkstemp(path.data());
  if (fd < 0) return kInvalidValue;
  ::close(fd);
  std::ofstream(path, std::ios::binary)
      .write(static_cast<const char*>(image) + sizeof header, static_cast<std::streamsize>(header.nbytes));
  *out = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  ::unlink(path.c_str());
  if (*out == nullptr) return kInvalidValue;
  const std::lock_guard lock(mutex);
  modules.insert(*out);
  return 0;
}
EXPORT int DRIVER(ModuleGetFunction)(void** out, void* module, const char* name) {
  const std::lock_guard lock(mutex);
  if (modules.count(module) == 0) return kInvalidHandle;
  void* run = ::dlsym(module, (std::string("fake_run_") + name).c_str());
  void* sizes = ::dlsym(module, (std::string("fake_sizes_") + name).c_str());
  if (run == nullptr || sizes == nullptr) return kNotFound;
  auto* kernel = new Kernel{reinterpret_cast<void (*)(void**, const unsigned*, const unsigned*)>(run),
                            static_cast<const unsigned long*>(sizes)};
  kernels().insert(kernel);
  *out = kernel;
  return 0;
}

/// Words that are addresses of the device's memory are given the places where its bytes lie; all else stays.
static void translate(std::vector<std::uint64_t>& words, int device) {
  for (std::uint64_t& word : words) {
    const std::byte* at = fake::reach(reinterpret_cast<const void*>(word), 0, device);
    if (word != 0 && at != nullptr) word = reinterpret_cast<std::uint64_t>(at);
  }
}

EXPORT int LAUNCH(void* handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void* stream, void** arguments, void** extra) {
  auto* kernel = static_cast<Kernel*>(handle);
  {
    const std::lock_guard lock(mutex);
    if (kernels().count(kernel) == 0) return kInvalidHandle;
  }
  const bool grid = gx > 0 && gy > 0 && gz > 0 && gy <= 65535 && gz <= 65535;
  const bool block = bx > 0 && by > 0 && bz > 0 && std::uint64_t{bx} * by * bz <= 1024;
  if (!grid || !block || shared != 0 || extra != nullptr || arguments == nullptr) return kInvalidValue;
  const int device = fake::current_device();
  auto kept = std::make_shared<std::vector<std::vector<std::uint64_t>>>();
  std::size_t total = 0;
  for (int i = 0; kernel->sizes[i] != 0; ++i) {
    kept->emplace_back((kernel->sizes[i] + 7) / 8, 0);
    std::memcpy(kept->back().data(), arguments[i], kernel->sizes[i]);
    translate(kept->back(), device);
    total += kernel->sizes[i];
  }
  if (total > kMostArguments) return kInvalidValue;
  const bool queued = fake::enqueue(stream, device, [=] {
    std::vector<void*> places;
    for (auto& words : *kept) places.push_back(words.data());
    const unsigned blocks[3] = {gx, gy, gz}, threads[3] = {bx, by, bz};
    kernel->run(places.data(), blocks, threads);
  });
  return queued ? 0 : kInvalidHandle;
}
