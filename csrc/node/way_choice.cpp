#include "node/way_choice.h"

#include <algorithm>
#include <bit>

namespace samestep {

double WayChoice::Times::shortest() const {
  const auto end = last.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(n, kTries));
  return *std::min_element(last.begin(), end);
}

WayChoice::Kind& WayChoice::kind(Verb verb, std::size_t nbytes) {
  const std::size_t row = verb == Verb::all_reduce ? 0 : verb == Verb::reduce ? 1 : 2;
  return kinds_[row][static_cast<std::size_t>(std::bit_width(nbytes)) % 64];
}

WayChoice::Way WayChoice::next(Verb verb, std::size_t nbytes) {
  Kind& kind = this->kind(verb, nbytes);
  const std::uint64_t n = kind.n_begun++;
  const Times &direct = kind.ways[0], &staged = kind.ways[1];
  // Operations that are announced ahead of others have no times yet.
  if (n < 2 * kTries || direct.n == 0 || staged.n == 0) return n % 2 == 0 ? Way::direct : Way::staged;
  const bool other = n % kOtherEvery == 0;
  return (staged.shortest() < direct.shortest()) != other ? Way::staged : Way::direct;
}

void WayChoice::took(Verb verb, std::size_t nbytes, Way way, double seconds) {
  Times& times = kind(verb, nbytes).ways[static_cast<std::size_t>(way)];
  times.last[times.n++ % kTries] = seconds;
}

}  // namespace samestep
