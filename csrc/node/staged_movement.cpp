#include "node/staged_movement.h"

#include <algorithm>
#include <bit>

#include "kernels/stream.h"

namespace samestep {
namespace {

constexpr std::size_t kLine = 64;
constexpr int kStepsAtOnce = 128;  // then others may have their turn
constexpr std::size_t whole_lines(std::size_t nbytes) { return nbytes / kLine * kLine; }

}  // namespace

StagedMovement::StagedMovement(NodeGroup& group, std::uint64_t sequence, Verb verb, std::size_t nbytes,
                               bool past_caches)
    : group_(group),
      sequence_(sequence),
      nbytes_(nbytes),
      alike_(verb == Verb::broadcast || verb == Verb::all_gather),
      several_receive_(several_receive(verb, group.arena->size())),
      past_caches_(past_caches),
      exchanges_(group.arena->size() == 2 && (verb == Verb::all_gather || verb == Verb::all_to_all)) {
  if (!alike_ && verb != Verb::gather) n_lanes_ = static_cast<std::size_t>(std::max(group.arena->size() - 1, 1));
  exchanges_ ? plan_exchange() : plan_windows();
}

void StagedMovement::plan_windows() {
  constexpr std::size_t kLeast = 16 << 10, kMost = 64 << 10, kWindows = 8;
  lane_nbytes_ = whole_lines(Arena::kStages * Arena::kStageBytes / n_lanes_);
  const std::size_t wanted = std::clamp(std::bit_ceil(nbytes_ / kWindows), kLeast, kMost);
  window_nbytes_ = std::min(wanted, whole_lines(lane_nbytes_ / 2));
  depth_ = lane_nbytes_ / window_nbytes_;
  n_windows_ = (nbytes_ + window_nbytes_ - 1) / window_nbytes_;
}

/// An even number of windows: then who stages the first one of the next operation has read those lines last.
void StagedMovement::plan_exchange() {
  constexpr std::size_t kMost = 64 << 10;
  n_windows_ = (nbytes_ + 2 * kMost - 1) / (2 * kMost) * 2;
  window_nbytes_ = whole_lines(nbytes_ / n_windows_ + kLine);
  n_windows_ = (nbytes_ + window_nbytes_ - 1) / window_nbytes_;
}

bool StagedMovement::carries(Verb verb, int size) {
  const bool even = verb == Verb::broadcast || verb == Verb::all_gather || verb == Verb::gather ||
                    verb == Verb::scatter || verb == Verb::all_to_all;
  return even && size <= Crossings::kMostStaged;
}

bool StagedMovement::several_receive(Verb verb, int size) {
  return size > 2 && (verb == Verb::broadcast || verb == Verb::all_gather);
}

void StagedMovement::send(int peer, const std::byte* from) { outgoing_.push_back({peer, from}); }

void StagedMovement::receive(int peer, std::byte* into, bool first_is_staged) {
  incoming_.push_back({peer, into, first_is_staged});
}

std::byte* StagedMovement::staged(int sender, int receiver, std::size_t window) const {
  if (exchanges_) return group_.arena->stage((sender + static_cast<int>(window % 2)) % 2, 0);
  const int size = group_.arena->size();
  const auto lane = n_lanes_ == 1 ? 0 : static_cast<std::size_t>((receiver - sender - 1 + size) % size);
  return group_.arena->stage(sender, 0) + lane * lane_nbytes_ + window % depth_ * window_nbytes_;
}

std::size_t StagedMovement::length(std::size_t window) const {
  return std::min(window_nbytes_, nbytes_ - window * window_nbytes_);
}

bool StagedMovement::may_step() const {
  const Arena& arena = *group_.arena;
  for (const Outgoing& run : outgoing_) {
    // Where ranks exchange, both write to both stages; else the window that lay there was taken so many steps before.
    const std::uint64_t taken = exchanges_ ? step_ : step_ < depth_ ? 0 : step_ - depth_ + 2;
    const bool ahead = taken == 0 || step_ == n_windows_ || (exchanges_ && !incoming_.empty());
    if (!ahead && !arena.is_at(sequence_, run.peer, taken)) return false;
  }
  for (const Incoming& run : incoming_) {
    const bool ahead = step_ == 0 || (step_ == 1 && run.first_is_staged);
    if (!ahead && !arena.is_at(sequence_, run.peer, step_)) return false;
  }
  return true;
}

bool StagedMovement::work() {
  for (int turn = 0; step_ <= n_windows_; ++turn) {
    if (turn == kStepsAtOnce || !may_step()) return false;
    if (exchanges_ && step_ > 0) {
      exchange(step_);
    } else {
      if (step_ > 0) copy_out(step_ - 1);
      if (step_ < n_windows_ && !(step_ == 0 && first_is_staged_)) copy_in(step_);
    }
    group_.arena->set_step(sequence_, group_.rank, ++step_);
  }
  return true;
}

void StagedMovement::copy_in(std::size_t window) const {
  const auto copy = several_receive_ && past_caches_ ? &kernels::copy_past_caches : &kernels::copy_lines;
  for (const Outgoing& run : outgoing_) {
    copy(staged(group_.rank, run.peer, window), run.from + window * window_nbytes_, length(window));
    if (alike_) return;
  }
}

void StagedMovement::copy_out(std::size_t window) const {
  for (const Incoming& run : incoming_) {
    std::byte* const from = staged(run.peer, group_.rank, window);
    std::byte* const into = run.into + window * window_nbytes_;
    several_receive_ ? kernels::copy_lines(into, from, length(window))
                     : kernels::take_lines(into, from, length(window));
  }
}

/// The peer's window of the step before and this rank's window of this step take the same place.
void StagedMovement::exchange(std::size_t step) const {
  constexpr std::size_t kAtOnce = 4 << 10;  // in the nearest cache
  const bool comes = !incoming_.empty(), goes = !outgoing_.empty() && step < n_windows_;
  std::byte* const lines = staged(group_.rank, group_.rank, step);
  std::byte* const into = comes ? incoming_.front().into + (step - 1) * window_nbytes_ : nullptr;
  const std::byte* const from = goes ? outgoing_.front().from + step * window_nbytes_ : nullptr;
  const std::size_t n_in = comes ? length(step - 1) : 0, n_out = goes ? length(step) : 0;
  for (std::size_t at = 0; at < std::max(n_in, n_out); at += kAtOnce) {
    if (at < n_in) kernels::copy_lines(into + at, lines + at, std::min(kAtOnce, n_in - at));
    if (at < n_out) kernels::copy_lines(lines + at, from + at, std::min(kAtOnce, n_out - at));
  }
}

}  // namespace samestep
