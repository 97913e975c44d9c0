#include "node/way_choice.h"

#include <algorithm>
#include <bit>

namespace samestep {

double WayChoice::Times::shortest() const {
  const auto end = last.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(n, kTries));
  return *std::min_element(last.begin(), end);
}

WayChoice::Size& WayChoice::about(std::size_t nbytes) { return sizes_[static_cast<int>(std::bit_width(nbytes))]; }

WayChoice::Way WayChoice::next(std::size_t nbytes, std::span<const Way> open) {
  Size& size = about(nbytes);
  const std::uint64_t n = size.n_begun++;
  const auto times = [&](Way way) -> const Times& { return size.ways[static_cast<std::size_t>(way)]; };
  // Operations that are announced ahead of others have no times yet.
  const bool all_timed = std::ranges::all_of(open, [&](Way way) { return times(way).n != 0; });
  if (n < open.size() * kTries || !all_timed) return open[n % open.size()];
  const auto fastest = std::ranges::min_element(open, {}, [&](Way way) { return times(way).shortest(); });
  if (n % kOtherEvery != 0) return *fastest;
  const std::size_t turn = n / kOtherEvery % (open.size() - 1) + 1;
  return open[(static_cast<std::size_t>(fastest - open.begin()) + turn) % open.size()];
}

void WayChoice::took(std::size_t nbytes, Way way, double seconds) {
  if (seconds < 0) return;
  Times& times = about(nbytes).ways[static_cast<std::size_t>(way)];
  times.last[times.n++ % kTries] = seconds;
}

}  // namespace samestep
