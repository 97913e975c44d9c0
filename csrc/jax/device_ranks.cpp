#include "jax/device_ranks.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/format.h"

namespace samestep {
namespace {

constexpr Seconds kLeaving{2.0};   // for the others to end their programs too
constexpr int kProcessShift = 11;  // of JAX's device ids on CPU: (process << 11) + number within the process

}  // namespace

Communicator& DeviceGroup::get() const {
  // XLA ignores the result of MPI_Comm_split, so the failure is reported by every later call on the communicator.
  if (communicator == nullptr) throw UnavailableError(problem);
  return *communicator;
}

int DeviceLayout::rank_of(DeviceId device) const {
  const int owner = device >> kProcessShift, number = device & ((1 << kProcessShift) - 1);
  if (owner < 0 || owner >= static_cast<int>(counts.size())) return -1;
  if (number >= counts[static_cast<std::size_t>(owner)]) return -1;
  return std::accumulate(counts.begin(), counts.begin() + owner, 0) + number;
}

int DeviceLayout::local_number(DeviceId device) const {
  if (rank_of(device) < 0 || device >> kProcessShift != process) return -1;
  return device & ((1 << kProcessShift) - 1);
}

DeviceRanks::DeviceRanks(const RanksCapsule& ranks, DeviceLayout layout, Seconds timeout)
    : functions_(ranks),
      worlds_(ranks.ranks),
      layout_(std::move(layout)),
      timeout_(timeout),
      splits_(worlds_.size()),
      busy_(worlds_.size()) {}

std::shared_ptr<Communicator> DeviceRanks::split(int color, int key, const void* caller) {
  std::shared_ptr<Communicator> group = split_by_color(color, key, caller);
  // Not while the group is made: that waits for other devices, perhaps of this process, which call this function, too.
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& each) { return each.expired(); });  // a program may split at every step
  groups_.push_back(group);
  return group;
}

std::shared_ptr<Communicator> DeviceRanks::split_by_color(int color, int key, const void* caller) {
  const auto index = static_cast<std::size_t>(key);
  // The words on the stack are a guess. A list counts only if it fits what XLA passes: the first device is the color,
  // and the device at the caller's rank belongs to this process.
  const DeviceIds devices = find_clique(caller, [&](const DeviceIds& ids) {
    const auto is_device = [&](DeviceId id) { return layout_.rank_of(id) >= 0; };
    return ids.front() == color && index < ids.size() && layout_.local_number(ids[index]) >= 0 &&
           std::all_of(ids.begin(), ids.end(), is_device) &&
           std::set<DeviceId>(ids.begin(), ids.end()).size() == ids.size();
  });
  // Then the other members are unknown, and only a split of the whole world, in which all processes take part, can find
  // them.
  if (devices.empty()) return split_as_mpi(color, key);
  std::vector<int> members;
  std::string list;
  for (const DeviceId device : devices) {
    members.push_back(layout_.rank_of(device));
    list += str(list.empty() ? "" : ",", device);
  }
  Communicator& world = *worlds_[static_cast<std::size_t>(layout_.local_number(devices[index]))];
  // The members compare the list, so one that was misread ends in an error instead of a wrong group.
  return world.group(members, Deadline::after(timeout_), str("jax devices ", list));
}

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

/// XLA makes a communicator for each device by a call of its own, from any thread, and does not say for which device.
/// So each call uses the rank that has made the fewest groups: all devices of a program make their groups in the same
/// order, and which of a process's ranks stands for which device in one group is of no importance.
std::shared_ptr<Communicator> DeviceRanks::split_as_mpi(int color, int key) {
  const std::size_t rank = take_rank();
  struct Return {
    DeviceRanks& ranks;
    std::size_t rank;
    ~Return() {
      const std::lock_guard lock(ranks.mutex_);
      ranks.busy_[rank] = false;
    }
  } const on_return{*this, rank};
  return worlds_[rank]->split(color, key, Deadline::after(timeout_));
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
