// send, recv and sendrecv as plain C functions, see hot_calls.cpp.

#include <pybind11/pybind11.h>

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

/// send, recv or sendrecv as a callable that is bound to a communicator.
struct HotMessage {
  std::shared_ptr<Communicator> communicator;
  double timeout;
  py::object status;   // the class, a subclass of tuple
  py::object general;  // takes the calls that are not for the fast path
};

/// What a caller gave: an array, a rank and a tag.
struct Message {
  PyObject* array;
  int peer, tag;
};

bool parse(PyObject* const* args, Py_ssize_t n_args, PyObject* keywords, Py_ssize_t least, Message& to) {
  if (keywords != nullptr || n_args < least || n_args > 3) return false;
  to.array = args[0];
  return (n_args < 2 || parse_small(args[1], to.peer)) && (n_args < 3 || parse_small(args[2], to.tag));
}

using AtDeadline = PendingWork::AtDeadline;

void wait(const HotMessage& hot, const Communicator::WorkPtr& work, Array array, AtDeadline at_deadline) {
  const std::size_t nbytes = array->nbytes();
  PendingWork pending;
  pending.start(hot.communicator, work);
  pending.keep(std::move(array));
  pending.wait(hot.timeout, at_deadline, polls_for(nbytes));
}

PyObject* to_python(const HotMessage& hot, const Status& status) {
  auto* const type = reinterpret_cast<PyTypeObject*>(hot.status.ptr());
  PyObject* const result = type->tp_alloc(type, 3);
  if (result == nullptr) return nullptr;
  PyTuple_SET_ITEM(result, 0, PyLong_FromLong(status.source));
  PyTuple_SET_ITEM(result, 1, PyLong_FromLong(status.tag));
  PyTuple_SET_ITEM(result, 2, PyLong_FromUnsignedLongLong(status.count));
  return result;
}

/// A receive must not be posted for a send that will be refused.
bool peers_exist(const HotMessage& hot, int dest, int source) {
  const int size = hot.communicator->size();
  return dest >= 0 && dest < size && source >= kAnySource && source < size;
}

/// Null without a Python error where it is not for the fast path.
PyObject* try_send(const HotMessage& hot, const Message& message) {
  Array array;
  const ArrayView* const view = view_as_it_lies(message.array, false, array);
  if (view == nullptr) return nullptr;
  if (const auto work = hot.communicator->send_now(view->buffer(), message.peer, message.tag)) {
    wait(hot, work, std::move(array), AtDeadline::abandon);
  }
  return Py_NewRef(Py_None);
}

PyObject* try_recv(const HotMessage& hot, const Message& message) {
  Array array;
  const ArrayView* const view = view_as_it_lies(message.array, true, array);
  if (view == nullptr) return nullptr;
  Status status;
  if (const auto work = hot.communicator->recv_now(view->buffer(), message.peer, message.tag, status)) {
    wait(hot, work, std::move(array), AtDeadline::cancel);
    status = work->status();
  }
  note_written(message.array);
  return to_python(hot, status);
}

/// Both at once: x, dest, out, source.
PyObject* try_sendrecv(const HotMessage& hot, PyObject* x, int dest, PyObject* out, int source) {
  Array sent, received;
  const ArrayView* const from = view_as_it_lies(x, false, sent);
  const ArrayView* const to = view_as_it_lies(out, true, received);
  if (from == nullptr || to == nullptr || share_memory(from->buffer(), to->buffer())) return nullptr;
  PendingWork sending;
  Communicator::WorkPtr send;
  Status status;
  const auto keep_what_is_sent = [&] {
    if (send == nullptr) return;
    sending.start(hot.communicator, send);
    sending.keep(std::move(sent));
  };
  Communicator::WorkPtr work;
  try {
    work = hot.communicator->sendrecv_now(from->buffer(), dest, to->buffer(), source, status, send);
  } catch (...) {
    keep_what_is_sent();
    throw;
  }
  keep_what_is_sent();
  if (work != nullptr) {
    wait(hot, work, std::move(received), AtDeadline::abandon);
    status = work->status();
  }
  if (send != nullptr) sending.wait(hot.timeout, AtDeadline::abandon);
  note_written(out);
  return to_python(hot, status);
}

