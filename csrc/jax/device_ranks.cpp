#include "jax/device_ranks.h"

#include <limits>

#include "core/error.h"
#include "core/format.h"

namespace samestep {
namespace {

constexpr Seconds kLeaving{2.0};  // for the others to end their programs too

}  // namespace

Communicator& DeviceGroup::get() const {
  // XLA ignores the result of MPI_Comm_split, so the failure is reported by every later call on the communicator.
  if (communicator == nullptr) throw UnavailableError(problem);
  return *communicator;
}

DeviceRanks::DeviceRanks(const RanksCapsule& ranks, Seconds timeout)
    : functions_(ranks), worlds_(ranks.ranks), timeout_(timeout), splits_(worlds_.size()), busy_(worlds_.size()) {}

std::size_t DeviceRanks::take_rank() {
  const std::lock_guard lock(mutex_);
  std::size_t best = worlds_.size();
  std::uint64_t fewest = std::numeric_limits<std::uint64_t>::max();
  for (std::size_t i = 0; i < worlds_.size(); ++i) {
    if (busy_[i] || splits_[i] >= fewest) continue;
    best = i;
    fewest = splits_[i];
  }
  if (best == worlds_.size()) {
    throw UnavailableError(str("JAX makes more than ", worlds_.size(), " communicators at once, but has only ",
                               worlds_.size(), " devices in this process"));
  }
  busy_[best] = true;
  ++splits_[best];
  return best;
}

std::shared_ptr<Communicator> DeviceRanks::split(int color, int key) {
  const std::size_t rank = take_rank();
  struct Return {
    DeviceRanks& ranks;
    std::size_t rank;
    ~Return() {
      const std::lock_guard lock(ranks.mutex_);
      ranks.busy_[rank] = false;
    }
  } const on_return{*this, rank};
  // Without the lock: this waits for other devices, perhaps of this process, which call this function, too.
  std::shared_ptr<Communicator> group = worlds_[rank]->split(color, key, Deadline::after(timeout_));
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& each) { return each.expired(); });  // a program may split at every step
  groups_.push_back(group);
  return group;
}

void DeviceRanks::leave_world(const std::string& reason) {
  const auto error = std::make_exception_ptr(UnavailableError(reason));
  for (const auto& world : worlds_) world->abandon(error, reason);
}

void DeviceRanks::wait(Communicator& group, const Communicator::WorkPtr& work) {
  if (work == nullptr) return;
  ++waits_started_;
  try {
    work->wait(Deadline::after(timeout_));
    ++waits_ended_;
  } catch (const std::exception& error) {
    ++waits_ended_;
    // XLA frees the arrays after an error, so the operation must not stay pending.
    if (!work->done()) group.abandon(std::current_exception(), error.what());
    throw;
  }
}

void DeviceRanks::meet_at_end() {
  // Each would wait for the others: first all say that they leave, then one wait serves all.
  std::vector<Communicator::WorkPtr> leaving;
  for (const auto& world : worlds_) leaving.push_back(((*world).*functions_.run)({CollectiveType::barrier}));
  const Deadline last = Deadline::after(timeout_);
  // While operations of this process start or are pending, its program is still running, and peers are merely late.
  // Only a process that is idle leaves after `kLeaving`.
  for (std::uint64_t seen = waits_started_; !last.passed();) {
    try {
      const Deadline deadline = Deadline::after(kLeaving);
      for (const auto& work : leaving) {
        if (work != nullptr) work->wait(deadline);
      }
      return;
    } catch (const TimeoutError&) {
      const std::uint64_t ended = waits_ended_, started = waits_started_;
      if (started == seen && started == ended) return;  // no wait of this process is pending
      seen = started;
    }
  }
}

void DeviceRanks::close() {
  try {
    meet_at_end();
  } catch (const std::exception&) {  // peers have gone: nobody is waited for
  }
  const std::string reason = "its JAX program has ended";
  const auto error = std::make_exception_ptr(NotInitializedError("the JAX program has ended"));
  const std::lock_guard lock(mutex_);
  // Abandoned, not closed: a close would wait for peers that may never end. The class of the error tells them that the
  // program has ended normally.
  for (const auto& world : worlds_) world->abandon(error, reason);
  for (const auto& group : groups_) {
    if (const auto alive = group.lock()) alive->abandon(error, reason);
  }
}

}  // namespace samestep
