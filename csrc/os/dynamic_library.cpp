#include "os/dynamic_library.h"

#include <dlfcn.h>

#include "core/error.h"
#include "core/format.h"

namespace samestep {

LoadedLibrary::LoadedLibrary(const std::string& path) : handle_(::dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD)) {
  if (handle_ == nullptr) {
    const char* why = ::dlerror();
    throw UnavailableError(str("open the loaded library ", path, ": ", why ? why : "it is not loaded"));
  }
  ::dlclose(handle_);  // only our reference: the library stays loaded
}

OpenedLibrary::OpenedLibrary(const std::string& path)
    // RTLD_NOW: a library that lacks something fails here, where the error can be reported, and not at its first use.
    : path_(path), handle_(::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ == nullptr) {
    const char* why = ::dlerror();
    throw UnavailableError(str("open the library ", path, ": ", why ? why : "it does not load"));
  }
}

void* OpenedLibrary::find(const char* symbol) const { return ::dlsym(handle_, symbol); }

void* LoadedLibrary::find(const char* symbol) const { return ::dlsym(handle_, symbol); }

std::string LoadedLibrary::file_of(const void* address) {
  Dl_info info{};
  return ::dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

}  // namespace samestep
