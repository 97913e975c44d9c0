#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <mutex>
#include <type_traits>

namespace samestep {

// What threads of Python share must hold in two builds of the interpreter. With the GIL one thread at a time runs this
// folder's code, between releases. Free-threaded, all run at once, and what the GIL protects needs a lock of its own.

/// An object of the free-threaded interpreter has the thread that owns it.
template <class Object>
concept HasOwner = requires(Object object) { object.ob_tid; };
inline constexpr bool kFreeThreaded = HasOwner<PyObject>;

/// The GIL already is a lock.
struct NoMutex {
  void lock() noexcept {}
  void unlock() noexcept {}
};
/// Protects what only threads that may call Python use. No Python may be called with it held: a thread that waits for
/// it would keep the garbage collector, which stops all threads, from stopping it.
using PythonMutex = std::conditional_t<kFreeThreaded, std::mutex, NoMutex>;

/// An attribute of a module, looked up at the first use and held for the life of the process. A static object of this
/// class, unlike a static variable that Python code initialises, holds no lock while Python runs.
class CachedAttribute {
 public:
  /// Whether what is held is the attribute, or what it returns when it is called without arguments.
  enum class Of : bool { itself, its_result };
  constexpr CachedAttribute(const char* module, const char* name, Of of = Of::itself) noexcept
      : module_(module), name_(name), of_(of) {}

  /// Borrowed. Throws what the import or the attribute raises.
  PyObject* get() {
    PyObject* const known = cached_.load(std::memory_order_acquire);  // pairs with the exchange
    return known != nullptr ? known : find();
  }

 private:
  PyObject* find() {
    namespace py = pybind11;
    py::object attribute = py::module_::import(module_).attr(name_);
    PyObject* const found = (of_ == Of::itself ? attribute : attribute()).release().ptr();
    PyObject* first = nullptr;
    // Several threads may have looked, and the first one's object stays. acq_rel pairs with the loads, and with itself.
    if (cached_.compare_exchange_strong(first, found, std::memory_order_acq_rel)) return found;
    Py_DECREF(found);
    return first;
  }

  const char* module_;
  const char* name_;
  Of of_;
  std::atomic<PyObject*> cached_ = nullptr;
};

}  // namespace samestep
