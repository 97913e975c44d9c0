#include "node/path_tuner.h"

#include <algorithm>
#include <bit>

namespace samestep {

double PathTuner::Times::shortest() const {
  // The shortest, because other work on the machine only makes times longer.
  const auto end = last.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(n, kTries));
  return *std::min_element(last.begin(), end);
}

PathTuner::Size& PathTuner::entry(std::size_t nbytes) { return sizes_[static_cast<int>(std::bit_width(nbytes))]; }

PathTuner::Path PathTuner::choose(std::size_t nbytes, std::span<const Path> open) {
  Size& size = entry(nbytes);
  // Not for ever: CMA may be unable to reach the buffers.
  if (size.is_due && size.n_repeats++ < kTries) return size.last_choice;
  const std::uint64_t n = size.n_chosen++;
  const auto times = [&](Path path) -> const Times& { return size.paths[static_cast<std::size_t>(path)]; };
  // Operations that are posted before earlier ones have completed find no times yet.
  const bool all_timed = std::ranges::all_of(open, [&](Path path) { return times(path).n != 0; });
  if (n < open.size() * kTries || !all_timed) return open[n % open.size()];
  const auto fastest = std::ranges::min_element(open, {}, [&](Path path) { return times(path).shortest(); });
  if (n % kExploreEvery != 0) return *fastest;
  // The others take turns: `turn` counts from 1, so that the fastest one is left out. With a single path callers do not
  // ask.
  const std::size_t turn = n / kExploreEvery % (open.size() - 1) + 1;
  return open[(static_cast<std::size_t>(fastest - open.begin()) + turn) % open.size()];
}

bool PathTuner::expects_stages(std::size_t nbytes) { return uses_stages(entry(nbytes).last_choice); }

bool PathTuner::needs_no_cma(std::size_t nbytes) {
  const Size& size = entry(nbytes);
  return size.n_recorded >= size.paths.size() * kTries && uses_stages(size.last_choice);
}

void PathTuner::record_choice(std::size_t nbytes, Path chosen, Path used) {
  Size& size = entry(nbytes);
  ++size.n_recorded;
  size.last_choice = chosen;
  size.is_due = chosen != used;
  if (!size.is_due) size.n_repeats = 0;
}

void PathTuner::record_time(std::size_t nbytes, Path path, double seconds) {
  if (seconds < 0) return;
  Times& times = entry(nbytes).paths[static_cast<std::size_t>(path)];
  times.last[times.n++ % kTries] = seconds;
}

}  // namespace samestep
