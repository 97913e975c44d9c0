// The calls that training makes millions of times, as plain C functions: through pybind11 a method with keywords
// costs more than the whole operation.

#include <pybind11/pybind11.h>

#include <array>
#include <cstring>
#include <memory>

#include "bindings/array_view.h"
#include "bindings/pending_work.h"
#include "bindings/python_errors.h"
#include "communicator/communicator.h"
#include "core/error.h"

namespace samestep {

namespace py = pybind11;

namespace {

constexpr std::size_t kKeepGilBelow = 64 << 10;
constexpr int kPollsOfHotCall = 400;

/// Objects that stand for an operator, compared by address: the enum's members and interned names.
struct KnownOp {
  PyObject* object;
  ReduceOp op;
};
std::array<KnownOp, 32> known_ops{};
std::size_t n_known_ops = 0;

const ReduceOp* find_op(PyObject* object) {
  for (std::size_t i = 0; i < n_known_ops; ++i) {
    if (known_ops[i].object == object) return &known_ops[i].op;
  }
  return nullptr;
}

void register_op(py::object object, int op) {
  if (n_known_ops == known_ops.size()) throw py::value_error("register_op: the table is full");
  PyObject* kept = object.release().ptr();
  if (PyUnicode_Check(kept)) PyUnicode_InternInPlace(&kept);
  known_ops[n_known_ops++] = {kept, static_cast<ReduceOp>(op)};
}

void wait_blocking(Communicator& communicator, Work& work, std::size_t nbytes, double timeout) {
  const int polls = nbytes < kKeepGilBelow ? kPollsOfHotCall : 0;
  for (int i = 0; i < polls; ++i) {
    if (!work.done()) continue;
    if (work.error()) std::rethrow_exception(work.error());
    return;
  }
  const py::gil_scoped_release no_gil;
  try {
    work.wait(Deadline::after(Seconds(timeout)));
  } catch (const TimeoutError& error) {
    if (!work.done()) communicator.abandon(std::current_exception(), error.what());
    throw;
  }
}

/// What a bound call knows.
struct HotCall {
  std::shared_ptr<Communicator> communicator;
  double timeout;
  const ReduceOp* default_op;
  py::object general;  // takes the calls that are not for the fast path
};

/// The fast path of allreduce(x, op): in place on host memory as it lies. Null without a Python error where it is not
/// for this call.
PyObject* try_all_reduce(const HotCall& call, PyObject* x, const ReduceOp& op) {
  Array array;
  try {
    array = view_of(x);
  } catch (const std::exception&) {
    return nullptr;  // the general path says what is wrong with it
  }
  const ArrayView& view = array.view();
  if (!view.contiguous || view.readonly || view.device.kind != DeviceKind::cpu) return nullptr;
  const Buffer buffer = view.buffer();
  const Communicator::WorkPtr work = call.communicator->all_reduce_now(buffer, buffer, {op, 1.0}, shape_of(view));
  if (work != nullptr) {
    PendingWork pending;
    pending.adopt(call.communicator, work, std::move(array));
    wait_blocking(*call.communicator, *work, buffer.nbytes(), call.timeout);
  }
  note_written(x);
  Py_INCREF(x);
  return x;
}

PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t n_args, PyObject* keywords) {
  const auto& call = *static_cast<const HotCall*>(PyCapsule_GetPointer(self, nullptr));
  if (keywords == nullptr && (n_args == 1 || n_args == 2)) {
    const ReduceOp* const op = n_args == 1 ? call.default_op : find_op(args[1]);
    if (op != nullptr) {
      try {
        if (PyObject* const result = try_all_reduce(call, args[0], *op)) return result;
      } catch (...) {
        set_python_error(std::current_exception());
        return nullptr;
      }
    }
  }
  return PyObject_Vectorcall(call.general.ptr(), args, static_cast<std::size_t>(n_args), keywords);
}

PyMethodDef all_reduce_definition = {
    "allreduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&all_reduce)), METH_FASTCALL | METH_KEYWORDS,
    "allreduce($self, /, x, op='sum', *, out=None, timeout=None)\n--\n\nReduce over all ranks; see Backend.allreduce."};

/// A callable bound to a communicator.
py::object bound(std::shared_ptr<Communicator> communicator, double timeout, const py::object& default_op,
                 py::object general, PyMethodDef& definition) {
  auto call = std::make_unique<HotCall>(
      HotCall{std::move(communicator), timeout, find_op(default_op.ptr()), std::move(general)});
  if (call->default_op == nullptr) throw py::value_error("the default operator is not registered");
  const py::capsule self(call.release(), [](void* pointer) { delete static_cast<HotCall*>(pointer); });
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&definition, self.ptr(), nullptr));
}

}  // namespace

void bind_hot_calls(py::module_& m) {
  m.def("register_op", &register_op, py::arg("object"), py::arg("op"),
        "Let this very object stand for an operator in hot calls.");
  m.def(
      "hot_all_reduce",
      [](std::shared_ptr<Communicator> communicator, double timeout, const py::object& default_op, py::object general) {
        return bound(std::move(communicator), timeout, default_op, std::move(general), all_reduce_definition);
      },
      py::arg("communicator"), py::arg("timeout"), py::arg("default_op"), py::arg("general"),
      "allreduce(x, op='sum', *, out=None, timeout=None) of a communicator; `general` takes what is not the common "
      "case.");
}

}  // namespace samestep
