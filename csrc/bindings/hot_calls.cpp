// The calls that training makes millions of times, as plain C functions: through pybind11 a method with keywords
// costs more than the whole operation.

#include <pybind11/pybind11.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "bindings/hot_views.h"
#include "bindings/pending_work.h"
#include "bindings/python_errors.h"
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

/// A verb as a callable that is bound to a communicator.
struct HotCall {
  Verb verb;
  std::shared_ptr<Communicator> communicator;
  double timeout;
  py::object general;  // takes the calls that are not for the fast path
};

/// What a caller gave, as far as the fast path knows it.
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
};
const Names& names() {
  static const Names all;
  return all;
}

bool takes_op(Verb verb) { return verb == Verb::all_reduce || verb == Verb::reduce || verb == Verb::reduce_scatter; }
bool takes_root(Verb verb) { return verb == Verb::reduce || verb == Verb::broadcast; }

bool parse_op(PyObject* object, Arguments& to) {
  const ReduceOp* const op = find_op(object);
  if (op != nullptr) to.op = *op;
  return op != nullptr;
}

/// False where something is not for the fast path; whether it is right is left to the general one.
bool parse(Verb verb, PyObject* const* args, Py_ssize_t n_args, PyObject* keywords, Arguments& to) {
  const bool has_op = takes_op(verb);
  if (n_args > (verb == Verb::barrier ? 0 : 1 + has_op) || (n_args == 0 && verb != Verb::barrier)) return false;
  if (n_args > 0) to.x = args[0];
  if (n_args > 1 && !parse_op(args[1], to)) return false;
  const Py_ssize_t n_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < n_keywords; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(keywords, i);
    PyObject* const value = args[n_args + i];
    if (name == names().out && verb != Verb::broadcast && verb != Verb::barrier) {
      to.out = value == Py_None ? nullptr : value;
    } else if (name == names().op && has_op && n_args < 2) {
      if (!parse_op(value, to)) return false;
    } else if (name == names().root && takes_root(verb)) {
      if (!parse_small(value, to.root)) return false;
    } else {
      return false;
    }
  }
  return true;
}

/// The arrays of a call as they lie, and the call itself.
struct Viewed {
  Array in, out;
  Call call;
  PyObject* written = nullptr;
};

/// False where the general path has to look.
bool look_at(const HotCall& hot, const Arguments& given, Viewed& to) {
  Call& call = to.call;
  call.verb = hot.verb;
  if (hot.verb == Verb::barrier) return true;
  if (takes_root(hot.verb)) call.root = given.root;
  call.reduction = {given.op, 1.0};
  const bool at_root = hot.communicator->rank() == given.root;
  const bool keeps_shape = hot.verb == Verb::all_reduce || takes_root(hot.verb);
  if (given.out == nullptr && !keeps_shape) return false;  // a new array is to be made
  const bool writes = hot.verb == Verb::broadcast ? !at_root : hot.verb != Verb::reduce || at_root;
  const bool in_place = given.out == nullptr || given.out == given.x;
  const ArrayView* const x = view_as_it_lies(given.x, writes && in_place, to.in);
  if (x == nullptr || (in_place && !keeps_shape)) return false;
  call.in = x->buffer();
  read_shape(*x, call.shape);
  if (in_place) {
    call.out = x->buffer();
    if (writes) to.written = given.x;
    return true;
  }
  if (!writes) return false;
  const ArrayView* const out = view_as_it_lies(given.out, true, to.out);
  if (out == nullptr) return false;
  call.out = out->buffer();
  if (share_memory(call.in, call.out)) return false;
  to.written = given.out;
  if (hot.verb == Verb::reduce_scatter) {
    read_shape(*out, call.shape);
    return x->n_dims > 0 && x->shape[0] == hot.communicator->size();
  }
  return hot.verb != Verb::all_to_all || (x->n_dims > 0 && x->shape[0] % hot.communicator->size() == 0);
}

