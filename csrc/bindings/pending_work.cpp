#include "bindings/pending_work.h"

#include <span>

#include "core/error.h"
#include "kernels/strided.h"

namespace samestep {

namespace py = pybind11;

namespace {

std::span<const std::int64_t> extents(const ArrayView& view) {
  return {view.shape, static_cast<std::size_t>(view.n_dims)};
}
std::span<const std::int64_t> strides(const ArrayView& view) {
  return {view.strides, static_cast<std::size_t>(view.n_dims)};
}

}  // namespace

Shape shape_of(const ArrayView& view) {
  Shape shape;
  for (int i = 0; i < view.n_dims; ++i) {
    const auto extent = static_cast<std::uint64_t>(view.shape[i]);
    if (i < Shape::kMaxDims) {
      shape.extents[static_cast<std::size_t>(i)] = extent;
      ++shape.n_dims;
    } else {
      shape.extents[Shape::kMaxDims - 1] *= extent;
    }
  }
  return shape;
}

ConstBuffer PendingWork::input(const py::handle& array, const char* what) {
  Array view = view_of(array.ptr(), what);
  shape_ = shape_of(view.view());
  if (view->contiguous || view->device.kind != DeviceKind::cpu) {
    arrays_.push_back(std::move(view));
    return arrays_.back()->buffer();
  }
  auto staged = std::make_unique<Staged>(Staged{std::move(view), {}, false});
  const ArrayView& from = staged->array.view();
  staged->elements.resize(from.nbytes());
  kernels::pack(from.data, extents(from), strides(from), itemsize(from.dtype), staged->elements.data());
  staged_.push_back(std::move(staged));
  return {staged_.back()->elements.data(), static_cast<std::size_t>(from.count), from.dtype, from.device};
}

Buffer PendingWork::output(const py::handle& array, const char* what, bool copy_in) {
  Array view = view_of(array.ptr(), what);
  require_writable(view.view(), what);
  shape_ = shape_of(view.view());
  written_.push_back(py::reinterpret_borrow<py::object>(array));
  if (view->contiguous || view->device.kind != DeviceKind::cpu) {
    arrays_.push_back(std::move(view));
    return arrays_.back()->buffer();
  }
  auto staged = std::make_unique<Staged>(Staged{std::move(view), {}, true});
  const ArrayView& to = staged->array.view();
  staged->elements.resize(to.nbytes());
  if (copy_in) kernels::pack(to.data, extents(to), strides(to), itemsize(to.dtype), staged->elements.data());
  staged_.push_back(std::move(staged));
  return {staged_.back()->elements.data(), static_cast<std::size_t>(to.count), to.dtype, to.device};
}

void PendingWork::bring_home() {
  if (home_) return;
  home_ = true;
  if (work_->error()) return;
  for (const auto& staged : staged_) {
    const ArrayView& to = staged->array.view();
    if (!staged->written) continue;
    kernels::unpack(staged->elements.data(), to.data, extents(to), strides(to), itemsize(to.dtype));
  }
  for (const py::object& array : written_) note_written(array.ptr());
}

bool PendingWork::done() {
  if (!work_->done()) return false;
  bring_home();
  return true;
}

void PendingWork::wait(double timeout, AtDeadline at_deadline, int polls_with_gil) {
  const int polls = communicator_->oversubscribed() ? 1 : polls_with_gil;  // there each poll keeps others from coming
  for (int i = 0; i < polls; ++i) {
    if (!work_->done()) continue;
    bring_home();
    if (work_->error()) std::rethrow_exception(work_->error());
    return;
  }
  {
    const py::gil_scoped_release no_gil;
    try {
      work_->wait(Deadline::after(Seconds(timeout)));
    } catch (const TimeoutError& error) {
      if (work_->done()) throw;
      if (at_deadline == AtDeadline::abandon) communicator_->abandon(std::current_exception(), error.what());
      if (at_deadline == AtDeadline::cancel) cancel();
      throw;
    }
  }
  bring_home();
}

PendingWork::~PendingWork() {
  bool safe = work_ == nullptr || work_->done();
  if (safe && work_ != nullptr && work_->error()) {
    try {
      std::rethrow_exception(work_->error());
    } catch (const MismatchError&) {
    } catch (...) {
      safe = false;
    }
  }
  if (safe) return;
  struct Kept {
    std::vector<Array> arrays;
    std::vector<std::unique_ptr<Staged>> staged;
    std::vector<py::object> written;
    Communicator::WorkPtr work;
  };
  static auto& kept_for_good = *new std::vector<Kept>;
  kept_for_good.push_back({std::move(arrays_), std::move(staged_), std::move(written_), std::move(work_)});
}

}  // namespace samestep
