#include "engine/algorithm.h"

#include <algorithm>
#include <array>

namespace samestep {
namespace {

// In the order of the enumerators: `parse_algorithm` turns an index into an Algorithm. Users write these names in
// SAMESTEP_ALGORITHM.
constexpr std::array kNames = {std::string_view("two_shot"), std::string_view("recursive_halving"),
                               std::string_view("recursive_doubling")};

}  // namespace

std::string_view name(Algorithm algorithm) { return kNames[static_cast<std::size_t>(algorithm)]; }

std::optional<Algorithm> parse_algorithm(std::string_view text) {
  const auto* const found = std::find(kNames.begin(), kNames.end(), text);
  if (found == kNames.end()) return std::nullopt;
  return static_cast<Algorithm>(found - kNames.begin());
}

}  // namespace samestep
