#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "arrays/array_view.h"
#include "arrays/free_threading.h"
#include "calls/memory_in_use.h"
#include "communicator/communicator.h"

namespace samestep {

/// An operation in progress with its arrays: keeps them alive, stages those that are not contiguous, and copies staged
/// results back at the end.
///
/// A receive is cancelled if a signal handler ends its wait by an exception, or it would consume the next message.
///
/// After an operation has failed, the transport or a device may still access its arrays; they are kept until it is
/// known that nobody does, which may be forever.
///
/// Before it takes an array, it ends the operations in progress that would be disturbed; see memory_in_use.
///
/// Once it has been started, several threads may wait for it, ask whether it is done, and cancel it.
class PendingWork : public std::enable_shared_from_this<PendingWork> {
 public:
  enum class Kind : std::uint8_t { collective, message };
  explicit PendingWork(Kind kind = Kind::collective) : kind_(kind) {}
  PendingWork(const PendingWork&) = delete;
  PendingWork& operator=(const PendingWork&) = delete;
  ~PendingWork();

  /// In which order the operation needs the elements of device memory. Host memory is copied to row-major order.
  enum class Order : std::uint8_t {
    row_major,
    any,  ///< as they lie, if that is one run of memory: the operation takes elements one by one
  };

  /// The elements of an array that is only read.
  ConstBuffer input(const pybind11::handle& array, const char* what, Order order = Order::row_major);
  /// The elements of an array that will be written. `copy_in`: the operation also reads them. `argument`: of the call,
  /// for the error if it cannot be written.
  Buffer output(const pybind11::handle& array, const char* what, bool copy_in, Order order = Order::row_major,
                const char* argument = "");
  /// The elements of a bcast, which are only read at root: its array may be read-only.
  Buffer bcast(const pybind11::handle& array, bool at_root);
  /// The arrays of a collective that works in place if `out` is None or `x`.
  InOut in_out(const pybind11::handle& x, const pybind11::handle& out, const char* what,
               Order order = Order::row_major);
  /// A copy, for an operation that would overwrite `in` before it has read it.
  ConstBuffer copy_of(ConstBuffer in);
  /// The shape that ranks compare.
  Shape shape() const { return shape_; }

  void start(std::shared_ptr<Communicator> communicator, Communicator::WorkPtr work) {
    communicator_ = std::move(communicator);
    work_ = std::move(work);
  }
  /// `start` of an operation that the caller does not wait for at once: until its end no NumPy array can be resized.
  void start_pinned(std::shared_ptr<Communicator> communicator, Communicator::WorkPtr work);
  /// The same, and until its end others see that its memory is in use. Needs a shared pointer to this.
  void start_alone(std::shared_ptr<Communicator> communicator, Communicator::WorkPtr work);
  /// `owner`, an object of Python, writes `arrays` when this operation has ended: its method `_settle` does both.
  void claim(const pybind11::list& arrays, const pybind11::object& owner);
  bool is_message() const { return kind_ == Kind::message; }
  /// Ends it, on behalf of another operation. Its error is left to those who wait for it.
  void settle();
  /// Behind that: lets the stream of `array`, which lies in its memory and is used next, wait as those of its own do.
  void let_follow(PyObject* array, const ArrayView& view);

  /// Keeps an array alive that the operation uses in place.
  void keep(Array array) { arrays_.push_back(std::move(array)); }
  /// The same for `object`, an array on a device, whose stream `wait` orders.
  void keep_on_device(Array array, const pybind11::handle& object) {
    on_device_.push_back({pybind11::reinterpret_borrow<pybind11::object>(object), array->device});
    keep(std::move(array));
  }

  /// What happens to an operation whose deadline passes.
  enum class AtDeadline : std::uint8_t {
    keep_running,
    abandon,  ///< leave the group: a blocking call, whose buffers return to the caller
    cancel,   ///< cancel it: a receive
  };

