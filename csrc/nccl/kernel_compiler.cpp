#include "nccl/kernel_compiler.h"

#include "core/error.h"
#include "core/format.h"
#include "os/dynamic_library.h"

namespace samestep {
namespace {

constexpr int kComputeCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeCapabilityMinor = 76;

template <class Function>
void find(const OpenedLibrary& library, const std::string& symbol, Function& function) {
  if (!library.find(symbol.c_str(), function)) throw UnavailableError(str(library.path(), " has no ", symbol));
}

}  // namespace

KernelCompiler::KernelCompiler(DeviceKind kind, const std::string& path)
    : prefix_(kind == DeviceKind::rocm ? "hiprtc" : "nvrtc") {
  const OpenedLibrary library(path);
  const std::string code = kind == DeviceKind::rocm ? "GetCode" : "GetCUBIN";
  find(library, prefix_ + "Version", version_);
  find(library, prefix_ + "CreateProgram", create_);
  find(library, prefix_ + "CompileProgram", compile_);
  find(library, prefix_ + "GetProgramLogSize", log_size_);
  find(library, prefix_ + "GetProgramLog", log_);
  find(library, prefix_ + code + "Size", code_size_);
  find(library, prefix_ + code, code_);
  find(library, prefix_ + "DestroyProgram", destroy_);
  find(library, prefix_ + "GetErrorString", get_error_string_);
}

void KernelCompiler::check(int code, const char* call) const {
  if (code != 0) throw Error(str(prefix_, call, " failed: ", get_error_string_(code), " (", code, ")"));
}

std::string KernelCompiler::version() const {
  int major = 0, minor = 0;
  check(version_(&major, &minor), "Version");
  return str(major, ".", minor);
}

std::vector<char> KernelCompiler::compile(const std::string& source, const std::string& architecture) const {
  Program program = nullptr;
  check(create_(&program, source.c_str(), "samestep_packing.cu", 0, nullptr, nullptr), "CreateProgram");
  const std::shared_ptr<void> owned(nullptr, [this, program](void*) mutable { destroy_(&program); });
  const std::string target = "--gpu-architecture=" + architecture;
  const std::vector<const char*> options = architecture.empty()
                                               ? std::vector<const char*>{"--std=c++17"}
                                               : std::vector<const char*>{target.c_str(), "--std=c++17"};
  if (const int code = compile_(program, static_cast<int>(options.size()), options.data()); code != 0) {
    std::size_t nbytes = 0;
    std::string log;
    if (log_size_(program, &nbytes) == 0 && nbytes > 1) {
      log.resize(nbytes);
      if (log_(program, log.data()) != 0) log.clear();
    }
    throw Error(str(prefix_, "CompileProgram for ", architecture.empty() ? "this device" : architecture,
                    " failed: ", get_error_string_(code), " (", code, ") ", log.c_str()));
  }
  std::size_t nbytes = 0;
  check(code_size_(program, &nbytes), "GetCodeSize");
  std::vector<char> image(nbytes);
  check(code_(program, image.data()), "GetCode");
  return image;
}

KernelDriver::KernelDriver(DeviceKind kind, const std::string& path)
    : prefix_(kind == DeviceKind::rocm ? "hip" : "cu") {
  const OpenedLibrary library(path);
  const bool hip = kind == DeviceKind::rocm;
  if (!hip) {
    find(library, "cuDeviceGet", device_get_);
    find(library, "cuDeviceGetAttribute", device_get_attribute_);
  }
  find(library, prefix_ + "ModuleLoadData", module_load_data_);
  find(library, prefix_ + "ModuleGetFunction", module_get_function_);
  find(library, hip ? "hipModuleLaunchKernel" : "cuLaunchKernel", launch_);
}

void KernelDriver::check(int code, const char* call) const {
  if (code != 0) throw Error(str(prefix_, call, " failed with code ", code));
}

std::string KernelDriver::architecture(int device) const {
  if (device_get_ == nullptr) return "";
  int handle = 0, major = 0, minor = 0;
  check(device_get_(&handle, device), "DeviceGet");
  check(device_get_attribute_(&major, kComputeCapabilityMajor, handle), "DeviceGetAttribute");
  check(device_get_attribute_(&minor, kComputeCapabilityMinor, handle), "DeviceGetAttribute");
  return str("sm_", major, minor);
}

KernelDriver::Module KernelDriver::load(const std::vector<char>& image) const {
  Module module = nullptr;
  check(module_load_data_(&module, image.data()), "ModuleLoadData");
  return module;
}

KernelDriver::Kernel KernelDriver::kernel(Module module, const char* name) const {
  Kernel kernel = nullptr;
  check(module_get_function_(&kernel, module, name), "ModuleGetFunction");
  return kernel;
}

void KernelDriver::launch(Kernel kernel, unsigned columns, unsigned rows, unsigned threads, GpuLibrary::Stream stream,
                          void** arguments) const {
  check(launch_(kernel, columns, rows, 1, threads, 1, 1, 0, stream, arguments, nullptr), "LaunchKernel");
}

}  // namespace samestep
