#include "gpu/staging.h"

#include <algorithm>
#include <atomic>
#include <span>
#include <thread>
#include <utility>

#include "communicator/peer_memory.h"
#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "engine/progress_engine.h"
#include "waiting/backoff.h"

namespace samestep {

namespace {

constexpr Seconds kForTheRuntime{1};

/// The memory that the ranks of a host share, if there is some.
BufferPool::Source shared_by(const std::shared_ptr<Communicator>& group) {
  if (group->peer_memory() == nullptr) return {};
  // Not the group itself, which may hold segments after it has been abandoned.
  return [weak = std::weak_ptr(group)](std::size_t nbytes) -> std::shared_ptr<std::byte> {
    const std::shared_ptr<Communicator> alive = weak.lock();
    return alive != nullptr ? alive->peer_memory()->allocate(nbytes) : nullptr;
  };
}

}  // namespace

std::size_t total_nbytes(const StagedRuns& runs) {
  std::size_t nbytes = 0;
  for (const StagedRun& run : runs) nbytes += run.nbytes;
  return nbytes;
}

class HostStaging::StagedWork final : public Work {
 public:
  /// Records what the streams of the arrays have so far, which blocks while one of them is full. The caller must hold
  /// no locks.
  StagedWork(std::shared_ptr<HostStaging> stager, StagedOperation call)
      : stager_(std::move(stager)), call_(std::move(call)) {
    produced_ = stager_->events_->record(call_.after);
  }

  bool done() override {
    if (ended_) return true;
    stager_->owner_.require(stager_->messages_->rank(), stager_->messages_->name());
    stager_->progress();
    return ended_;
  }

  void wait(const Deadline& deadline) override { wait_for(ended_, deadline); }

  bool make_stream_wait(StreamHandle stream, const Deadline& deadline) override {
    if (ended_ && error_) std::rethrow_exception(error_);
    // A wait for what is no part of the capture would end it. The graph is launched after the host's wait.
    if (stager_->gpu_->is_capturing(reinterpret_cast<GpuLibrary::Stream>(stream), stager_->device_)) return false;
    wait_for(handed_over_, deadline);
    if (end_ != nullptr) end_->make_wait(reinterpret_cast<GpuLibrary::Stream>(stream));
    return true;
  }

  bool cancel() override {
    const std::lock_guard lock(stager_->mutex_);
    if (ended_ || last_started_ == nullptr || !last_started_->cancel()) return false;
    fail(last_started_->error());
    return true;
  }
  std::exception_ptr error() const override { return ended_ ? error_ : nullptr; }
  bool asks_device() const override { return true; }
  bool has_ended() const override { return ended_; }
  bool device_has_ended() const override { return stager_->is_idle(); }
  Status status() const override { return status_; }

  // ---- called by HostStaging, which holds its mutex