  /// See Work. Needs the GIL; `wait` releases it after so many polls. For device memory `wait` makes the
  /// streams wait in which the arrays are used, unless one has no stream or `wait_on_host` is true.
  bool done();
  void wait(double timeout, AtDeadline at_deadline, int polls_with_gil = 64, bool wait_on_host = false);
  std::exception_ptr error() const { return work_->error(); }
  Status status() const { return work_->status(); }
  std::span<const std::byte> object() const { return work_->object(); }
  /// Drops the arrays that were kept, where nobody uses them any more.
  static void release_kept();
  /// To be called without the GIL: the operation may ask a device's runtime.
  bool give_back() {
    const bool given_back = work_->give_back();
    if (given_back) forget_uses();  // the next receive may be one into the same array
    return given_back;
  }
  bool cancel() {
    const std::lock_guard lock(cancelling_);
    cancelled_ = cancelled_ || work_->cancel();
    if (cancelled_) forget_uses();
    return cancelled_;
  }

 private:
  struct Staged {
    Array array;
    std::vector<std::byte> elements;
    bool written;
  };
  /// The arrays of an operation that failed, which the transport may still use.
  struct Kept {
    std::shared_ptr<Communicator> communicator;
    std::vector<Array> arrays;
    std::vector<std::unique_ptr<Staged>> staged;
    std::vector<pybind11::object> written, pins;
    Communicator::WorkPtr work;
    bool awaits_device;  // a mismatch on a device: the host has let go of the arrays
  };
  /// Those of the process.
  struct Retained {
    std::mutex mutex;
    std::vector<Kept> all;
    std::atomic<std::size_t> n_awaiting_device = 0;  // relaxed: a look that comes too early is repeated by the next one
  };
  static Retained& retained();
  /// Makes progress, without the GIL where a device has to be asked. Host arrays keep it: to give it away costs more
  /// than the look at shared memory.
  bool poll() const;
  void unstage();
  void pin_arrays();
  bool is_over() const noexcept;
  void forget_uses() noexcept {
    if (is_registered_.exchange(false)) memory_in_use::remove(*this, uses_);
  }
  /// The array, once no operation in progress disturbs its use.
  Array take(const pybind11::handle& array, const char* what, const char* argument, bool written) const;
  /// The elements of the array, in place or staged.
  Buffer use(const pybind11::handle& array, Array view, const char* what, Order order, bool copy_in, bool written);
  /// The array in place. Device memory cannot be staged here.
  Buffer borrow(const pybind11::handle& array, Array view, const char* what, Order order);
  bool order_streams(double timeout, AtDeadline at_deadline);
  template <class Wait>
  void wait_for_end(AtDeadline at_deadline, Wait wait);

  std::shared_ptr<Communicator> communicator_;
  Communicator::WorkPtr work_;
  std::vector<Array> arrays_;
  std::vector<std::unique_ptr<Staged>> staged_;
  std::vector<pybind11::object> written_;
  std::vector<pybind11::object> pins_;
  const Kind kind_;
  std::vector<memory_in_use::Use> uses_;
  std::atomic<bool> is_registered_ = false;
  std::vector<std::unique_ptr<Array>> claimed_;
  pybind11::object owner_;  // a weak reference
  struct OnDevice {
    pybind11::object array;
    Device device;
  };
  std::vector<OnDevice> on_device_;
  StreamFinder streams_;
  Shape shape_;
  PythonMutex mutex_;  // of the pins and of `unstage`
  bool unstaged_ = false;
  std::mutex cancelling_;
  bool cancelled_ = false;  // before a message matched: the memory is not used any more
  // relaxed: the destructor reads it, when no other thread uses this any more
  std::atomic<bool> ordered_ = false;  // streams wait for the end, so later work in them may use the memory
};

/// The collective of this name. Throws InvalidArgumentError.
CollectiveType collective_named(const std::string& text);

/// The shape of a view, for signatures.
Shape shape_of(const ArrayView& view);
/// The same to `shape`, whose extents are zero: a copy of what has just been written in parts is slow.
void read_shape(std::span<const std::int64_t> extents, Shape& shape);

}  // namespace samestep
