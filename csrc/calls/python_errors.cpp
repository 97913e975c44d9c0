#include "calls/python_errors.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <string_view>
#include <thread>

#include "core/deadline.h"
#include "core/error.h"
#include "process/wait_hooks.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace {

/// The class of samestep.errors with this name. Looked up when it is needed, so that the extension can be
/// imported first. An interpreter that ends has no modules any more.
py::object error_class(const char* name) {
  try {
    return py::module_::import("samestep.errors").attr(name);
  } catch (const py::error_already_set&) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
  }
}

const char* class_name(const Error& error) {
  if (dynamic_cast<const InvalidArgumentError*>(&error) != nullptr) return "InvalidArgumentError";
  if (dynamic_cast<const MismatchError*>(&error) != nullptr) return "MismatchError";
  if (dynamic_cast<const NotInitializedError*>(&error) != nullptr) return "NotInitializedError";
  if (dynamic_cast<const UnavailableError*>(&error) != nullptr) return "UnavailableError";
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) return "TimeoutError";
  if (dynamic_cast<const PeerLostError*>(&error) != nullptr) return "PeerLostError";
  if (dynamic_cast<const StepError*>(&error) != nullptr) return "StepError";
  return "Error";
}

void raise(const Error& error) {
  const py::object kind = error_class(class_name(error));
  const auto* const of_ranks = dynamic_cast<const RanksError*>(&error);
  if (of_ranks == nullptr || of_ranks->named().ranks.empty()) return PyErr_SetString(kind.ptr(), error.what());
  try {
    const py::object made = kind(error.what());
    made.attr("ranks") = py::tuple(py::cast(of_ranks->named().ranks));
    made.attr("hosts") = py::tuple(py::cast(of_ranks->named().hosts));
    PyErr_SetObject(kind.ptr(), made.ptr());
  } catch (py::error_already_set& failed) {
    failed.restore();
  }
}

/// In the reason that a peer sends when Ctrl-C ends its program; see `_at_exit` in samestep.world.lifecycle.
constexpr std::string_view kInterrupted = "ended with KeyboardInterrupt";
constexpr auto kSignalsDiffer = std::chrono::seconds(1);

/// Whether Ctrl-C has arrived as well, which is then raised in place of the loss of a peer. The terminal sends it to
/// all ranks, but not at one moment: where a peer has left because of it, this process's own is waited for.
bool interrupted_too(const Error& error) {
  if (dynamic_cast<const PeerLostError*>(&error) == nullptr) return false;
  // The handler's exception is then set as Python's error, and is the one to raise.
  if (PyErr_CheckSignals() != 0) return true;
  if (std::string_view(error.what()).find(kInterrupted) == std::string_view::npos) return false;
  const Deadline deadline = Deadline::after(kSignalsDiffer);
  while (!deadline.passed()) {
    {
      const py::gil_scoped_release no_gil;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (PyErr_CheckSignals() != 0) return true;
  }
  return false;
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    if (interrupted_too(error)) return;
    raise(error);
  }
}

/// A thread of the package itself handles no signals, and must not wait for the GIL: its holder may wait for that
/// thread.
bool runs_python() { return PyGILState_GetThisThreadState() != nullptr; }

/// Lets Ctrl-C end a wait. Taking the GIL disturbs other threads, so not at every look.
void check_signals() {
  if (!runs_python()) return;
  thread_local Clock::time_point next{};
  const Clock::time_point now = Clock::now();
  if (now < next) return;
  next = now + std::chrono::milliseconds(20);
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void without_the_interpreter(const std::function<void()>& wait) {
  // The caller may have released the GIL already, and a thread of the package never holds it.
  if (!runs_python() || PyGILState_Check() == 0) return wait();
  const py::gil_scoped_release no_gil;
  wait();
}

/// What `warn` calls, or null. A reference that is never dropped: a wait may outlive the interpreter's modules, and
/// another thread may be about to call the one before.
constinit std::atomic<PyObject*> warning_callback = nullptr;

void warn(const std::string& text) {
  const py::handle callback = warning_callback.load(std::memory_order_acquire);  // pairs with set_warning_callback
  if (!callback) return;
  const py::gil_scoped_acquire gil;
  callback(text);
}

void set_warning_callback(const py::function& callback, double warn_after) {
  // relaxed: only compared. A world that is opened again passes the same function.
  if (callback.ptr() != warning_callback.load(std::memory_order_relaxed)) {
    warning_callback.store(callback.inc_ref().ptr(), std::memory_order_release);  // pairs with warn
  }
  wait_hooks().warn_after_s.store(warn_after, std::memory_order_relaxed);
}

/// An exception that is raised in the main thread once this object is dropped, as soon as that runs Python code again.
class RaisedLater {
 public:
  explicit RaisedLater(const py::object& exception) : exception_(exception) {}
  RaisedLater(const RaisedLater&) = delete;
  RaisedLater& operator=(const RaisedLater&) = delete;
  ~RaisedLater() {
    PyObject* const exception = exception_.release().ptr();
    if (Py_AddPendingCall(&raise, exception) == 0) return;
    PyErr_SetInterrupt();  // the interpreter has no room: Ctrl-C at least is not lost
    Py_DECREF(exception);
  }

 private:
  static int raise(void* held) {
    auto* const exception = static_cast<PyObject*>(held);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
    Py_DECREF(exception);
    return -1;
  }
  py::object exception_;
};

// The fast paths do not pass through pybind11's dispatcher, so that other exceptions are translated here as well.
void set_error(std::exception_ptr pointer, bool may_be_interrupted) {
  try {
    std::rethrow_exception(pointer);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const Error& error) {
    if (may_be_interrupted && interrupted_too(error)) return;
    raise(error);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

}  // namespace

void set_python_error(std::exception_ptr pointer) { set_error(pointer, true); }

PyObject* make_python_error(std::exception_ptr pointer) {
  // An error that is only looked at must neither wait for a Ctrl-C nor consume one.
  set_error(pointer, false);
  const py::error_already_set error;
  return error.value().inc_ref().ptr();
}

void bind_errors(py::module_& m) {
  py::register_exception_translator(&translate);
  wait_hooks().interrupt = &check_signals;
  wait_hooks().warn = &warn;
  wait_hooks().run_without_gil = &without_the_interpreter;
  py::class_<RaisedLater>(m, "RaisedLater", "Its exception is raised in the main thread after this object is dropped.")
      .def(py::init<const py::object&>(), "exception"_a);
  m.def("set_warning_callback", &set_warning_callback, py::arg("callback"), py::arg("warn_after"),
        "Calls `callback(text)` once for each wait that lasts longer than `warn_after` seconds.");
}

}  // namespace samestep
