#pragma once

#include <string>

namespace samestep {

/// A shared library that the process has already loaded. Does not keep it loaded.
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

/// A shared library that is loaded here, with local symbols. It stays loaded for the life of the process, because its
/// threads may still run.
class OpenedLibrary {
 public:
  /// Throws UnavailableError with the loader's reason.
  explicit OpenedLibrary(const std::string& path);

  /// Address of a symbol, or null.
  void* find(const char* symbol) const;
  const std::string& path() const { return path_; }

  /// Sets a pointer to the function `symbol`. False if the library has none.
  template <class Function>
  bool find(const char* symbol, Function& function) const {
    function = reinterpret_cast<Function>(find(symbol));
    return function != nullptr;
  }

 private:
  std::string path_;
  void* handle_;
};

}  // namespace samestep