  bool is_message() const { return call_.type != StagedOperation::Type::collective; }
  bool ended() const { return ended_; }
  /// Whether all of it has started on the host, so that the next operation may.
  bool has_started() const {
    // What is sent later finds its place behind the header; the segments of a message may wait for its receiver.
    if (ended_ || (sends() && n_started_ != 0)) return true;
    return n_started_ == call_.parts.size() && call_.then == nullptr;
  }
  bool sends() const { return call_.type == StagedOperation::Type::send; }
  bool will_send(int dest, int tag) const {
    return sends() && call_.dest == dest && call_.tag == tag && !has_started();
  }
  /// Whether copies to the host may be in the stream, since not all of it has started there.
  bool copies_out() const { return sends() ? n_copied_ != n_started_ && !ended_ : n_copied_ != 0 && !has_started(); }
  /// Whether more of it will be copied to the host.
  bool has_more_to_copy() const {
    if (ended_ || call_.parts[0].in == nullptr) return false;
    return call_.then != nullptr || n_copied_ != call_.parts.size();
  }
  /// Whether the next device-to-host copy may be enqueued before those of earlier operations. Only if its producer
  /// kernel is done: otherwise their copies queue behind that kernel, which may itself be waiting for them (deadlock).
  bool may_copy_before_others() { return n_copied_ != 0 || call_.parts[0].in == nullptr || is_produced(); }
  /// Makes a step of each segment. `may_begin`: whether segments may start on the host. `may_copy`: whether another
  /// copy may be put into the stream.
  void advance(bool may_begin, bool may_copy) {
    if (ended_) return;
    try {
      if (n_handed_over_ == call_.parts.size() && call_.then != nullptr) add_segments();
      // An operation with copies in the stream may add more, whatever the limit says: it is among those that count.
      while ((copies_out() || may_copy) && may_copy_more() && n_copied_ < call_.parts.size()) copy_out();
      bool all_before_are_back = true;
      for (RemoteSegment& piece : pieces_) {
        // In order: segments are operations of the host group, which all ranks must start in the same order.
        if (piece.work == nullptr && !may_start(piece, may_begin)) break;
        if (piece.awaits_stream && is_produced()) {
          piece.awaits_stream = false;
          piece.work->begin_writes();
        }
        if (piece.back) continue;
        if (piece.work->done()) {
          if (n_handed_over_ == 0) status_ = piece.work->status();
          if (const std::exception_ptr error = piece.work->error())
            return fail(error);  // of the host group, whose ranks know
          // In order: else later segments might be all that may be copied back at a time, and wait for an earlier one.
          if (all_before_are_back) copy_back(piece);
        }
        all_before_are_back = all_before_are_back && piece.back;
      }
      while (!pieces_.empty() && pieces_.front().back && is_copied(pieces_.front())) {
        if (pieces_.front().part.out != nullptr) --stager_->n_copying_back_;
        pieces_.pop_front();
        ++n_finished_;
      }
    } catch (...) {
      const bool is_awaited = sends() && n_started_ != 0;  // by a receiver that has the header
      fail(std::current_exception());
      if (is_awaited || is_a<GpuError>(error_)) stager_->tell_others(error_);
      return;
    }
    // The remaining copies are in the stream, so a consumer's stream can wait for this event instead of its host
    // thread. `in_` waits for the arrays' streams even if nothing was copied.
    if (n_handed_over_ == call_.parts.size() && call_.then == nullptr && !handed_over_) {
      if (!sends()) {  // else the array has been read, and nothing in the stream belongs to this operation
        make_wait(stager_->in_, waits_in_);
        end_ = stager_->events_->take();
        end_->record(stager_->in_.get());
      }
      handed_over_ = true;
    }
    if (n_finished_ == call_.parts.size() && handed_over_ && (end_ == nullptr || end_->is_complete())) ended_ = true;
  }

  void fail(std::exception_ptr error) {
    if (ended_) return;
    for (RemoteSegment& piece : pieces_) {
      if (piece.back && piece.part.out != nullptr) --stager_->n_copying_back_;
      // Pinned memory that a transport or a copy still uses must not return to the pool, where the next operation would
      // take it.
      if (!is_in_use(piece)) continue;
      stager_->retained_.push_back(std::make_shared<RemoteSegment>(std::move(piece)));
    }
    pieces_.clear();
    error_ = std::move(error);
    handed_over_ = true;
    ended_ = true;
  }

 private:
  struct RemoteSegment {
    StagedSegment part;
    std::shared_ptr<std::byte> memory;
    std::byte* out;
    std::shared_ptr<GpuEvent> copied = nullptr;  ///< its last copy; null: there was none
    Communicator::WorkPtr work = nullptr;
    bool awaits_stream = false;  ///< of a GPU-direct receive: its memory is still used for something else
    bool back = false;
  };

  void add_segments() {
    const auto more = std::exchange(call_.then, nullptr)();
    call_.parts.insert(call_.parts.end(), more.begin(), more.end());
    inputs_are_copied_ = false;
  }

  static bool is_copied(const RemoteSegment& piece) { return piece.copied == nullptr || piece.copied->is_complete(); }
  /// Whether the streams of the arrays have done what they had at the call.
  bool is_produced() {
    const auto is_done = [](const auto& event) { return event->is_complete(); };
    is_produced_ = is_produced_ || std::ranges::all_of(produced_, is_done);
    return is_produced_;
  }
  bool may_copy_more() const { return call_.copies_in_first || pieces_.size() < kInFlight; }

  /// Whether a transport or a copy may still use the memory of a segment.
  static bool is_in_use(const RemoteSegment& piece) noexcept {
    if (piece.work != nullptr && !piece.work->done()) return true;
    try {
      return !is_copied(piece);
    } catch (const Error&) {  // the device is lost
      return true;
    }
  }

  /// Lets later work in a stream of the package wait for those of the arrays, once.
  void make_wait(const GpuStream& stream, bool& waits) {
    for (const auto& event : produced_) {
      if (!waits) event->make_wait(stream.get());
    }
    waits = true;
  }

