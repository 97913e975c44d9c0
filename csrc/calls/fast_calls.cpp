// The fast paths of the collectives that training calls millions of times, without pybind11: through it a method with
// keywords costs more than the whole operation. See fast_method.cpp.

#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "arrays/array_sources.h"
#include "arrays/free_threading.h"
#include "calls/fast_method.h"
#include "calls/fast_views.h"
#include "calls/pending_work.h"
#include "calls/python_errors.h"
#include "communicator/communicator.h"

namespace samestep {

namespace py = pybind11;

namespace {

/// Objects that stand for an operator, compared by address: the enum's members and interned names.
struct KnownOp {
  PyObject* object;
  ReduceOp op;
};
std::array<KnownOp, 32> known_ops{};
std::atomic<std::size_t> n_known_ops = 0;

const ReduceOp* find_op(PyObject* object) {
  const std::size_t n = n_known_ops.load(std::memory_order_acquire);  // pairs with register_op: these are complete
  for (std::size_t i = 0; i < n; ++i) {
    if (known_ops[i].object == object) return &known_ops[i].op;
  }
  return nullptr;
}

void register_op(py::object object, int op) {
  PyObject* kept = object.release().ptr();
  // The interpreter interns literals such as "max", so that a caller's literal is this very object. A string that was
  // made at run time misses here, and the method in Python looks it up.
  if (PyUnicode_Check(kept)) PyUnicode_InternInPlace(&kept);
  constinit static PythonMutex mutex;
  const std::lock_guard lock(mutex);
  const std::size_t n = n_known_ops.load(std::memory_order_relaxed);  // relaxed: only written with the mutex held
  if (n == known_ops.size()) throw py::value_error("register_op: the table is full");
  known_ops[n] = {kept, static_cast<ReduceOp>(op)};
  n_known_ops.store(n + 1, std::memory_order_release);  // pairs with find_op
}

/// A collective bound to a communicator, for callers that are not a FastGroup.
struct FastCall {
  FastAttempt attempt;
  std::shared_ptr<Communicator> communicator;
  double timeout;
};

/// The arguments of a call, as far as the fast path supports them.
struct Arguments {
  PyObject* x = nullptr;
  PyObject* out = nullptr;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
};

struct Names {
  PyObject* op = PyUnicode_InternFromString("op");
  PyObject* out = PyUnicode_InternFromString("out");
  PyObject* root = PyUnicode_InternFromString("root");
  PyObject* timeout = PyUnicode_InternFromString("timeout");
};
const Names& names() {
  static const Names all;
  return all;
}

bool takes_op(CollectiveType verb) {
  return verb == CollectiveType::allreduce || verb == CollectiveType::reduce || verb == CollectiveType::reduce_scatter;
}
bool takes_root(CollectiveType verb) { return verb == CollectiveType::reduce || verb == CollectiveType::bcast; }

bool parse_op(PyObject* object, Arguments& to) {
  const ReduceOp* const op = find_op(object);
  if (op != nullptr) to.op = *op;
  return op != nullptr;
}

/// False if the fast path does not support an argument; the method in Python decides whether it is valid.
bool parse(CollectiveType verb, PyObject* const* args, Py_ssize_t n_args, PyObject* keywords, Arguments& to) {
  const bool has_op = takes_op(verb);
  const bool root_is_second = verb == CollectiveType::bcast;
  // A wrong number of arguments is left to the method in Python, whose TypeError shows its own signature.
  if (n_args > (verb == CollectiveType::barrier ? 0 : 1 + (has_op || root_is_second)) ||
      (n_args == 0 && verb != CollectiveType::barrier)) {
    return false;
  }
  if (n_args > 0) to.x = args[0];
  if (n_args > 1 && !(root_is_second ? parse_small(args[1], to.root) : parse_op(args[1], to))) return false;
  const Py_ssize_t n_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < n_keywords; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(keywords, i);
    PyObject* const value = args[n_args + i];
    if (name == names().out && verb != CollectiveType::bcast && verb != CollectiveType::barrier) {
      to.out = value == Py_None ? nullptr : value;
    } else if (name == names().op && has_op && n_args < 2) {
      if (!parse_op(value, to)) return false;
    } else if (name == names().root && takes_root(verb) && !(root_is_second && n_args > 1)) {
      if (!parse_small(value, to.root)) return false;
    } else if (name != names().timeout || value != Py_None) {  // None: the group's, as without the keyword
      return false;
    }
  }
  return true;
}

/// The arrays of a call, in place, and its description.
struct BoundArrays {
  Array in, out;
  CollectiveArgs call;
  PyObject* written = nullptr;
  StreamFinder streams;

