#pragma once

#include <string>

namespace samestep {

/// The address of a function, which gets the type of the pointer that it initializes.
struct Symbol {
  void* address;
  template <class Function>
  operator Function*() const {  // NOLINT
    return reinterpret_cast<Function*>(address);
  }
};

/// A function of `Library`, which finds it by name, and whose `check` throws for results that are errors.
template <class Library, class... Args>
class LibraryFunction {
 public:
  LibraryFunction(const Library& of, const char* name) : of_(of), name_(name), address_(of.find(name)) {}
  void operator()(Args... args) const { check(code(args...)); }
  /// For results that are not all errors; `check` throws for one that is.
  int code(Args... args) const { return address_(args...); }
  void check(int code) const { of_.check(code, name_); }

 private:
  const Library& of_;
  const char* name_;
  int (*address_)(Args...);
};

/// A shared library, looked up by its functions.
class OpenedLibrary {
 public:
  /// Loads it, with local symbols. It stays loaded for the life of the process, because its threads may still run.
  /// Throws UnavailableError with the loader's reason.
  explicit OpenedLibrary(const std::string& path);
  /// One that the process has loaded already; does not keep it loaded. Throws UnavailableError if it has not.
  static OpenedLibrary loaded(const std::string& path);

  /// Address of a symbol of the library or of one it depends on, or null.
  void* find(const char* symbol) const;
  const std::string& path() const { return path_; }

  /// Sets a pointer to the function `symbol`. False if the library has none.
  template <class Function>
  bool find(const char* symbol, Function& function) const {
    function = reinterpret_cast<Function>(find(symbol));
    return function != nullptr;
  }

  /// File that defines the code or data at `address`, "" if unknown.
  static std::string file_of(const void* address);

 private:
  OpenedLibrary(const std::string& path, void* handle, const char* action, const char* otherwise);

  std::string path_;
  void* handle_;
};

}  // namespace samestep