  void copy_out() {
    const StagedSegment& part = call_.parts[n_copied_];
    const std::size_t in_nbytes = total_nbytes(part.in_runs), out_nbytes = total_nbytes(part.out_runs);
    std::size_t nbytes = part.in_place ? std::max(in_nbytes, out_nbytes) : in_nbytes + out_nbytes;
    if (part.gpu_direct) nbytes = 0;
    RemoteSegment piece{part, stager_->pool_->take(nbytes), nullptr};
    piece.out = piece.memory.get() + (part.in_place ? 0 : in_nbytes);
    if (!part.gpu_direct && part.in != nullptr && in_nbytes != 0) {
      make_wait(stager_->out_, waits_out_);
      std::byte* to = piece.memory.get();
      for (const StagedRun& run : part.in_runs) {
        stager_->gpu_->copy(to, part.in + run.offset, run.nbytes, stager_->out_.get());
        to += run.nbytes;
      }
      piece.copied = stager_->events_->take();
      piece.copied->record(stager_->out_.get());
    }
    pieces_.push_back(std::move(piece));
    ++n_copied_;
  }

  /// Starts the segments that have been copied to the host. Of a collective the first one alone: if ranks differ, it
  /// fails before another one has started.
  bool may_start(RemoteSegment& piece, bool may_begin) {
    const bool first = n_started_ == 0;
    if (!may_begin || (!first && n_handed_over_ == 0 && !sends())) return false;
    // A GPU-direct receive starts at once, so that it gets the message that is due to it, whatever is posted later, and
    // can be cancelled. It writes later.
    piece.awaits_stream = piece.part.gpu_direct && is_message() && !sends();
    if (!piece.awaits_stream && !(piece.part.gpu_direct ? is_produced() : is_copied(piece))) return false;
    // Of all: the last segments of this rank may have no input, and so no copy to wait for.
    if (call_.copies_in_first && !inputs_are_copied_) {
      if (!std::ranges::all_of(pieces_, is_copied)) return false;
      inputs_are_copied_ = true;
    }
    // Some other thread may make this step, inside a call of its own: error texts must name the call that has started
    // the operation.
    const UserCall called(call_.called, UserCall::Inside::instead);
    piece.work = piece.part.start(piece.memory.get(), piece.out);
    last_started_ = piece.work;
    ++n_started_;
    return true;
  }

  /// What lies on the host once the operation has ended, and belongs on the device.
  std::span<const std::byte> to_copy_back(const RemoteSegment& piece) const {
    if (piece.part.gpu_direct) return piece.work->object();  // of a message that came with its header
    const auto& n_written = piece.part.n_written;
    return {piece.out, n_written != nullptr ? n_written(*piece.work) : total_nbytes(piece.part.out_runs)};
  }

  void copy_back(RemoteSegment& piece) {
    if (piece.part.out != nullptr) {
      if (stager_->n_copying_back_ >= kMostCopies) return;
      ++stager_->n_copying_back_;
    }
    std::span<const std::byte> arrived = to_copy_back(piece);
    if (piece.part.out != nullptr && !arrived.empty()) {
      make_wait(stager_->in_, waits_in_);
      for (const StagedRun& run : piece.part.out_runs) {
        // A receive may bring fewer elements than fit. Those beyond keep their values on the device.
        const std::size_t nbytes = std::min(run.nbytes, arrived.size());
        stager_->gpu_->copy(piece.part.out + run.offset, arrived.data(), nbytes, stager_->in_.get());
        arrived = arrived.subspan(nbytes);
      }
      if (piece.copied == nullptr) piece.copied = stager_->events_->take();
      piece.copied->record(stager_->in_.get());
    }
    piece.back = true;
    ++n_handed_over_;
  }

  void wait_for(const std::atomic<bool>& reached, const Deadline& deadline) {
    stager_->owner_.require(stager_->messages_->rank(), stager_->messages_->name());
    Backoff pause(/*oversubscribed=*/true);
    while (!reached) {
      stager_->progress();
      // About every millisecond: signals, other groups, dead peers and the deadline. Peers may wait for this rank in
      // another group while it waits here.
      if (reached || !pause.step()) continue;
      wait_hooks().interrupt();
      ProgressEngine::progress_everywhere();
      (is_message() ? stager_->messages_ : stager_->collectives_)->membership().check_peers();
      if (deadline.passed()) throw_late(deadline);
    }
    if (error_) std::rethrow_exception(error_);
  }

