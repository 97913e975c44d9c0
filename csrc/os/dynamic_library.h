#pragma once

#include <string>

namespace samestep {

/// A shared library that some other part of the process has loaded already. Does not keep it loaded.
class LoadedLibrary {
 public:
  /// Throws UnavailableError if `path` is not loaded in this process.
  explicit LoadedLibrary(const std::string& path);

  /// Address of a symbol of the library or of one it depends on, or null.
  void* find(const char* symbol) const;

  /// File that defines the code or data at `address`, "" if unknown.
  static std::string file_of(const void* address);

 private:
  void* handle_;
};

}  // namespace samestep
