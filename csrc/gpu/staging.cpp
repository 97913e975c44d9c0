#include "gpu/staging.h"

#include <algorithm>
#include <utility>

#include "communicator/peer_memory.h"
#include "core/error.h"
#include "gpu/staged_work.h"
#include "waiting/await.h"

namespace samestep {

namespace {

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

std::shared_ptr<Work> HostStaging::start(StagedOperation call) {
  auto work = std::make_shared<StagedWork>(shared_from_this(), std::move(call));
  {
    // A receive starts here, also while another thread makes steps: what is posted next must not get its message.
    const std::lock_guard lock(mutex_);
    if (!std::exchange(is_registered_, true)) register_progress_source(weak_from_this());
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
  try {
    progress();
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
    fail_all(error);
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
  if (const std::unique_lock alone = lock_within(Seconds(1))) step();
}

std::unique_lock<std::mutex> HostStaging::lock_within(Seconds patience) {
  std::unique_lock alone(mutex_, std::defer_lock);
  await_until(Deadline::after(patience), [&alone] { return alone.try_lock(); });
  return alone;
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
  if (!alone || end_ == nullptr) return false;
  try {
    return end_->is_complete();
  } catch (const Error&) {  // the device is lost
    return false;
  }
}

void HostStaging::record_ends() {
  const std::lock_guard lock(mutex_);
  const auto out_end = events_->take();
  out_end->record(out_.get());
  out_end->make_wait(in_.get());
  auto end = std::make_unique<GpuEvent>(gpu_, device_);
  end->record(in_.get());
  end_ = std::move(end);
}

void HostStaging::release_retained() {
  try {
    record_ends();
  } catch (const Error&) {  // the device is lost: the destructor keeps the memory
    return;
  }
  wait_hooks().run_without_gil([this] {
    // The program continues after a bad step, and must not wait for a device that a kernel of its own holds up.
    await_until(Deadline::after(Seconds(1)), [this] { return is_idle(); });
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