  /// Throws a TimeoutError that names the missing ranks.
  [[noreturn]] void throw_late(const Deadline& deadline) {
    Communicator::WorkPtr host_wait;
    bool is_this = true;
    // A thread that makes progress gives it back soon, unless it is blocked in a call of the runtime.
    std::unique_lock alone(stager_->mutex_, std::try_to_lock);
    for (int tries = 0; !alone && tries < 50; ++tries) {
      std::this_thread::sleep_for(Seconds(0.001));
      (void)alone.try_lock();
    }
    if (alone) {
      // This operation may wait behind an earlier one. The host operation of that one knows which ranks are missing.
      const StagedWork& first = stager_->next_to_begin(*this);
      is_this = &first == this;
      for (const RemoteSegment& piece : first.pieces_) {
        if (host_wait != nullptr || piece.work == nullptr || piece.awaits_stream) continue;
        if (!piece.work->done() || piece.work->error()) host_wait = piece.work;
      }
      alone.unlock();
    }
    // The deadline has passed, so this throws the error that it has ended with, or names the missing ranks.
    if (host_wait != nullptr) host_wait->wait(deadline);
    const Communicator& group = *(is_message() ? stager_->messages_ : stager_->collectives_);
    throw TimeoutError(str("rank ", group.rank(), ": an operation on device memory in group '", group.name(),
                           "' has waited ", deadline.timeout().count(),
                           " s for this rank's device, which has not finished the work queued before ",
                           is_this ? "it" : "an earlier operation"));
  }

