#pragma once

#include <string>
#include <vector>

#include "nccl/gpu_library.h"

namespace samestep {

/// NVRTC or hipRTC: turns the text of kernels into a program for one architecture.
/// Sources: NVRTC 11.1 and newer; HIP RTC.
class KernelCompiler {
 public:
  /// Throws UnavailableError, naming the file, if it does not load or lacks a symbol.
  KernelCompiler(DeviceKind kind, const std::string& path);

  /// "12.4"
  std::string version() const;
  /// `architecture`: "sm_90"; "" for the current device's. Throws Error with the compiler's messages.
  std::vector<char> compile(const std::string& source, const std::string& architecture) const;

 private:
  using Program = void*;
  void check(int code, const char* call) const;

  std::string prefix_;
  int (*version_)(int*, int*) = nullptr;
  int (*create_)(Program*, const char*, const char*, int, const char* const*, const char* const*) = nullptr;
  int (*compile_)(Program, int, const char* const*) = nullptr;
  int (*log_size_)(Program, std::size_t*) = nullptr;
  int (*log_)(Program, char*) = nullptr;
  int (*code_size_)(Program, std::size_t*) = nullptr;
  int (*code_)(Program, char*) = nullptr;
  int (*destroy_)(Program*) = nullptr;
  const char* (*get_error_string_)(int) = nullptr;
};

/// The calls of the CUDA driver, or of the HIP runtime, that load programs and start kernels in the current device.
class KernelDriver {
 public:
  using Module = void*;
  using Kernel = void*;

  KernelDriver(DeviceKind kind, const std::string& path);

  /// "sm_90"; "" for HIP, which has no number for it.
  std::string architecture(int device) const;
  /// Throws Error if the image is none for the current device.
  Module load(const std::vector<char>& image) const;
  Kernel kernel(Module module, const char* name) const;
  void launch(Kernel kernel, unsigned columns, unsigned rows, unsigned threads, GpuLibrary::Stream stream,
              void** arguments) const;

 private:
  void check(int code, const char* call) const;

  std::string prefix_;
  int (*device_get_)(int*, int) = nullptr;
  int (*device_get_attribute_)(int*, int, int) = nullptr;
  int (*module_load_data_)(Module*, const void*) = nullptr;
  int (*module_get_function_)(Kernel*, Module, const char*) = nullptr;
  int (*launch_)(Kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, GpuLibrary::Stream,
                 void**, void**) = nullptr;
};

}  // namespace samestep
