#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "bindings/array_view.h"
#include "communicator/communicator.h"

namespace samestep {

/// An operation together with the arrays it works on: keeps them alive, stages those that are not contiguous,
/// and brings staged results home at the end.
///
/// A receive whose wait a signal's handler ends is taken back, or it would swallow the next message.
///
/// An operation that failed for the group may still be read or written by the transport; then its arrays
/// are kept for good.
class PendingWork {
 public:
  PendingWork() = default;
  PendingWork(const PendingWork&) = delete;
  PendingWork& operator=(const PendingWork&) = delete;
  ~PendingWork();

  /// The elements of an array that is only read.
  ConstBuffer input(const pybind11::handle& array, const char* what);
  /// The elements of an array that will be written. `copy_in`: the operation also reads them.
  Buffer output(const pybind11::handle& array, const char* what, bool copy_in);
  /// Of a verb that works in place where `out` is None, or `x`.
  InOut in_out(const pybind11::handle& x, const pybind11::handle& out, const char* what);
  /// `in`, or a copy of it where what is written would change it: memory that is shared, unless `in` begins at `own`,
  /// where nobody else's elements are written before they are read.
  ConstBuffer apart(ConstBuffer in, Buffer out, const void* own = nullptr);
  /// As far as ranks must agree on it.
  Shape shape() const { return shape_; }

  void start(std::shared_ptr<Communicator> communicator, Communicator::WorkPtr work) {
    communicator_ = std::move(communicator);
    work_ = std::move(work);
  }

  /// Keeps an array that the operation works on as it lies.
  void keep(Array array) { arrays_.push_back(std::move(array)); }

  /// What becomes of an operation whose deadline passes.
  enum class AtDeadline : std::uint8_t {
    goes_on,
    abandon,  ///< the group ends: a blocking call, whose buffers are the caller's
    cancel,   ///< it is taken back: a receive
  };

  /// See Work. With the GIL held; `wait` gives it away after so many polls. On device memory `wait` lets the streams
  /// wait in which the arrays are used now, unless one has no stream or `on_host` is true.
  bool done();
  void wait(double timeout, AtDeadline at_deadline, int polls_with_gil = 64, bool on_host = false);
  std::exception_ptr error() const { return work_->error(); }
  Status status() const { return work_->status(); }
  bool cancel() {
    taken_back_ = taken_back_ || communicator_->cancel(*work_);
    return taken_back_;
  }

 private:
  struct Staged {
    Array array;
    std::vector<std::byte> elements;
    bool written;
  };
  void bring_home();
  bool is_over() const noexcept;
  /// As the array lies in memory, for the operation. Device memory cannot be staged here.
  Buffer as_it_lies(const pybind11::handle& array, Array view, const char* what);
  bool order_streams(double timeout, AtDeadline at_deadline);
  template <class Wait>
  void wait_for_end(AtDeadline at_deadline, Wait wait);

  std::shared_ptr<Communicator> communicator_;
  Communicator::WorkPtr work_;
  std::vector<Array> arrays_;
  std::vector<std::unique_ptr<Staged>> staged_;
  std::vector<pybind11::object> written_;
  std::vector<pybind11::object> on_device_;
  Shape shape_;
  bool home_ = false;
  bool taken_back_ = false;  // before anything came: nobody will use the memory
  bool ordered_ = false;     // streams wait for the end: what comes in them later may use the memory
};

/// The shape of a view, for signatures.
Shape shape_of(const ArrayView& view);
/// The same to `shape`, which is new: a copy of what has just been written in parts is slow.
void read_shape(const ArrayView& view, Shape& shape);

}  // namespace samestep
