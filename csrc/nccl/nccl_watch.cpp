#include <thread>

#include "core/error.h"
#include "core/format.h"
#include "nccl/nccl_operation.h"

// How a channel finds out that something has gone wrong.

namespace samestep {
namespace {

constexpr std::chrono::milliseconds kLookEvery{2};
constexpr Seconds kLookAtPeersAfter{0.05};  // an operation that takes longer may wait for one that has gone
constexpr Seconds kGrace{1.0};  // for the host to learn who has gone, when NCCL only knows that somebody has

}  // namespace

std::exception_ptr NcclChannel::lost_peer() {
  agreement_->look_for_losses();
  for (const Communicator::WorkPtr& receive : alive_) {
    if (!receive->done() || !receive->error()) continue;
    const std::string text = text_of(receive->error()), about_receive = "): ";
    const std::size_t cut = text.find(about_receive);
    const std::string who = cut == std::string::npos ? text : text.substr(cut + about_receive.size());
    return std::make_exception_ptr(PeerLostError(str("device operations of group '", host_->name(), "': ", who)));
  }
  return nullptr;
}

std::exception_ptr NcclChannel::cause_on_host() {
  for (const auto& operation : under_way_) {
    const bool differs = operation->agreement && operation->agreement->done() && operation->agreement->error();
    if (differs) return operation->agreement->error();
  }
  return lost_peer();
}

std::exception_ptr NcclChannel::late(const Operation& operation, const Deadline& deadline, const std::string& missing) {
  const std::string text = str(operation.what, " (device operation ", operation.sequence, " of group '", host_->name(),
                               "') has not ended after ", deadline.timeout().count(), " s: ");
  if (operation.agreement == nullptr) {
    return std::make_exception_ptr(TimeoutError(text + "the device has not finished it, or not all ranks have come"));
  }
  if (operation.agreement->done() && !operation.agreement->error()) {  // who waits for it may have given it up
    return std::make_exception_ptr(
        TimeoutError(text + "all ranks have started it, but the device has not finished it"));
  }
  return std::make_exception_ptr(TimeoutError(text + "not all ranks have come to it" + missing));
}

std::exception_ptr NcclChannel::trouble(Operation& operation, Clock::time_point now) {
  if (operation.ended || comm_ == nullptr) return operation.error;
  const bool agreed = operation.agreement == nullptr || operation.agreement->done();
  if (agreed && operation.agreement != nullptr && operation.agreement->error()) return operation.agreement->error();
  if (!operation.launched) return nullptr;  // who launches it looks at the rest
  if (agreed && operation.end->happened()) {
    if (const int state = further_.standing(comm_).state;
        state == nccl_abi::kSuccess || state == nccl_abi::kInProgress) {
      operation.finish(nullptr);
    }
    return nullptr;
  }
  if (operation.deadline.passed()) return late(operation, operation.deadline, "");
  if (now - operation.started < kLookAtPeersAfter) return nullptr;
  return lost_peer();
}

void NcclChannel::look() {
  std::unique_lock lock(mutex_);
  if (broken_ || comm_ == nullptr) return;
  const Clock::time_point now = Clock::now();
  try {
    const OnDevice on(gpu(), options_.device);
    if (const auto [state, comm] = further_.standing(comm_);
        state != nccl_abi::kSuccess && state != nccl_abi::kInProgress) {
      const std::string text = str("NCCL in group '", host_->name(), "': ", nccl().explain(state, comm));
      // NCCL only knows that something is wrong; the host soon knows what.
      std::exception_ptr cause = cause_on_host();
      for (const Deadline grace = Deadline::after(kGrace); !cause && !grace.passed(); cause = cause_on_host()) {
        lock.unlock();
        std::this_thread::sleep_for(kLookEvery);
        lock.lock();
        if (broken_ || comm_ == nullptr) return;
      }
      fail(cause ? cause : std::make_exception_ptr(Error(text)), /*tell=*/!cause || !is_mismatch(cause));
      return;
    }
    for (const auto& operation : under_way_) {
      if (const std::exception_ptr error = trouble(*operation, now)) {
        fail(error, /*tell=*/!is_mismatch(error));
        return;
      }
    }
  } catch (const Error&) {  // of the runtime: the device is lost
    fail(std::current_exception(), /*tell=*/true);
    return;
  }
  under_way_.remove_if([](const auto& operation) { return operation->ended.load(); });
}

void NcclChannel::watch() {
  stay_on(gpu(), options_.device);
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return ending_ || broken_ || !under_way_.empty(); });
      if (ending_ || broken_) break;
    }
    look();
    std::this_thread::sleep_for(kLookEvery);
  }
  const std::shared_ptr<NcclChannel> self = weak_from_this().lock();  // whoever is told may drop this channel
  std::function<void(const std::exception_ptr&)> tell;
  NcclLibrary::Comm comm = nullptr;
  std::list<std::shared_ptr<Operation>> ended;
  std::unique_lock lock(mutex_);
  if (!broken_) return;
  if (is_mismatch(broken_)) std::swap(tell, when_ranks_differ_);
  if (tell && self != nullptr) {
    const std::exception_ptr error = broken_;
    lock.unlock();
    tell(error);
    lock.lock();
  }
  end_operations();
  std::swap(comm, comm_);
  std::swap(ended, under_way_);
  lock.unlock();
  further_.abort(comm);
  for (const auto& operation : ended) operation->memory.clear();  // only now does the device use it no more
}

}  // namespace samestep
