#include "gpu/staged_work.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "process/user_call.h"
#include "waiting/await.h"

namespace samestep {

HostStaging::StagedWork::StagedWork(std::shared_ptr<HostStaging> stager, StagedOperation call)
    : stager_(std::move(stager)), call_(std::move(call)) {
  produced_ = stager_->events_->record(call_.after);
}

bool HostStaging::StagedWork::done() {
  if (ended_) return true;
  stager_->owner_.require(stager_->messages_->rank(), stager_->messages_->name());
  stager_->progress();
  return ended_;
}

bool HostStaging::StagedWork::make_stream_wait(StreamHandle stream, const Deadline& deadline) {
  if (ended_ && error_) std::rethrow_exception(error_);
  // A wait for what is no part of the capture would end it. The graph is launched after the host's wait.
  if (stager_->gpu_->is_capturing(reinterpret_cast<GpuLibrary::Stream>(stream), stager_->device_)) return false;
  wait_for(handed_over_, deadline);
  if (end_ != nullptr) end_->make_wait(reinterpret_cast<GpuLibrary::Stream>(stream));
  return true;
}

bool HostStaging::StagedWork::cancel() {
  const std::lock_guard lock(stager_->mutex_);
  if (ended_ || last_started_ == nullptr || !last_started_->cancel()) return false;
  fail(last_started_->error());
  return true;
}

void HostStaging::StagedWork::advance(bool may_begin, bool may_copy) {
  if (ended_) return;
  try {
    if (n_handed_over_ == call_.parts.size() && call_.then != nullptr) add_segments();
    // An operation with copies in the stream may add more, whatever the limit says: it is among those that count.
    while ((copies_out() || may_copy) && may_copy_more() && n_copied_ < call_.parts.size()) copy_out();
    advance_segments(may_begin);
  } catch (...) {
    const bool is_awaited = sends() && n_started_ != 0;  // by a receiver that has the header
    fail(std::current_exception());
    if (is_awaited || is_a<GpuError>(error_)) stager_->tell_others(error_);
  }
  if (ended_) return;
  // The remaining copies are in the stream, so a consumer's stream can wait for this event instead of its host
  // thread. `in_` waits for the arrays' streams even if nothing was copied.
  if (are_all(n_handed_over_) && !handed_over_) {
    if (!sends()) {  // else the array has been read, and nothing in the stream belongs to this operation
      make_wait(stager_->in_, waits_in_);
      end_ = stager_->events_->take();
      end_->record(stager_->in_.get());
    }
    handed_over_ = true;
  }
  if (are_all(n_finished_) && (end_ == nullptr || end_->is_complete())) ended_ = true;
}

void HostStaging::StagedWork::advance_segments(bool may_begin) {
  bool all_before_are_back = true;
  for (RemoteSegment& piece : pieces_) {
    // In order: segments are operations of the host group, which all ranks must start in the same order.
    if (piece.work == nullptr && !may_start(piece, may_begin)) break;
    if (piece.awaits_stream && is_produced()) {
      piece.awaits_stream = false;
      piece.work->begin_writes();
    }
    if (!piece.back && piece.work->done()) {
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
}

void HostStaging::StagedWork::fail(std::exception_ptr error) {
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

void HostStaging::StagedWork::add_segments() {
  const auto more = std::exchange(call_.then, nullptr)();
  call_.parts.insert(call_.parts.end(), more.begin(), more.end());
  inputs_are_copied_ = false;
}

bool HostStaging::StagedWork::is_produced() {
  const auto is_done = [](const auto& event) { return event->is_complete(); };
  is_produced_ = is_produced_ || std::ranges::all_of(produced_, is_done);
  return is_produced_;
}

bool HostStaging::StagedWork::is_in_use(const RemoteSegment& piece) noexcept {
  if (piece.work != nullptr && !piece.work->done()) return true;
  try {
    return !is_copied(piece);
  } catch (const Error&) {  // the device is lost
    return true;
  }
}

void HostStaging::StagedWork::make_wait(const GpuStream& stream, bool& waits) {
  for (const auto& event : produced_) {
    if (!waits) event->make_wait(stream.get());
  }
  waits = true;
}

void HostStaging::StagedWork::copy_out() {
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

bool HostStaging::StagedWork::may_start(RemoteSegment& piece, bool may_begin) {
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

std::span<const std::byte> HostStaging::StagedWork::to_copy_back(const RemoteSegment& piece) const {
  if (piece.part.gpu_direct) return piece.work->object();  // of a message that came with its header
  const auto& n_written = piece.part.n_written;
  return {piece.out, n_written != nullptr ? n_written(*piece.work) : total_nbytes(piece.part.out_runs)};
}

void HostStaging::StagedWork::copy_back(RemoteSegment& piece) {
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

void HostStaging::StagedWork::wait_for(const std::atomic<bool>& reached, const Deadline& deadline) {
  stager_->owner_.require(stager_->messages_->rank(), stager_->messages_->name());
  const auto is_reached = [&] {
    if (!reached) stager_->progress();
    return reached.load();
  };
  await(is_reached, [&](Seconds) {
    (is_message() ? stager_->messages_ : stager_->collectives_)->membership().check_peers();
    if (deadline.passed()) throw_late(deadline);
  });
  if (error_) std::rethrow_exception(error_);
}

void HostStaging::StagedWork::throw_late(const Deadline& deadline) {
  Communicator::WorkPtr host_wait;
  bool is_this = true;
  // A thread that makes progress gives it back soon, unless it is blocked in a call of the runtime.
  if (const std::unique_lock alone = stager_->lock_within(Seconds(0.05))) {
    // This operation may wait behind an earlier one. The host operation of that one knows which ranks are missing.
    const StagedWork& first = stager_->next_to_begin(*this);
    is_this = &first == this;
    for (const RemoteSegment& piece : first.pieces_) {
      if (host_wait != nullptr || piece.work == nullptr || piece.awaits_stream) continue;
      if (!piece.work->done() || piece.work->error()) host_wait = piece.work;
    }
  }
  // The deadline has passed, so this throws the error that it has ended with, or names the missing ranks.
  if (host_wait != nullptr) host_wait->wait(deadline);
  const Communicator& group = *(is_message() ? stager_->messages_ : stager_->collectives_);
  const std::string& called = user_call();
  throw TimeoutError(str("rank ", group.rank(), ": ", called.empty() ? "an operation on device memory" : called,
                         " in group '", group.name(), "' has waited ", deadline.timeout().count(),
                         " s for this rank's device, which has not finished the work queued before ",
                         is_this ? "it" : "an earlier operation"));
}

}  // namespace samestep