  std::shared_ptr<HostStaging> stager_;
  StagedOperation call_;
  std::deque<RemoteSegment> pieces_;
  std::size_t n_copied_ = 0, n_started_ = 0, n_handed_over_ = 0, n_finished_ = 0;
  Communicator::WorkPtr last_started_;
  std::vector<std::shared_ptr<GpuEvent>> produced_;  // what the streams of the arrays had at the call
  bool is_produced_ = false;                         // all of it is done
  bool inputs_are_copied_ = false;                   // where all are copied first
  bool waits_out_ = false, waits_in_ = false;
  std::shared_ptr<GpuEvent> end_;
  Status status_;
  std::exception_ptr error_;
  // Both are stored last: they publish `end_`, `status_` and `error_` to threads that poll without the mutex.
  std::atomic<bool> handed_over_ = false;  // what remains of the work is in the stream
  std::atomic<bool> ended_ = false;
};

HostStaging::HostStaging(std::shared_ptr<GpuLibrary> gpu, int device, std::shared_ptr<Communicator> messages,
                         std::shared_ptr<Communicator> collectives)
    : gpu_(std::move(gpu)),
      device_(device),
      messages_(std::move(messages)),
      collectives_(std::move(collectives)),
      pool_(std::make_shared<BufferPool>(gpu_, device_, BufferPool::Kind::pinned, shared_by(collectives_))),
      events_(std::make_shared<EventPool>(gpu_, device_)),
      out_(gpu_, device_),
      in_(gpu_, device_) {}

std::shared_ptr<HostStaging> HostStaging::make(std::shared_ptr<GpuLibrary> gpu, int device,
                                               std::shared_ptr<Communicator> messages,
                                               std::shared_ptr<Communicator> collectives) {
  std::shared_ptr<HostStaging> made(
      new HostStaging(std::move(gpu), device, std::move(messages), std::move(collectives)));
  // Not in the constructor, where no shared pointer to the object exists yet.
  register_progress_source(made);
  return made;
}

std::shared_ptr<Work> HostStaging::start(StagedOperation call) {
  auto work = std::make_shared<StagedWork>(shared_from_this(), std::move(call));
  {
    // A receive starts here, also while another thread makes steps: what is posted next must not get its message.
    const std::lock_guard lock(mutex_);
    pending_.push_back(work);
    if (work->sends()) sends_are_pending_ = true;
    step();
  }
  return work;
}

void HostStaging::copy_local(std::byte* to, const std::byte* from, std::size_t nbytes) {
  if (to == from) return;
  const OnDevice on(*gpu_, device_);
  gpu_->copy(to, from, nbytes, in_.get());
}

void HostStaging::progress() {
  // Not waited for: a thread that makes a step may be in a call of the runtime that blocks, and deadlines hold also
  // then.
  const std::unique_lock alone(mutex_, std::try_to_lock);
  if (alone) step();
}

void HostStaging::advance() {
  if (!owner_.is_this()) return;
  // Called from waits for something else, which must not block: another thread makes the step.
  const std::unique_lock alone(mutex_, std::try_to_lock);
  if (!alone) return;
  try {
    step();
  } catch (const Error&) {  // such as that a capture forbids a call: the waits for these operations throw it
  }
}

void HostStaging::step() {
  if (const std::exception_ptr error = take_abandonment()) fail_all(error);
  if (pending_.empty()) return;
  try {
    const OnDevice on(*gpu_, device_);
    advance_all();
  } catch (const GpuError&) {  // the device is lost
    const std::exception_ptr error = std::current_exception();
    for (const auto& work : pending_) work->fail(error);
    tell_others(error);
  }
  std::erase_if(pending_, [](const auto& work) { return work->ended(); });
  sends_are_pending_ = std::ranges::any_of(pending_, [](const auto& work) { return work->sends(); });
}

bool HostStaging::has_unstarted_send(int dest, int tag) {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(pending_, [&](const auto& work) { return work->will_send(dest, tag); });
}

void HostStaging::advance_all() {
  bool collectives_started = true, sends_started = true, others_are_copied = true;
  std::size_t n_collectives = 0, n_sends = 0;  // whose copies to the host may be in the stream
  for (const auto& work : pending_) {
    std::size_t& n_copying = work->is_message() ? n_sends : n_collectives;
    const bool is_counted = !work->is_message() || work->sends();
    const bool may_copy =
        !is_counted || (n_copying < kMostCopies && (others_are_copied || work->may_copy_before_others()));
    // Collectives start in the order of the calls, which is the same on all ranks, and sends in theirs, so that
    // messages with one tag keep their order.
    work->advance(!work->is_message() ? collectives_started : work->sends() ? sends_started : true, may_copy);
    if (work->copies_out() && is_counted) ++n_copying;
    others_are_copied = others_are_copied && !work->has_more_to_copy();
    if (work->is_message()) {
      sends_started = sends_started && (!work->sends() || work->has_started());
    } else {
      collectives_started = collectives_started && work->has_started();
    }
  }
}

HostStaging::StagedWork& HostStaging::next_to_begin(StagedWork& work) {
  for (const auto& earlier : pending_) {
    if (earlier.get() == &work) break;
    const bool is_earlier =
        work.is_message() ? work.sends() && earlier->is_message() && earlier->sends() : !earlier->is_message();
    if (is_earlier && !earlier->has_started()) return *earlier;
  }
  return work;
}

void HostStaging::tell_others(const std::exception_ptr& error) {
  const std::string reason = text_of(error);
  collectives_->abandon(error, reason);
  messages_->abandon(error, reason);
}

void HostStaging::abandon(std::exception_ptr error) {
  {
    const std::lock_guard lock(abandonment_mutex_);
    abandonment_ = std::move(error);
  }
  // Else a call of the runtime blocks, and the thread that makes it ends the operations once it has returned.
  std::unique_lock alone(mutex_, std::defer_lock);
  Backoff pause(/*oversubscribed=*/true);
  for (const Deadline deadline = Deadline::after(kForTheRuntime); !alone.try_lock() && !deadline.passed();)
    pause.step();
  if (alone) step();
}

std::exception_ptr HostStaging::take_abandonment() {
  const std::lock_guard lock(abandonment_mutex_);
  return std::exchange(abandonment_, nullptr);
}

void HostStaging::fail_all(const std::exception_ptr& error) {
  for (const auto& work : pending_) work->fail(error);
  pending_.clear();
}

bool HostStaging::is_idle() noexcept {
  const std::unique_lock alone(mutex_, std::try_to_lock);
  if (!alone || in_end_ == nullptr) return false;
  try {
    return out_end_->is_complete() && in_end_->is_complete();
  } catch (const Error&) {  // the device is lost
    return false;
  }
}

void HostStaging::record_ends() {
  const std::lock_guard lock(mutex_);
  out_end_ = std::make_unique<GpuEvent>(gpu_, device_);
  out_end_->record(out_.get());
  auto in_end = std::make_unique<GpuEvent>(gpu_, device_);
  in_end->record(in_.get());
  in_end_ = std::move(in_end);
}

void HostStaging::release_retained() {
  try {
    record_ends();
  } catch (const Error&) {  // the device is lost: the destructor keeps the memory
    return;
  }
  wait_hooks().run_without_gil([this] {
    // The program continues after a bad step, and must not wait for a device that a kernel of its own holds up.
    const Deadline deadline = Deadline::after(Seconds(1));
    Backoff pause(/*oversubscribed=*/true);
    while (!is_idle() && !deadline.passed()) pause.step();
  });
  if (!is_idle()) return;                       // a stream of the caller holds the copies up
  std::vector<std::shared_ptr<void>> released;  // freed without the mutex: the last reference to a group may be there
  const std::lock_guard lock(mutex_);
  released.swap(retained_);
}

HostStaging::~HostStaging() {
  if (retained_.empty()) return;
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::vector<std::shared_ptr<void>>;  // for as long as the process lives
  const std::lock_guard lock(mutex);
  all.insert(all.end(), retained_.begin(), retained_.end());
}

bool HostStaging::idle() {
  progress();
  const std::unique_lock alone(mutex_, std::try_to_lock);
  return alone && pending_.empty();
}

}  // namespace samestep
