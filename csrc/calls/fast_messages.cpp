// The fast paths of send, recv and sendrecv, see fast_method.cpp.

#include <pybind11/pybind11.h>

#include <memory>
#include <string_view>
#include <utility>

#include "calls/fast_method.h"
#include "calls/fast_views.h"
#include "calls/pending_work.h"
#include "communicator/communicator.h"

namespace samestep {

namespace py = pybind11;

namespace {

/// The class of the status of a received message: a subclass of tuple. Set by the import that makes the fast methods.
PyTypeObject* status_type = nullptr;

/// The arguments of a call: an array, a rank and a tag.
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

void wait(const FastTarget& target, const Communicator::WorkPtr& work, Array array, AtDeadline at_deadline) {
  const std::size_t nbytes = array->nbytes();
  PendingWork pending;
  pending.start(target.communicator, work);
  pending.keep(std::move(array));
  pending.wait(target.timeout, at_deadline, polls_for(nbytes));
}

PyObject* to_python(const Status& status) {
  PyObject* const result = status_type->tp_alloc(status_type, 3);
  if (result == nullptr) return nullptr;
  PyTuple_SET_ITEM(result, 0, PyLong_FromLong(status.source));
  PyTuple_SET_ITEM(result, 1, PyLong_FromLong(status.tag));
  PyTuple_SET_ITEM(result, 2, PyLong_FromUnsignedLongLong(status.count));
  return result;
}

/// A receive must not be posted for a send that will be refused.
bool peers_exist(const FastTarget& target, int dest, int source) {
  const int size = target.communicator->size();
  return dest >= 0 && dest < size && source >= kAnySource && source < size;
}

/// Null without a Python error if the fast path declines the call.
PyObject* try_send(const FastTarget& target, const Message& message) {
  Array array;
  const ArrayView* const view = borrow_view(message.array, false, array);
  if (view == nullptr) return nullptr;
  if (const auto work = target.communicator->run(SendArgs{view->buffer(), message.peer, message.tag})) {
    // A send cannot be cancelled, and the array returns to the caller: after a timeout only the end of the group helps.
    wait(target, work, std::move(array), AtDeadline::abandon);
  }
  return Py_NewRef(Py_None);
}

PyObject* try_recv(const FastTarget& target, const Message& message) {
  Array array;
  const ArrayView* const view = borrow_view(message.array, true, array);
  if (view == nullptr) return nullptr;
  Status status;
  if (const auto work = target.communicator->run(RecvArgs{view->buffer(), message.peer, message.tag}, status)) {
    // A receive that no message has matched can be cancelled, and the group stays usable.
    wait(target, work, std::move(array), AtDeadline::cancel);
    status = work->status();
  }
  bump_version(message.array);
  return to_python(status);
}

/// Both at once: x, dest, out, source.
PyObject* try_sendrecv(const FastTarget& target, PyObject* x, int dest, PyObject* out, int source) {
  Array sent, received;
  const ArrayView* const from = borrow_view(x, false, sent);
  const ArrayView* const to = borrow_view(out, true, received);
  if (from == nullptr || to == nullptr || share_memory(from->buffer(), to->buffer())) return nullptr;
  PendingWork sending;
  Communicator::WorkPtr send;
  Status status;
  // The send may be in flight when the receive throws. Its array must then outlive this function, so a PendingWork gets
  // it.
  const auto keep_what_is_sent = [&] {
    if (send == nullptr) return;
    sending.start(target.communicator, send);
    sending.keep(std::move(sent));
  };
  Communicator::WorkPtr work;
  try {
    work = target.communicator->run({from->buffer(), dest}, {to->buffer(), source}, status, send);
  } catch (...) {
    keep_what_is_sent();
    throw;
  }
  keep_what_is_sent();
  if (work != nullptr) {
    wait(target, work, std::move(received), AtDeadline::abandon);
    status = work->status();
  }
  if (send != nullptr) sending.wait(target.timeout, AtDeadline::abandon);
  bump_version(out);
  return to_python(status);
}

PyObject* attempt_sendrecv(const FastTarget& target, PyObject* const* args, Py_ssize_t n_args, PyObject* keywords) {
  int dest = 0, source = kAnySource;
  const bool fits = keywords == nullptr && (n_args == 3 || n_args == 4) && parse_small(args[1], dest) &&
                    (n_args < 4 || parse_small(args[3], source)) && peers_exist(target, dest, source);
  return fits ? try_sendrecv(target, args[0], dest, args[2], source) : nullptr;
}

template <PyObject* (*run)(const FastTarget&, const Message&), Py_ssize_t least>
PyObject* attempt_message(const FastTarget& target, PyObject* const* args, Py_ssize_t n_args, PyObject* keywords) {
  Message message{nullptr, kAnySource, least == 1 ? kAnyTag : 0};
  return parse(args, n_args, keywords, least, message) ? run(target, message) : nullptr;
}

void set_status_type(const py::type& type) {
  auto* const given = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (!PyType_FastSubclass(given, Py_TPFLAGS_TUPLE_SUBCLASS)) {
    throw py::type_error("set_status_type: the type must be a subclass of tuple");
  }
  Py_INCREF(given);  // for as long as the process lives
  status_type = given;
}

}  // namespace

FastAttempt find_fast_message(const char* name) {
  const std::string_view wanted = name;
  if (status_type == nullptr) return nullptr;
  if (wanted == "send") return &attempt_message<try_send, 2>;
  if (wanted == "recv") return &attempt_message<try_recv, 1>;
  return wanted == "sendrecv" ? &attempt_sendrecv : nullptr;
}

void bind_fast_messages(py::module_& m) {
  m.def("set_status_type", &set_status_type, py::arg("type"),
        "What a receive of the fast methods returns: a subclass of tuple, for three elements.");
}

}  // namespace samestep
