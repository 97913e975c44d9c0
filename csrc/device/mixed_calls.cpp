#include "device/mixed_calls.h"

#include <algorithm>
#include <utility>

#include "waiting/await.h"

namespace samestep {
namespace {

constexpr Seconds kPatience{0.5};   // most waits are shorter, and cost no message
constexpr Seconds kForOthers{5.0};  // who have learned of mixed calls, and look at nothing else

/// Whether each of two ranks has called what the other has not.
bool are_mixed(const MixedCalls::Counts& one, const MixedCalls::Counts& other) {
  bool ahead = false, behind = false;
  for (std::size_t path = 0; path < MixedCalls::kPaths; ++path) {
    if (one[path] == MixedCalls::kEnded || other[path] == MixedCalls::kEnded) continue;
    ahead |= one[path] > other[path];
    behind |= one[path] < other[path];
  }
  return ahead && behind;
}

}  // namespace

MixedCalls::MixedCalls(std::shared_ptr<Communicator> group)
    : group_(std::move(group)), of_ranks_(static_cast<std::size_t>(group_->size())) {}

MixedCalls::~MixedCalls() {
  for (const auto& work : exchange_) work->cancel();  // the receives, which write here
}

std::optional<MixedCalls::Found> MixedCalls::look(const Counts& now) {
  const auto time = std::chrono::steady_clock::now();
  // Counts that two looks have seen alike were all true at a time, although they are read one after the other.
  if (std::exchange(seen_, now) != now) since_ = time;
  if (exchange_.empty()) {
    if (time - since_ < kPatience || now == equal_) return std::nullopt;
    start_exchange(now);
  }
  if (!has_ended()) return std::nullopt;
  exchange_.clear();
  since_ = time;  // if the numbers are old, the next exchange tells more
  const Counts& mine = of_ranks_[static_cast<std::size_t>(group_->rank())];
  if (std::ranges::all_of(of_ranks_, [&](const Counts& other) { return other == mine; })) equal_ = mine;
  const bool mixed = std::ranges::any_of(of_ranks_, [this](const Counts& one) {
    return std::ranges::any_of(of_ranks_, [&](const Counts& other) { return are_mixed(one, other); });
  });
  if (!mixed) return std::nullopt;
  // What a rank does next ends the waits of others, who may look no more. So all have to know it before.
  start_exchange(now);
  const Deadline deadline = Deadline::after(kForOthers);
  await([&] { return has_ended() || deadline.passed(); }, [](Seconds) {});
  if (has_ended()) exchange_.clear();
  return found();
}

bool MixedCalls::has_ended() const {
  // An error says that the group ends: then this does not.
  return std::ranges::all_of(exchange_, [](const auto& work) { return work->done() && !work->error(); });
}

void MixedCalls::start_exchange(const Counts& mine) {
  const int me = group_->rank();
  of_ranks_[static_cast<std::size_t>(me)] = mine;
  for (int peer = 0; peer < group_->size(); ++peer) {
    if (peer == me) continue;
    const auto of = [this](int rank) {
      return Buffer{&of_ranks_[static_cast<std::size_t>(rank)], kPaths, DType::uint64};
    };
    exchange_.push_back(group_->recv(of(peer), peer, kTag));
    exchange_.push_back(group_->send(of(me), peer, kTag));
  }
}

MixedCalls::Found MixedCalls::found() const {
  constexpr std::array kTexts{"a call with arrays in host memory, or a barrier",
                              "a call with arrays in device memory, through the host",
                              "a call with arrays in device memory, through NCCL", "close"};
  Found all{.text = "another operation"};
  const Counts& mine = of_ranks_[static_cast<std::size_t>(group_->rank())];
  for (std::size_t path = 0; path < kPaths; ++path) {
    for (const Counts& counts : of_ranks_) {
      if (counts[path] == kEnded) continue;
      all.most[path] = std::max(all.most[path], counts[path]);
      if (mine[path] > counts[path] && mine[path] != kEnded) all.text = kTexts[path];
    }
  }
  return all;
}

}  // namespace samestep
