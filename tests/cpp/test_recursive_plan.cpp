#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "collectives/recursive_plan.h"

using namespace samestep;

namespace {

/// A partial sum: of ranks [first, last), added in pairwise order of rank.
struct PartialSum {
  int first = 0, last = 0;
  bool operator==(const PartialSum&) const = default;
};

/// Two sums make a sum of the pairwise order only where they are the branches of a node of its tree: the ranks from a
/// multiple of a power of two up to the next one, or to the last rank.
bool are_branches(const PartialSum& a, const PartialSum& b, int n_ranks) {
  const int half = b.first - a.first;
  return a.last == b.first && (half & (half - 1)) == 0 && a.first % (2 * half) == 0 &&
         b.last == std::min(n_ranks, a.first + 2 * half);
}

/// All ranks of a plan in one thread. Messages wait in the order they were sent, by sender, receiver and kind.
struct Players {
  Players(int n, std::size_t count, bool scatter_first)
      : n_ranks(n), at(static_cast<std::size_t>(n)), clock(at.size()) {
    for (int rank = 0; rank < n; ++rank) {
      plans.emplace_back(n, rank, Range{0, count}, scatter_first);
      held.emplace_back(count, PartialSum{rank, rank + 1});
      has_result.emplace_back(count, false);
    }
  }

  using Key = std::tuple<int, int, bool>;

  void send(int rank, const RecursiveStep& step) {
    const bool results = step.use == RecursiveStep::Use::result;
    for (const auto& [peer, range] : step.out) {
      REQUIRE(range.count() != 0);
      REQUIRE(peer != rank);
      const auto& mine = held[static_cast<std::size_t>(rank)];
      auto& queue = messages[{rank, peer, results}];
      stamps[{rank, peer, results}] = clock[static_cast<std::size_t>(rank)];
      REQUIRE(sent[{rank, peer, results}]++ == 0);  // so that one tag serves
      queue.push_back({range,
                       {mine.begin() + static_cast<std::ptrdiff_t>(range.begin),
                        mine.begin() + static_cast<std::ptrdiff_t>(range.end)}});
      const auto& finished = has_result[static_cast<std::size_t>(rank)];
      const auto in_range = [&](std::size_t i) { return finished.begin() + static_cast<std::ptrdiff_t>(i); };
      if (results) REQUIRE(std::count(in_range(range.begin), in_range(range.end), false) == 0);
    }
  }

  bool receive(int rank, const RecursiveStep& step) {
    const bool results = step.use == RecursiveStep::Use::result;
    for (const auto& from : step.in) {
      if (messages[{from.peer, rank, results}].empty()) return false;
    }
    for (const auto& [peer, range] : step.in) {
      auto& queue = messages[{peer, rank, results}];
      REQUIRE(queue.front().first == range);
      take(rank, step, range, queue.front().second);
      queue.pop_front();
      int& now = clock[static_cast<std::size_t>(rank)];
      now = std::max(now, stamps[{peer, rank, results}] + 1);
    }
    return true;
  }

  void take(int rank, const RecursiveStep& step, Range range, const std::vector<PartialSum>& theirs) {
    const auto r = static_cast<std::size_t>(rank);
    bool in_order = true;
    for (std::size_t i = range.begin; i < range.end; ++i) {
      PartialSum& mine = held[r][i];
      const PartialSum& other = theirs[i - range.begin];
      if (step.use == RecursiveStep::Use::result) {
        in_order = in_order && !has_result[r][i];
        mine = other;
      } else {
        const PartialSum &a = step.use == RecursiveStep::Use::left ? other : mine,
                         &b = step.use == RecursiveStep::Use::left ? mine : other;
        in_order = in_order && are_branches(a, b, n_ranks);
        mine = {a.first, b.last};
      }
      if (step.use == RecursiveStep::Use::result || step.finishes) has_result[r][i] = true;
      in_order = in_order && has_result[r][i] == (mine == PartialSum{0, n_ranks});
    }
    REQUIRE(in_order);
  }

  /// Advances the ranks in turn, each by one step if it can, until none can.
  void play() {
    std::vector<bool> has_sent(plans.size());
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < n_ranks; ++rank) {
        const auto r = static_cast<std::size_t>(rank);
        if (at[r] == plans[r].steps().size()) continue;
        const RecursiveStep& step = plans[r].steps()[at[r]];
        if (!has_sent[r]) send(rank, step);
        has_sent[r] = true;
        if (!receive(rank, step)) continue;
        has_sent[r] = false;
        ++at[r];
        moved = true;
      }
    }
  }

  int n_ranks;
  std::vector<RecursivePlan> plans;
  std::vector<std::vector<PartialSum>> held;
  std::vector<std::vector<bool>> has_result;
  std::vector<std::size_t> at;  // the step of each rank
  std::vector<int> clock;       // messages that have followed one another
  std::map<Key, std::deque<std::pair<Range, std::vector<PartialSum>>>> messages;
  std::map<Key, int> sent;
  std::map<Key, int> stamps;  // of messages: the clock of the rank that sends
};

}  // namespace

TEST_CASE("recursive: played by 1 to 64 ranks in turns, every sum is in pairwise order and reaches all ranks") {
  for (int n_ranks = 1; n_ranks <= 64; ++n_ranks) {
    const auto n = static_cast<std::size_t>(n_ranks);
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, n - 1, n, n + 1, 16 * n + 5}) {
      for (const bool scatter_first : {true, false}) {
        CAPTURE(n_ranks);
        CAPTURE(count);
        CAPTURE(scatter_first);
        Players players(n_ranks, count, scatter_first);
        players.play();
        for (std::size_t rank = 0; rank < n; ++rank) {
          REQUIRE(players.at[rank] == players.plans[rank].steps().size());  // no rank waits forever
          if (n_ranks == 1) continue;
          const auto& held = players.held[rank];
          REQUIRE(std::count(held.begin(), held.end(), PartialSum{0, n_ranks}) == static_cast<std::ptrdiff_t>(count));
        }
        for (const auto& [key, left] : players.messages) REQUIRE(left.empty());
      }
    }
  }
}

TEST_CASE("recursive: as many messages as predicted, and no rank sends more than twice the buffer") {
  for (int n_ranks = 2; n_ranks <= 64; ++n_ranks) {
    const std::size_t count = 16 * 64 * 64;
    for (const bool scatter_first : {true, false}) {
      const RecursiveCost cost = recursive_cost(n_ranks, scatter_first);
      Players players(n_ranks, 2 * 64, scatter_first);
      players.play();
      CAPTURE(n_ranks);
      CAPTURE(scatter_first);
      REQUIRE(*std::max_element(players.clock.begin(), players.clock.end()) == cost.rounds);
      std::size_t most = 0;
      for (int rank = 0; rank < n_ranks; ++rank) {
        const RecursivePlan plan(n_ranks, rank, {0, count}, scatter_first);
        std::size_t messages = 0, elements = 0;
        for (const RecursiveStep& step : plan.steps()) {
          messages += step.out.size();
          for (const auto& to : step.out) elements += to.range.count();
        }
        most = std::max(most, messages);
        if (scatter_first) REQUIRE(elements <= 2 * count);
        REQUIRE(plan.room() <= (scatter_first ? count : count * plan.steps().size()));
      }
      REQUIRE(most == static_cast<std::size_t>(cost.messages));
    }
  }
  CHECK(recursive_cost(64, true).rounds == 12);
  CHECK(recursive_cost(64, false).messages == 6);
}
