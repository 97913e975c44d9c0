#include "node/way_choice.h"

#include <algorithm>
#include <bit>
#include <span>

namespace samestep {

double WayChoice::Times::shortest() const {
  const auto end = last.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(n, kTries));
  return *std::min_element(last.begin(), end);
}

WayChoice::Size& WayChoice::about(std::size_t nbytes) { return sizes_[static_cast<int>(std::bit_width(nbytes))]; }

WayChoice::Way WayChoice::next(std::size_t nbytes, std::size_t n_ways) {
  Size& size = about(nbytes);
  const std::uint64_t n = size.n_begun++;
  const auto ways = std::span(size.ways).first(n_ways);
  // Operations that are announced ahead of others have no times yet.
  const bool all_timed = std::ranges::all_of(ways, [](const Times& way) { return way.n != 0; });
  if (n < n_ways * kTries || !all_timed) return static_cast<Way>(n % n_ways);
  const auto fastest = std::ranges::min_element(ways, {}, &Times::shortest) - ways.begin();
  const auto turn = n / kOtherEvery % (n_ways - 1) + 1;
  const auto other = n % kOtherEvery == 0 ? turn : 0;
  return static_cast<Way>((static_cast<std::size_t>(fastest) + other) % n_ways);
}

void WayChoice::took(std::size_t nbytes, Way way, double seconds) {
  Times& times = about(nbytes).ways[static_cast<std::size_t>(way)];
  times.last[times.n++ % kTries] = seconds;
}

}  // namespace samestep
