#include "exchange/choice.h"

#include <algorithm>
#include <array>

#include "exchange/halving.h"
#include "exchange/halving_plan.h"
#include "exchange/windows.h"

namespace samestep {
namespace {

// benchmarks/cost_model.py has the same formulas and the same prices, and says what they mean; tests compare the two.
constexpr double kLatency = 15e-6;     // s, of a message, without the processor time at its ends
constexpr double kMessage = 5e-6;      // s of the processor, at each end
constexpr double kCopy = 0.22e-9;      // s of the processor for a byte, at each end
constexpr double kBandwidth = 1.19e9;  // bytes/s of the card: 10 Gbit/s
constexpr double kReduce = 0.0133e-9;  // s for a byte that is read to be reduced

constexpr std::array kNames = {std::string_view("direct"), std::string_view("halving"), std::string_view("doubling")};

double divide_up(double a, double b) {
  const auto whole = static_cast<std::size_t>(a / b);
  return std::max(1.0, static_cast<double>(whole) + (static_cast<double>(whole) * b < a ? 1.0 : 0.0));
}

}  // namespace

std::string_view name(Way way) { return kNames[static_cast<std::size_t>(way)]; }

std::optional<Way> way_called(std::string_view text) {
  const auto* const found = std::find(kNames.begin(), kNames.end(), text);
  if (found == kNames.end()) return std::nullopt;
  return static_cast<Way>(found - kNames.begin());
}

double cost(Way way, int n_ranks, std::size_t nbytes) {
  const double n = n_ranks, size = static_cast<double>(nbytes);
  const HalvingCost steps = halving_cost(n_ranks, way == Way::halving);
  double rounds = steps.rounds, messages = steps.messages, bytes = 2 * (n - 1) / n * size, reduced = bytes;
  if (way == Way::direct) {
    rounds = 2;
    messages = 2 * (n - 1) * divide_up(size, static_cast<double>(Windows::piece_nbytes(n_ranks)) * n);
    reduced = size;
  } else if (way == Way::halving) {
    messages *= divide_up(size, static_cast<double>(Halving::window_nbytes(n_ranks, 0)));
  } else {
    bytes = messages * size;
    reduced = 2 * bytes;
  }
  const double busy = 2 * messages * kMessage + 2 * bytes * kCopy + reduced * kReduce, card = bytes / kBandwidth;
  // In windows the processor works beside the card; what is exchanged as a whole waits for one and then the other.
  return rounds * kLatency + (way == Way::doubling ? busy + card : std::max(busy, card));
}

Way cheapest_way(int n_ranks, std::size_t nbytes) {
  if (n_ranks < 2) return Way::direct;
  const auto by_cost = [&](Way a, Way b) { return cost(a, n_ranks, nbytes) < cost(b, n_ranks, nbytes); };
  return std::min({Way::direct, Way::halving, Way::doubling}, by_cost);
}

}  // namespace samestep