  /// `borrow_view`, also of device memory.
  const ArrayView* borrow(PyObject* object, bool is_written, Array& array) {
    if (borrow_anywhere(object, is_written, array) == nullptr) return nullptr;
    ArrayView& view = array.mutable_view();
    if (view.device.kind == DeviceKind::cpu) return &view;
    // XLA may give the memory of an input away as soon as it is released: the host waits for what reads it.
    const sources::TypeFacts facts = sources::facts_of(Py_TYPE(object));
    if (facts.jax || facts.becomes_jax) return nullptr;
    streams.find(object, view);
    return &view;
  }
  bool on_device() const { return call.in.device.kind != DeviceKind::cpu || call.out.device.kind != DeviceKind::cpu; }
};

/// False if the method in Python must handle the call.
bool bind_call_arrays(CollectiveType verb, const Communicator& communicator, const Arguments& given, BoundArrays& to) {
  CollectiveArgs& call = to.call;
  call.type = verb;
  if (verb == CollectiveType::barrier) return true;
  if (takes_root(verb)) call.root = given.root;
  call.reduction = {given.op, 1.0};
  const bool at_root = communicator.rank() == given.root;
  const bool keeps_shape = verb == CollectiveType::allreduce || takes_root(verb);
  if (given.out == nullptr && !keeps_shape) return false;  // needs a new array
  // Ranks that only read may pass a read-only array: root of a bcast, and all but root of a reduce. That of a bcast is
  // left to the method in Python, which returns to root what the others receive.
  const bool writes = verb == CollectiveType::bcast ? !at_root : verb != CollectiveType::reduce || at_root;
  const bool in_place = given.out == nullptr || given.out == given.x;
  const ArrayView* const x = to.borrow(given.x, in_place && (writes || verb == CollectiveType::bcast), to.in);
  if (x == nullptr || (in_place && !keeps_shape)) return false;
  call.in = x->buffer();
  read_shape(x->extents(), call.shape);
  if (in_place) {
    call.out = x->buffer();
    if (writes) to.written = given.x;
    return true;
  }
  if (!writes) return false;
  const ArrayView* const out = to.borrow(given.out, true, to.out);
  if (out == nullptr) return false;
  call.out = out->buffer();
  // The method in Python copies the input first, unless the overlap is a block that no other rank accesses.
  if (share_memory(call.in, call.out)) return false;
  to.written = given.out;
  if (verb == CollectiveType::reduce_scatter) {
    read_shape(out->extents(), call.shape);
    return x->n_dims > 0 && x->shape[0] == communicator.size();
  }
  return verb != CollectiveType::alltoall || (x->n_dims > 0 && x->shape[0] % communicator.size() == 0);
}

/// The fast path, for contiguous memory. Null without a Python error if it declines the call.
PyObject* run_fast(CollectiveType verb, const FastTarget& target, const Arguments& given) {
  BoundArrays viewed;
  // The path may decline until here only. After `run` other ranks may have received the header, and a second attempt
  // would be another operation to them.
  if (!bind_call_arrays(verb, *target.communicator, given, viewed)) return nullptr;
  if (viewed.on_device()) {
    // The method in Python averages short types in float32.
    if (given.op == ReduceOp::avg && itemsize(viewed.call.own().dtype) < 4) return nullptr;
    Communicator::WorkPtr launching;
    if (!target.communicator->run_in_stream(viewed.call, launching)) return nullptr;
    if (launching != nullptr) {  // NCCL may use the arrays although an exception ends the wait
      PendingWork pending;
      pending.start(target.communicator, std::move(launching));
      pending.keep_on_device(std::move(viewed.in), given.x);
      if (given.out != nullptr && given.out != given.x) pending.keep_on_device(std::move(viewed.out), given.out);
      pending.wait(target.timeout, PendingWork::AtDeadline::abandon);
    }
  } else if (const Communicator::WorkPtr work = target.communicator->run(viewed.call)) {
    // The operation did not end at once. PendingWork waits with deadline and signals, and keeps the arrays if it fails.
    PendingWork pending;
    pending.start(target.communicator, work);
    pending.keep(std::move(viewed.in));
    pending.keep(std::move(viewed.out));
    pending.wait(target.timeout, PendingWork::AtDeadline::abandon, polls_for(viewed.call.out.nbytes()));
  }
  if (viewed.written != nullptr) bump_version(viewed.written);
  PyObject* const result = given.out != nullptr ? given.out : given.x != nullptr ? given.x : Py_None;
  Py_INCREF(result);
  return result;
}

template <CollectiveType verb>
PyObject* attempt_collective(const FastTarget& target, PyObject* const* args, Py_ssize_t n_args, PyObject* keywords) {
  Arguments given;
  return parse(verb, args, n_args, keywords, given) ? run_fast(verb, target, given) : nullptr;
}

struct Definition {
  std::string_view name;
  FastAttempt attempt;
};
constexpr std::array kDefinitions = {
    Definition{"allreduce", &attempt_collective<CollectiveType::allreduce>},
    Definition{"reduce", &attempt_collective<CollectiveType::reduce>},
    Definition{"reduce_scatter", &attempt_collective<CollectiveType::reduce_scatter>},
    Definition{"bcast", &attempt_collective<CollectiveType::bcast>},
    Definition{"allgather", &attempt_collective<CollectiveType::allgather>},
    Definition{"alltoall", &attempt_collective<CollectiveType::alltoall>},
    Definition{"barrier", &attempt_collective<CollectiveType::barrier>},
};

PyObject* call_bound(PyObject* self, PyObject* const* args, Py_ssize_t n_args, PyObject* keywords) {
  const auto& bound = *static_cast<const FastCall*>(PyCapsule_GetPointer(self, nullptr));
  try {
    PyObject* const result = bound.attempt({bound.communicator, bound.timeout}, args, n_args, keywords);
    return result != nullptr ? result : Py_NewRef(Py_NotImplemented);
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

PyMethodDef bound_definition = {"fast_call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_bound)),
                                METH_FASTCALL | METH_KEYWORDS, nullptr};

py::object make_fast_call(const char* verb, std::shared_ptr<Communicator> communicator, double timeout) {
  const FastAttempt attempt = find_fast_collective(verb);
  if (attempt == nullptr) throw py::value_error(std::string("fast_call: no verb ") + verb);
  auto bound = std::make_unique<FastCall>(FastCall{attempt, std::move(communicator), timeout});
  const py::capsule self(bound.release(), [](void* pointer) { delete static_cast<FastCall*>(pointer); });
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&bound_definition, self.ptr(), nullptr));
}

}  // namespace

FastAttempt find_fast_collective(const char* name) {
  for (const Definition& definition : kDefinitions) {
    if (definition.name == name) return definition.attempt;
  }
  return nullptr;
}

void bind_fast_calls(py::module_& m) {
  names();  // while one thread imports this: a static variable holds a lock while it is initialised
  m.def("register_op", &register_op, py::arg("object"), py::arg("op"),
        "Let this very object stand for an operator in fast calls.");
  m.def("fast_call", &make_fast_call, py::arg("verb"), py::arg("communicator"), py::arg("timeout"),
        "The verb of a communicator; a call returns NotImplemented, before it begins, if it is not the common case.");
}

}  // namespace samestep
