#include "calls/pending_work.h"

#include <algorithm>
#include <optional>
#include <span>

#include "arrays/array_sources.h"
#include "arrays/device_copies.h"
#include "core/error.h"
#include "core/format.h"
#include "kernels/stream.h"
#include "kernels/strided.h"
#include "process/user_call.h"

namespace samestep {

namespace py = pybind11;

namespace {

/// Whether an operation has ended because ranks differ.
bool differs(const Work& work) {
  const std::exception_ptr error = work.error();
  return error != nullptr && is_a<MismatchError>(error);
}

bool device_has_ended(const Work& work) {
  const py::gil_scoped_release no_gil;  // the runtime is asked
  return work.device_has_ended();
}

}  // namespace

void read_shape(std::span<const std::int64_t> extents, Shape& shape) {
  shape.n_dims = 0;
  shape.memory_order = 0;
  for (const std::int64_t given : extents) {
    const auto extent = static_cast<std::uint64_t>(given);
    if (shape.n_dims < Shape::kMaxDims) {
      shape.extents[shape.n_dims++] = extent;
    } else {
      // A signature has room for six extents. The number of elements stays exact.
      shape.extents[Shape::kMaxDims - 1] *= extent;
    }
  }
}

Shape shape_of(const ArrayView& view) {
  Shape shape;
  read_shape(view.extents(), shape);
  return shape;
}

CollectiveType collective_named(const std::string& text) {
  for (auto i = std::uint8_t{0}; i <= static_cast<std::uint8_t>(CollectiveType::barrier); ++i) {
    if (name(static_cast<CollectiveType>(i)) == text) return static_cast<CollectiveType>(i);
  }
  throw InvalidArgumentError("no collective: " + text);
}

Buffer PendingWork::borrow(const py::handle& array, Array view, const char* what, Order order) {
  if (view->device.kind != DeviceKind::cpu) {
    const std::optional<std::uint64_t> lies = view->memory_order();
    // The package has no kernels for devices that could copy the elements in order. The array's library has.
    if (!lies.has_value() || (*lies != 0 && order == Order::row_major)) {
      throw InvalidArgumentError(str(what, ": an array ", lies ? "that is not row-major" : "with gaps",
                                     " in device memory cannot be sent as it lies; pass a contiguous copy (torch: "
                                     "x.contiguous(), CuPy: cupy.ascontiguousarray(x))"));
    }
    shape_.memory_order = *lies;
    ArrayView& viewed = view.mutable_view();
    // Numba also reports None for arrays on its default stream.
    if (streams_.find(array.ptr(), viewed) == kNoStream) viewed.stream = kLegacyStream;
    on_device_.push_back({py::reinterpret_borrow<py::object>(array), viewed.device});
  }
  arrays_.push_back(std::move(view));
  return arrays_.back()->buffer();
}

Array PendingWork::take(const py::handle& array, const char* what, const char* argument, bool written) const {
  Array view = view_of(array.ptr(), what, argument);
  // Other threads may run while it waits, so the memory is looked up anew.
  if (memory_in_use::settle(array.ptr(), view.view(), written, is_message(), what))
    view = view_of(array.ptr(), what, argument);
  return view;
}

Buffer PendingWork::use(const py::handle& array, Array view, const char* what, Order order, bool copy_in,
                        bool written) {
  shape_ = shape_of(view.view());
  const bool in_place = view->contiguous || view->device.kind != DeviceKind::cpu;
  // What is staged and only read has been read before the operation starts.
  if (view->count != 0 && in_place) uses_.push_back(memory_in_use::use_of(view.view(), written));
  if (in_place) return borrow(array, std::move(view), what, order);
  auto staged = std::make_unique<Staged>(Staged{std::move(view), {}, written});
  const ArrayView& lies = staged->array.view();
  staged->elements.resize(lies.nbytes());
  if (copy_in) {
    kernels::pack(lies.data, lies.extents(), lies.steps(), itemsize(lies.dtype), staged->elements.data());
  }
  if (written && lies.count != 0) uses_.push_back(memory_in_use::use_of(lies, written));
  staged_.push_back(std::move(staged));
  return {staged_.back()->elements.data(), static_cast<std::size_t>(lies.count), lies.dtype, lies.device};
}

ConstBuffer PendingWork::input(const py::handle& array, const char* what, Order order) {
  return use(array, take(array, what, "", /*written=*/false), what, order, /*copy_in=*/true, /*written=*/false);
}

Buffer PendingWork::output(const py::handle& array, const char* what, bool copy_in, Order order, const char* argument) {
  Array view = take(array, what, argument, /*written=*/true);
  if (!writable(view.view())) require_writable(view.view(), str(what, argument).c_str(), array.ptr());
  written_.push_back(py::reinterpret_borrow<py::object>(array));
  return use(array, std::move(view), what, order, copy_in, /*written=*/true);
}

Buffer PendingWork::bcast(const py::handle& array, bool at_root) {
  if (!at_root) return output(array, "bcast", /*copy_in=*/false, Order::any);
  const ConstBuffer in = input(array, "bcast", Order::any);
  return {const_cast<void*>(in.data), in.count, in.dtype, in.device, in.stream};
}

InOut PendingWork::in_out(const py::handle& x, const py::handle& out, const char* what, Order order) {
  if (out.is_none() || out.is(x)) {
    const Buffer both = output(x, what, /*copy_in=*/true, order);
    return {both, both};
  }
  const Buffer to = output(out, what, /*copy_in=*/false, order, ": out");
  // The operation pairs elements by their position in memory. In two orders it would combine elements of different
  // indices.
  const std::uint64_t order_of_out = shape_.memory_order;
  const ConstBuffer in = input(x, what, order);
  if (shape_.memory_order != order_of_out) {
    throw InvalidArgumentError(str(what,
                                   ": x and out lie in device memory in different orders of their axes; pass an "
                                   "out with the strides of x (torch: torch.empty_like(x))"));
  }
  return {in.data == to.data || !share_memory(in, to) ? in : copy_of(in), to};
}

ConstBuffer PendingWork::copy_of(ConstBuffer in) {
  auto staged = std::make_unique<Staged>(Staged{{}, std::vector<std::byte>(in.nbytes()), false});
  kernels::copy(staged->elements.data(), in.data, in.nbytes());
  in.data = staged->elements.data();
  staged_.push_back(std::move(staged));
  return in;
}

void PendingWork::start_pinned(std::shared_ptr<Communicator> communicator, Communicator::WorkPtr work) {
  start(std::move(communicator), std::move(work));
  pin_arrays();
}

void PendingWork::start_alone(std::shared_ptr<Communicator> communicator, Communicator::WorkPtr work) {
  start_pinned(std::move(communicator), std::move(work));
  memory_in_use::add(shared_from_this(), uses_);
  is_registered_ = true;
}

void PendingWork::claim(const py::list& arrays, const py::object& owner) {
  owner_ = py::weakref(owner);
  std::vector<memory_in_use::Use> uses;
  for (const py::handle& object : arrays) {
    auto array = std::make_unique<Array>();
    // In place of what cannot be written, `owner` makes new arrays.
    if (!try_view(object.ptr(), *array) || !writable(array->view()) || array->view().count == 0) continue;
    uses.push_back(memory_in_use::use_of(array->view(), true));
    claimed_.push_back(std::move(array));
  }
  memory_in_use::add(shared_from_this(), uses);
  uses_.insert(uses_.end(), uses.begin(), uses.end());
  is_registered_ = true;
}

void PendingWork::settle() {
  const py::object owner = owner_ ? owner_() : py::none();
  if (!owner.is_none()) {
    owner.attr("_settle")();
  } else {
    try {
      wait(communicator_->timeout(), AtDeadline::abandon);
    } catch (const Error&) {
      if (!work_->done()) throw;
    }
  }
  forget_uses();
}

void PendingWork::let_follow(PyObject* array, const ArrayView& view) {
  if (on_device_.empty() || view.device.kind == DeviceKind::cpu) return;
  StreamFinder finder;
  ArrayView later = view;
  finder.find(array, later);
  bool ordered = true;
  for (const OnDevice& one : on_device_) {
    ArrayView earlier = view;
    earlier.device = one.device;
    finder.find(one.array.ptr(), earlier);
    const py::gil_scoped_release no_gil;  // the runtime may block
    ordered = order_streams_of(later, earlier) && ordered;
  }
  if (!ordered && !work_->error()) wait(communicator_->timeout(), AtDeadline::abandon, 1, /*wait_on_host=*/true);
}

void PendingWork::pin_arrays() {
  {
    const std::lock_guard lock(mutex_);
    if (!pins_.empty()) return;
  }
  std::vector<py::object> pins;
  for (const Array& array : arrays_) pins.push_back(pin_memory(array));
  for (const auto& staged : staged_) pins.push_back(pin_memory(staged->array));
  // Where two threads have made pins, those of one are dropped after the lock is released.
  const std::lock_guard lock(mutex_);
  if (pins_.empty() && !unstaged_) pins_.swap(pins);
}

void PendingWork::unstage() {
  forget_uses();
  std::vector<py::object> pins;  // dropped after the lock is released: that may run any code
  {
    // Held until the elements are in place: another thread that waits for the operation returns only then.
    const std::lock_guard lock(mutex_);
    if (std::exchange(unstaged_, true)) return;
    pins.swap(pins_);
    // The result of a failed operation is undefined. A staged array keeps its old elements instead.
    if (work_->error()) return;
    for (const auto& staged : staged_) {
      const ArrayView& to = staged->array.view();
      if (!staged->written) continue;
      kernels::unpack(staged->elements.data(), to.data, to.extents(), to.steps(), itemsize(to.dtype));
    }
  }
  for (const py::object& array : written_) bump_version(array.ptr());
}

bool PendingWork::poll() const {
  if (!work_->asks_device()) return work_->done();
  // A call of the runtime may block, and with a staged operation the whole next step is done here.
  const py::gil_scoped_release no_gil;
  return work_->done();
}

bool PendingWork::done() {
  if (!poll()) return false;
  unstage();
  return true;
}

void PendingWork::wait(double timeout, AtDeadline at_deadline, int polls_with_gil, bool wait_on_host) {
  // Querying the device costs more than a stream wait. If the operation is known to have ended no wait is needed, and
  // the array may no longer belong to a stream.
  if (!wait_on_host && !work_->has_ended() && order_streams(timeout, at_deadline)) return unstage();
  // Where CPUs are short each poll keeps others from coming; what a device does is not worth one.
  const int polls = communicator_->oversubscribed() || !on_device_.empty() ? 1 : polls_with_gil;
  for (int i = 0; i < polls; ++i) {
    if (!poll()) continue;
    unstage();
    if (!work_->error()) return;
    // It throws the error, and draws the consequences for the group.
    return wait_for_end(at_deadline, [&] { work_->wait(Deadline::after(Seconds(timeout))); });
  }
  wait_for_end(at_deadline, [&] { work_->wait(Deadline::after(Seconds(timeout))); });
  unstage();
}

template <class Wait>
void PendingWork::wait_for_end(AtDeadline at_deadline, Wait wait) {
  pin_arrays();  // other threads of Python run from here on
  const py::gil_scoped_release no_gil;
  try {
    wait();
  } catch (const TimeoutError& error) {
    // The operation has ended meanwhile, perhaps with this very error: nothing is left to abandon or to cancel.
    if (work_->done()) throw;
    if (at_deadline == AtDeadline::abandon) communicator_->abandon(std::current_exception(), error.what());
    if (at_deadline == AtDeadline::cancel) cancel();
    throw;
  } catch (const py::error_already_set&) {
    // A signal handler has raised. A receive that stayed posted would consume the next message, which nobody would see.
    if (at_deadline != AtDeadline::keep_running) cancel();
    // One of several operations of a call: this rank will not start the others, for which its peers would wait.
    if (!user_call().empty()) {
      const std::string reason = str(user_call(), ": a signal handler has left the call by an exception");
      communicator_->abandon(std::make_exception_ptr(Error(reason)), reason);
    }
    throw;
  }
}

bool PendingWork::order_streams(double timeout, AtDeadline at_deadline) {
  if (on_device_.empty()) return false;
  std::vector<StreamHandle> streams;  // each once
  StreamFinder finder;
  for (const OnDevice& one : on_device_) {
    // XLA may give the memory of an input away as soon as it is released, and no stream of XLA's can wait, for a result
    // neither.
    const sources::TypeFacts facts = sources::facts_of(Py_TYPE(one.array.ptr()));
    if (facts.jax || facts.becomes_jax) return false;
    ArrayView view;
    view.device = one.device;
    const StreamHandle stream = finder.find(one.array.ptr(), view);
    if (stream == kNoStream) return false;
    if (std::ranges::find(streams, stream) == streams.end()) streams.push_back(stream);
  }
  bool ordered = true;
  wait_for_end(at_deadline, [&] {
    const Deadline deadline = Deadline::after(Seconds(timeout));
    for (const StreamHandle stream : streams) ordered = ordered && work_->make_stream_wait(stream, deadline);
  });
  ordered_.store(ordered, std::memory_order_relaxed);  // relaxed: see there
  return ordered;
}

/// Whether nobody reads or writes the arrays any more.
bool PendingWork::is_over() const noexcept {
  if (work_ == nullptr || ordered_ || cancelled_) return true;
  std::optional<py::gil_scoped_release> no_gil;
  if (work_->asks_device()) no_gil.emplace();  // as in `poll`
  try {
    if (!work_->done()) return false;
    if (work_->error()) std::rethrow_exception(work_->error());
    return true;
  } catch (const MismatchError&) {
    // Ranks of a host group compare signatures before they touch any elements. NCCL may run before they have compared.
    return on_device_.empty() || work_->device_has_ended();
  } catch (const StepError&) {
    // A peer that has not noticed the revocation may still access this memory, until all ranks have discarded the
    // group.
    return communicator_->membership().is_discarded() && (on_device_.empty() || work_->device_has_ended());
  } catch (...) {
    // Other failures leave the state of the transport unknown until then, and that of a device forever. In a process
    // made by fork `done` throws.
    return on_device_.empty() && communicator_->membership().is_discarded();
  }
}

PendingWork::Retained& PendingWork::retained() {
  // Never destroyed: static objects are destroyed after the interpreter, without which no array can be released.
  static auto& all = *new Retained;
  return all;
}

PendingWork::~PendingWork() {
  forget_uses();
  // A device may have ended since another operation was dropped. relaxed: see there
  if (retained().n_awaiting_device.load(std::memory_order_relaxed) != 0) [[unlikely]]
    release_kept();
  if (is_over()) return;
  const bool awaits_device = differs(*work_);
  const std::lock_guard lock(retained().mutex);
  retained().all.push_back({std::move(communicator_), std::move(arrays_), std::move(staged_), std::move(written_),
                            std::move(pins_), std::move(work_), awaits_device});
  retained().n_awaiting_device.fetch_add(awaits_device, std::memory_order_relaxed);  // relaxed: see there
}

void PendingWork::release_kept() {
  std::vector<Kept> all, released;  // arrays are dropped at the end: that may run any code
  {
    // Taken out, so that the mutex is free while devices are asked.
    const std::lock_guard lock(retained().mutex);
    all.swap(retained().all);
  }
  for (Kept& kept : all) {
    const bool in_host_memory =
        std::ranges::all_of(kept.arrays, [](const Array& x) { return x->device.kind == DeviceKind::cpu; });
    // As in `is_over`.
    const bool host_has_ended = kept.awaits_device || kept.communicator->membership().is_discarded();
    if (!host_has_ended || !(in_host_memory || device_has_ended(*kept.work))) continue;
    retained().n_awaiting_device.fetch_sub(kept.awaits_device, std::memory_order_relaxed);  // relaxed: see there
    released.push_back(std::move(kept));
  }
  const std::lock_guard lock(retained().mutex);
  for (Kept& kept : all) {
    // Only entries that were moved from have no communicator.
    if (kept.communicator != nullptr) retained().all.push_back(std::move(kept));
  }
}

}  // namespace samestep