PyObject* call_sendrecv(PyObject* self, PyObject* const* args, Py_ssize_t n_args, PyObject* keywords) {
  const auto& hot = *static_cast<const HotMessage*>(PyCapsule_GetPointer(self, nullptr));
  int dest = 0, source = kAnySource;
  if (keywords == nullptr && (n_args == 3 || n_args == 4) && parse_small(args[1], dest) &&
      (n_args < 4 || parse_small(args[3], source)) && peers_exist(hot, dest, source)) {
    try {
      PyObject* const result = try_sendrecv(hot, args[0], dest, args[2], source);
      if (result != nullptr || PyErr_Occurred() != nullptr) return result;
    } catch (...) {
      set_python_error(std::current_exception());
      return nullptr;
    }
  }
  return PyObject_Vectorcall(hot.general.ptr(), args, static_cast<std::size_t>(n_args), keywords);
}

template <PyObject* (*attempt)(const HotMessage&, const Message&), Py_ssize_t least>
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t n_args, PyObject* keywords) {
  const auto& hot = *static_cast<const HotMessage*>(PyCapsule_GetPointer(self, nullptr));
  Message message{nullptr, kAnySource, least == 1 ? kAnyTag : 0};
  if (parse(args, n_args, keywords, least, message)) {
    try {
      PyObject* const result = attempt(hot, message);
      if (result != nullptr || PyErr_Occurred() != nullptr) return result;
    } catch (...) {
      set_python_error(std::current_exception());
      return nullptr;
    }
  }
  return PyObject_Vectorcall(hot.general.ptr(), args, static_cast<std::size_t>(n_args), keywords);
}

PyMethodDef send_definition = {"send", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call<try_send, 2>)),
                               METH_FASTCALL | METH_KEYWORDS,
                               "send($self, /, x, dest, tag=0, *, timeout=None)\n--\n\nSee Backend.send."};
PyMethodDef recv_definition = {"recv", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call<try_recv, 1>)),
                               METH_FASTCALL | METH_KEYWORDS,
                               "recv($self, /, out, source=-1, tag=-1, *, timeout=None)\n--\n\nSee Backend.recv."};

PyMethodDef sendrecv_definition = {
    "sendrecv", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_sendrecv)), METH_FASTCALL | METH_KEYWORDS,
    "sendrecv($self, /, x, dest, out, source=-1, *, sendtag=0, recvtag=-1, timeout=None)\n--\n\nSee Backend.sendrecv."};

py::object bound(HotMessage message, PyMethodDef& definition) {
  auto hot = std::make_unique<HotMessage>(std::move(message));
  const py::capsule self(hot.release(), [](void* pointer) { delete static_cast<HotMessage*>(pointer); });
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&definition, self.ptr(), nullptr));
}

}  // namespace

void bind_hot_messages(py::module_& m) {
  m.def(
      "hot_message",
      [](const std::string& verb, std::shared_ptr<Communicator> communicator, double timeout, const py::type& status,
         py::object general) {
        if (!PyType_FastSubclass(reinterpret_cast<PyTypeObject*>(status.ptr()), Py_TPFLAGS_TUPLE_SUBCLASS)) {
          throw py::type_error("hot_message: status must be a subclass of tuple");
        }
        HotMessage message{std::move(communicator), timeout, status, std::move(general)};
        for (PyMethodDef* definition : {&send_definition, &recv_definition, &sendrecv_definition}) {
          if (verb == definition->ml_name) return bound(std::move(message), *definition);
        }
        throw py::value_error("no hot message: " + verb);
      },
      py::arg("verb"), py::arg("communicator"), py::arg("timeout"), py::arg("status"), py::arg("general"),
      "send, recv or sendrecv of a communicator; what is received is told as a `status` of three.");
}

}  // namespace samestep
