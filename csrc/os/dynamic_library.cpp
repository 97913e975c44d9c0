#include "os/dynamic_library.h"

#include <dlfcn.h>

#include "core/error.h"
#include "core/format.h"

namespace samestep {

OpenedLibrary::OpenedLibrary(const std::string& path, void* handle, const char* action, const char* otherwise)
    : path_(path), handle_(handle) {
  if (handle_ != nullptr) return;
  const char* const why = ::dlerror();
  throw UnavailableError(str("open the ", action, path, ": ", why ? why : otherwise));
}

OpenedLibrary::OpenedLibrary(const std::string& path)
    // RTLD_NOW: a library that lacks something fails here, where the error can be reported, and not at its first use.
    : OpenedLibrary(path, ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL), "library ", "it does not load") {}

OpenedLibrary OpenedLibrary::loaded(const std::string& path) {
  OpenedLibrary library(path, ::dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD), "loaded library ", "it is not loaded");
  ::dlclose(library.handle_);  // only our reference: the library stays loaded
  return library;
}

void* OpenedLibrary::find(const char* symbol) const { return ::dlsym(handle_, symbol); }

std::string OpenedLibrary::file_of(const void* address) {
  Dl_info info{};
  return ::dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

}  // namespace samestep
