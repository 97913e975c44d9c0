#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace samestep {

/// Algorithms of an allreduce whose elements are too many to travel with the headers.
enum class Algorithm : std::uint8_t {
  two_shot,  ///< each rank reduces a chunk that all others send it, and sends them the result (TwoShotReduction)
  recursive_halving,   ///< reduce-scatter by recursive halving, then allgather in the reverse order
                       ///< (RecursiveHalvingAllreduce)
  recursive_doubling,  ///< exchanges all elements with one partner after another
};

std::string_view name(Algorithm algorithm);
/// "two_shot", "recursive_halving" or "recursive_doubling"; nullopt for other texts.
std::optional<Algorithm> parse_algorithm(std::string_view text);

}  // namespace samestep
