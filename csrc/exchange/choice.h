#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace samestep {

/// How the elements of an allreduce meet that are too many to travel with the headers.
enum class Way : std::uint8_t {
  direct,    ///< each rank owns a part, which all others send it; it sends them the result (Windows)
  halving,   ///< halves are exchanged with one partner after the other, and the results backwards (Halving)
  doubling,  ///< everything is exchanged with one partner after the other
};

std::string_view name(Way way);
/// "direct", "halving" or "doubling"; nothing for other texts.
std::optional<Way> way_called(std::string_view text);

/// Seconds that a rank waits for an allreduce of `nbytes` among `n_ranks` hosts, each with a network card of its own,
/// by the formulas and for a network of the kind that docs/scaling.md describes.
double cost(Way way, int n_ranks, std::size_t nbytes);

/// The cheapest way. Pure: the same on all ranks.
Way cheapest_way(int n_ranks, std::size_t nbytes);

}  // namespace samestep