/// The fast path: host memory as it lies. Null without a Python error where it is not for this call.
PyObject* try_hot(const HotCall& hot, const Arguments& given) {
  Viewed viewed;
  if (!look_at(hot, given, viewed)) return nullptr;
  if (const Communicator::WorkPtr work = hot.communicator->now(viewed.call)) {
    PendingWork pending;
    pending.start(hot.communicator, work);
    pending.keep(std::move(viewed.in));
    pending.keep(std::move(viewed.out));
    pending.wait(hot.timeout, PendingWork::AtDeadline::abandon, polls_for(viewed.call.out.nbytes()));
  }
  if (viewed.written != nullptr) note_written(viewed.written);
  PyObject* const result = given.out != nullptr ? given.out : given.x != nullptr ? given.x : Py_None;
  Py_INCREF(result);
  return result;
}

PyObject* call_hot(PyObject* self, PyObject* const* args, Py_ssize_t n_args, PyObject* keywords) {
  const auto& hot = *static_cast<const HotCall*>(PyCapsule_GetPointer(self, nullptr));
  Arguments given;
  if (parse(hot.verb, args, n_args, keywords, given)) {
    try {
      if (PyObject* const result = try_hot(hot, given)) return result;
    } catch (...) {
      set_python_error(std::current_exception());
      return nullptr;
    }
  }
  return PyObject_Vectorcall(hot.general.ptr(), args, static_cast<std::size_t>(n_args), keywords);
}

#define SAMESTEP_HOT(name, signature)                                                                      \
  {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_hot)), METH_FASTCALL | METH_KEYWORDS, \
   name signature "\n--\n\nSee Backend." name "."}

struct Definition {
  Verb verb;
  PyMethodDef method;
};
Definition definitions[] = {
    {Verb::all_reduce, SAMESTEP_HOT("allreduce", "($self, /, x, op='sum', *, out=None, timeout=None)")},
    {Verb::reduce, SAMESTEP_HOT("reduce", "($self, /, x, op='sum', *, root=0, out=None, timeout=None)")},
    {Verb::reduce_scatter, SAMESTEP_HOT("reduce_scatter", "($self, /, x, op='sum', *, out=None, timeout=None)")},
    {Verb::broadcast, SAMESTEP_HOT("bcast", "($self, /, x, *, root=0, out=None, timeout=None)")},
    {Verb::all_gather, SAMESTEP_HOT("allgather", "($self, /, x, *, out=None, timeout=None)")},
    {Verb::all_to_all, SAMESTEP_HOT("alltoall", "($self, /, x, *, out=None, timeout=None)")},
    {Verb::barrier, SAMESTEP_HOT("barrier", "($self, /, *, timeout=None)")},
};

#undef SAMESTEP_HOT

/// A callable bound to a communicator.
py::object hot_call(const std::string& verb, std::shared_ptr<Communicator> communicator, double timeout,
                    py::object general) {
  for (Definition& definition : definitions) {
    if (verb != definition.method.ml_name) continue;
    auto hot =
        std::make_unique<HotCall>(HotCall{definition.verb, std::move(communicator), timeout, std::move(general)});
    const py::capsule self(hot.release(), [](void* pointer) { delete static_cast<HotCall*>(pointer); });
    return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&definition.method, self.ptr(), nullptr));
  }
  throw py::value_error("no hot call: " + verb);
}

}  // namespace

void bind_hot_calls(py::module_& m) {
  m.def("register_op", &register_op, py::arg("object"), py::arg("op"),
        "Let this very object stand for an operator in hot calls.");
  py::list verbs;
  for (const Definition& definition : definitions) verbs.append(definition.method.ml_name);
  m.attr("HOT_VERBS") = py::tuple(verbs);
  m.def("hot_call", &hot_call, py::arg("verb"), py::arg("communicator"), py::arg("timeout"), py::arg("general"),
        "A verb of a communicator, by its public name and with its signature; `general` takes what is not the common "
        "case.");
}

}  // namespace samestep
