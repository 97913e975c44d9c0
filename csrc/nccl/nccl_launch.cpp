#include <array>
#include <cstring>

#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "engine/progress_engine.h"
#include "nccl/nccl_operation.h"
#include "waiting/backoff.h"

// How NCCL starts, and how operations begin.

namespace samestep {
namespace {

constexpr std::chrono::seconds kLaunchersStay{1};  // after the last launch that had to wait for other ranks
constexpr std::size_t kMostConnected = 4096;       // lengths that change with every call shall not fill the memory

}  // namespace

struct NcclComm::Invitation {
  nccl_abi::UniqueId id;
  std::array<char, 384> failed{};  // why there is no id; empty if there is one
};

void NcclComm::prepare() {
  std::call_once(prepared_, [this] { exchange_address(); });
}

void NcclComm::exchange_address() {
  {
    const std::lock_guard lock(mutex_);
    throw_if_broken();
  }
  // Rank 0 sends one in any case. Without the text the others would wait for an address until their deadline.
  auto invitation = std::make_shared<Invitation>();
  if (host_->rank() == 0) {
    try {
      wait_hooks().run_without_gil([&] { invitation->id = nccl().unique_id(); });
    } catch (const Error& error) {
      std::strncpy(invitation->failed.data(), error.what(), invitation->failed.size() - 1);
    }
  }
  // Nothing is ever sent to these receives. The host group fails them when a peer is lost, which NCCL may never notice.
  std::vector<Communicator::WorkPtr> receives;
  for (int peer = 0; peer < host_->size(); ++peer) {
    if (peer != host_->rank()) receives.push_back(signature_check_->recv({&unused_byte_, 1, DType::uint8}, peer, 0));
  }
  const Buffer sent{invitation.get(), sizeof *invitation, DType::uint8};
  auto exchange = signature_check_->start(
      {.type = CollectiveType::bcast, .out = sent, .root = 0, .shape = Shape::flat(sent.count)});
  const std::lock_guard lock(mutex_);
  liveness_receives_ = std::move(receives);
  invitation_ = std::move(invitation);
  address_ = std::move(exchange);
  has_watcher_ = true;
  watcher_ = std::thread([this] { watch(); });
}

nccl_abi::UniqueId NcclComm::address(const Deadline& deadline) {
  Backoff pause(/*oversubscribed=*/true);
  while (!address_->done()) {
    if (!pause.step()) continue;
    // About every millisecond: signals, and progress for peers that wait for this rank in other groups.
    wait_hooks().interrupt();
    ProgressEngine::progress_everywhere();
    const std::lock_guard look(mutex_);
    throw_if_broken();
    if (deadline.passed()) break;
  }
  address_->wait(deadline);  // throws its error, or says who is missing
  if (invitation_->failed[0] != '\0') throw Error(str("NCCL does not start on rank 0: ", invitation_->failed.data()));
  return invitation_->id;
}

void NcclComm::start_nccl(const Deadline& deadline) {
  {
    const std::lock_guard lock(mutex_);
    throw_if_broken();
    starting_ = true;
  }
  std::exception_ptr error;
  try {
    const OnDevice on(gpu(), options_.device);
    members_->init(host_->size(), address(deadline), host_->rank());
    wait_until_ready("start NCCL", deadline);
    members_->split(host_->rank());
    wait_until_ready("start NCCL", deadline);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  starting_ = false;
  started_ = error == nullptr;
  calls_block_ = members_->has_parents();
  changed_.notify_all();
  if (error) std::rethrow_exception(error);
}

void NcclComm::wait_until_ready(const std::string& act, const Deadline& deadline) {
  Backoff pause(/*oversubscribed=*/true);
  while (true) {
    const bool long_since = pause.step();
    if (long_since) wait_hooks().interrupt();
    // For one look at a time: between looks other threads may end this communicator.
    const std::lock_guard look(mutex_);
    throw_if_broken();
    if (is_ready(act)) return;
    if (!long_since) continue;
    if (const std::exception_ptr lost = lost_peer()) std::rethrow_exception(lost);
    if (deadline.passed()) {
      throw TimeoutError(str(act, " in group '", host_->name(), "': NCCL has not come to an end after ",
                             deadline.timeout().count(), " s, on this or another rank"));
    }
  }
}

bool NcclComm::is_ready(const std::string& act) {
  const auto [state, comm] = members_->state();
  if (state == nccl_abi::kSuccess || state == nccl_abi::kInProgress) return state == nccl_abi::kSuccess;
  // NCCL reports only that something has failed. What the host knows names the rank or the mismatch.
  if (const std::exception_ptr cause = host_cause()) std::rethrow_exception(cause);
  throw Error(str(act, " in group '", host_->name(), "': ", nccl().explain(state, comm)));
}

void NcclComm::watch_from_now(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  throw_if_broken();
  operation->sequence = sequence_++;
  while (!pending_.empty() && pending_.front()->ended) pending_.pop_front();
  pending_.push_back(operation);
  if (pending_.size() == 1) changed_.notify_all();
}

bool NcclComm::enroll(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  throw_if_broken();
  // Only a call whose connections exist returns before the other ranks come. It must not overtake those in the queue:
  // NCCL pairs the calls of ranks by their order.
  const bool waits_for_nobody = host_->size() == 1 || connected_.contains(operation->calls.connections);
  if (started_ && waits_for_nobody && !launching_ && queue_.empty()) return launching_ = true;
  queue_.push_back(operation);
  wake_launcher();
  return false;
}

void NcclComm::wake_launcher() {
  changed_.notify_all();
  if (has_launcher_) return;
  has_launcher_ = true;
  std::thread([self = shared_from_this()] { self->launch_queued(); }).detach();
}

void NcclComm::launch_queued() {
  bind_thread_to_device(gpu(), options_.device);
  std::unique_lock lock(mutex_);
  const auto stop_waiting = [this] { return broken_ || ending_ || (!queue_.empty() && !launching_); };
  while (!broken_) {
    if (!started_ && !queue_.empty()) {
      const Deadline deadline = queue_.front()->deadline;
      lock.unlock();
      try {
        start_nccl(deadline);
      } catch (const Error&) {
        const std::lock_guard failed(mutex_);
        fail(std::current_exception(), /*tell=*/!is_mismatch(std::current_exception()));
      }
      lock.lock();
      continue;
    }
    changed_.wait_for(lock, kLaunchersStay, stop_waiting);
    if (broken_ || queue_.empty()) break;
    if (launching_) continue;
    // It stays in the queue until it has been made, so that no caller launches before it.
    const std::shared_ptr<Operation> next = queue_.front();
    launching_ = true;
    lock.unlock();
    enqueue(*next);
    lock.lock();
    if (!queue_.empty()) queue_.pop_front();
  }
  has_launcher_ = false;
}

void NcclComm::enqueue(Operation& operation) {
  std::exception_ptr error;
  try {
    make_calls(operation);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  launching_ = false;
  if (error == nullptr) {
    if (connected_.size() >= kMostConnected) connected_.clear();
    connected_.insert(operation.calls.connections);
    operation.launched = true;
  } else if (!broken_) {  // other ranks may have started it
    if (const std::exception_ptr cause = host_cause()) error = cause;
    fail(error, /*tell=*/!is_mismatch(error));
  }
  operation.calls.enqueue = nullptr;
  if (broken_ || ending_ || !queue_.empty()) changed_.notify_all();
}

void NcclComm::make_calls(Operation& operation) {
  const NcclMembers::Member& first = members_->first();
  const OnDevice on(gpu(), first.device);
  for (std::size_t i = 0; i < operation.after.size(); ++i) {
    const NcclMembers::Member& member = members_->all()[i];
    const OnDevice there(gpu(), member.device);
    for (const std::shared_ptr<GpuEvent>& produced : operation.after[i]) produced->make_wait(member.stream->get());
  }
  operation.after.clear();  // the events can be used again
  operation.calls.enqueue(first.comm, first.stream->get());
  if (!calls_block_) wait_until_ready(operation.what, operation.deadline);
  // The first stream waits for the others, so that one event shows the end of all members.
  members_->join_streams();
  operation.end = first.events->take();
  operation.end->record(first.stream->get());
}

}  // namespace samestep
