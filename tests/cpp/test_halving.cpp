#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <tuple>

#include "core/error.h"
#include "exchange/exchange_communicator.h"
#include "exchange/halving.h"
#include "exchange/halving_plan.h"
#include "kernels/reduce.h"
#include "local_network.h"
#include "uneven.h"

using namespace samestep;

namespace {

Deadline soon() { return Deadline::after(Seconds(60)); }

/// The terms of a sum that has begun: those of ranks [first, last), added in pairwise order of rank.
struct Terms {
  int first = 0, last = 0;
  bool operator==(const Terms&) const = default;
};

/// Two sums make a sum of the pairwise order only where they are the branches of a node of its tree: the ranks from a
/// multiple of a power of two up to the next one, or to the last rank.
bool are_branches(const Terms& a, const Terms& b, int n_ranks) {
  const int half = b.first - a.first;
  return a.last == b.first && (half & (half - 1)) == 0 && a.first % (2 * half) == 0 &&
         b.last == std::min(n_ranks, a.first + 2 * half);
}

/// All ranks of a plan in one thread. Messages wait in the order they were sent, by sender, receiver and kind.
struct Players {
  Players(int n, std::size_t count, bool halves) : n_ranks(n), at(static_cast<std::size_t>(n)), clock(at.size()) {
    for (int rank = 0; rank < n; ++rank) {
      plans.emplace_back(n, rank, Range{0, count}, halves);
      held.emplace_back(count, Terms{rank, rank + 1});
      has_result.emplace_back(count, false);
    }
  }

  using Key = std::tuple<int, int, bool>;

  void send(int rank, const HalvingStep& step) {
    const bool results = step.use == HalvingStep::Use::result;
    for (const auto& [peer, range] : step.out) {
      REQUIRE(range.count() != 0);
      REQUIRE(peer != rank);
      const auto& mine = held[static_cast<std::size_t>(rank)];
      auto& way = messages[{rank, peer, results}];
      stamps[{rank, peer, results}] = clock[static_cast<std::size_t>(rank)];
      REQUIRE(sent[{rank, peer, results}]++ == 0);  // so that one tag serves
      way.push_back({range,
                     {mine.begin() + static_cast<std::ptrdiff_t>(range.begin),
                      mine.begin() + static_cast<std::ptrdiff_t>(range.end)}});
      const auto& finished = has_result[static_cast<std::size_t>(rank)];
      const auto in_range = [&](std::size_t i) { return finished.begin() + static_cast<std::ptrdiff_t>(i); };
      if (results) REQUIRE(std::count(in_range(range.begin), in_range(range.end), false) == 0);
    }
  }

  bool receive(int rank, const HalvingStep& step) {
    const bool results = step.use == HalvingStep::Use::result;
    for (const auto& from : step.in) {
      if (messages[{from.peer, rank, results}].empty()) return false;
    }
    for (const auto& [peer, range] : step.in) {
      auto& way = messages[{peer, rank, results}];
      REQUIRE(way.front().first == range);
      take(rank, step, range, way.front().second);
      way.pop_front();
      int& now = clock[static_cast<std::size_t>(rank)];
      now = std::max(now, stamps[{peer, rank, results}] + 1);
    }
    return true;
  }

  void take(int rank, const HalvingStep& step, Range range, const std::vector<Terms>& theirs) {
    const auto r = static_cast<std::size_t>(rank);
    bool in_order = true;
    for (std::size_t i = range.begin; i < range.end; ++i) {
      Terms& mine = held[r][i];
      const Terms& other = theirs[i - range.begin];
      if (step.use == HalvingStep::Use::result) {
        in_order = in_order && !has_result[r][i];
        mine = other;
      } else {
        const Terms &a = step.use == HalvingStep::Use::before ? other : mine,
                    &b = step.use == HalvingStep::Use::before ? mine : other;
        in_order = in_order && are_branches(a, b, n_ranks);
        mine = {a.first, b.last};
      }
      if (step.use == HalvingStep::Use::result || step.finishes) has_result[r][i] = true;
      in_order = in_order && has_result[r][i] == (mine == Terms{0, n_ranks});
    }
    REQUIRE(in_order);
  }

  /// Whoever can goes one step on, in turns, until nobody can.
  void play() {
    std::vector<bool> has_sent(plans.size());
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < n_ranks; ++rank) {
        const auto r = static_cast<std::size_t>(rank);
        if (at[r] == plans[r].steps().size()) continue;
        const HalvingStep& step = plans[r].steps()[at[r]];
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
  std::vector<HalvingPlan> plans;
  std::vector<std::vector<Terms>> held;
  std::vector<std::vector<bool>> has_result;
  std::vector<std::size_t> at;  // the step of each rank
  std::vector<int> clock;       // messages that have followed one another
  std::map<Key, std::deque<std::pair<Range, std::vector<Terms>>>> messages;
  std::map<Key, int> sent;
  std::map<Key, int> stamps;  // of messages: the clock of the rank that sends
};

/// What comes of all ranks' values; the factor of a rank is 1 more than its number.
Floats reduced(const std::vector<Floats>& given, ReduceOp op = ReduceOp::sum) {
  std::vector<kernels::Input> terms;
  for (const Floats& values : given) terms.push_back({values.data(), static_cast<double>(terms.size() + 1)});
  Floats result(given[0].size());
  kernels::reduce(DType::float32, op, terms, result.data(), result.size());
  return result;
}

Buffer buffer(Floats& values) { return {values.data(), values.size(), DType::float32}; }

}  // namespace

TEST_CASE("halving: played by 1 to 64 ranks in turns, every sum is in pairwise order and comes everywhere") {
  for (int n_ranks = 1; n_ranks <= 64; ++n_ranks) {
    const auto n = static_cast<std::size_t>(n_ranks);
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, n - 1, n, n + 1, 16 * n + 5}) {
      for (const bool halves : {true, false}) {
        CAPTURE(n_ranks);
        CAPTURE(count);
        CAPTURE(halves);
        Players players(n_ranks, count, halves);
        players.play();
        for (std::size_t rank = 0; rank < n; ++rank) {
          REQUIRE(players.at[rank] == players.plans[rank].steps().size());  // nobody waits for ever
          if (n_ranks == 1) continue;
          const auto& held = players.held[rank];
          REQUIRE(std::count(held.begin(), held.end(), Terms{0, n_ranks}) == static_cast<std::ptrdiff_t>(count));
        }
        for (const auto& [key, left] : players.messages) REQUIRE(left.empty());
      }
    }
  }
}

TEST_CASE("halving: as many messages as it says, and no rank sends more than twice the buffer") {
  for (int n_ranks = 2; n_ranks <= 64; ++n_ranks) {
    const std::size_t count = 16 * 64 * 64;
    for (const bool halves : {true, false}) {
      const HalvingCost cost = halving_cost(n_ranks, halves);
      Players players(n_ranks, 2 * 64, halves);
      players.play();
      CAPTURE(n_ranks);
      CAPTURE(halves);
      REQUIRE(*std::max_element(players.clock.begin(), players.clock.end()) == cost.rounds);
      std::size_t most = 0;
      for (int rank = 0; rank < n_ranks; ++rank) {
        const HalvingPlan plan(n_ranks, rank, {0, count}, halves);
        std::size_t messages = 0, elements = 0;
        for (const HalvingStep& step : plan.steps()) {
          messages += step.out.size();
          for (const auto& to : step.out) elements += to.range.count();
        }
        most = std::max(most, messages);
        if (halves) REQUIRE(elements <= 2 * count);
        REQUIRE(plan.room() <= (halves ? count : count * plan.steps().size()));
      }
      REQUIRE(most == static_cast<std::size_t>(cost.messages));
    }
  }
  CHECK(halving_cost(64, true).rounds == 12);
  CHECK(halving_cost(64, false).messages == 6);
}

TEST_CASE("halving: over messages, to the bit, in windows and at once") {
  constexpr std::size_t kCounts[] = {17, 1000, 5003, 20'003};
  constexpr std::size_t kLong = 5003;  // longer ones take time under the sanitizers: on seven ranks only
  constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::max, ReduceOp::premul};
  for (const int size : {2, 3, 4, 5, 7, 8}) {
    const UnevenTable values(size, kCounts, kOps, reduced);
    for (const Way way : {Way::halving, Way::doubling}) {
      const auto network = std::make_shared<LocalNetwork>(size);
      as_threads(size, [&](int rank) {
        ExchangeOptions options;
        options.oversubscribed = true;
        options.inline_limit = 64;
        options.window_piece = 512;
        options.way = way;
        ExchangeCommunicator group(std::make_unique<LocalMessenger>(network, rank, /*max_message=*/700), options);
        for (const std::size_t count : kCounts) {
          if (count > kLong && size != 7) continue;
          for (const ReduceOp op : kOps) {
            const Reduction reduction{op, 1.0 + rank};
            const Floats& expected = values.reduced(count, op);
            Floats all = values.of(rank, count), into(count);
            group.all_reduce(buffer(all), buffer(into), reduction, Shape::flat(count))->wait(soon());
            REQUIRE(into == expected);
            REQUIRE(all == values.of(rank, count));
            group.all_reduce(buffer(all), buffer(all), reduction, Shape::flat(count))->wait(soon());
            REQUIRE(all == expected);
          }
        }
        group.close(soon());
      });
    }
  }
}

TEST_CASE("halving: many operations under way, types that it does not carry, and an end by deadline") {
  const int size = 5;
  std::vector<std::size_t> counts;
  for (std::size_t i = 0; i < 20; ++i) counts.push_back(20 + 97 * i);
  constexpr ReduceOp kSum[] = {ReduceOp::sum};
  const UnevenTable table(size, counts, kSum, reduced);
  const auto network = std::make_shared<LocalNetwork>(size);
  as_threads(size, [&](int rank) {
    ExchangeOptions options;
    options.oversubscribed = true;
    options.inline_limit = 64;
    options.window_piece = 256;
    options.way = Way::halving;
    ExchangeCommunicator group(std::make_unique<LocalMessenger>(network, rank), options);
    std::vector<Floats> values;
    std::vector<Communicator::WorkPtr> works;
    for (const std::size_t count : counts) values.push_back(table.of(rank, count));
    for (Floats& v : values) works.push_back(group.all_reduce(buffer(v), buffer(v), {}, Shape::flat(v.size())));
    for (std::size_t i = 20; i-- > 0;) {
      works[(i * 7) % 20]->wait(soon());
      REQUIRE(values[(i * 7) % 20] == table.reduced(counts[(i * 7) % 20], ReduceOp::sum));
    }
    std::vector<std::int32_t> whole(1001, 7 * rank);  // 0 + 7 + ... + 28 = 70
    const Buffer of_whole{whole.data(), whole.size(), DType::int32};
    group.all_reduce(of_whole, of_whole, {ReduceOp::avg}, Shape::flat(whole.size()))->wait(soon());
    REQUIRE(whole == std::vector<std::int32_t>(1001, 14));
    group.barrier()->wait(soon());
    if (rank == 4) return;  // its neighbours learn of it by their deadline, or from each other
    Floats last(1000);
    const auto work = group.all_reduce(buffer(last), buffer(last), {}, Shape::flat(last.size()));
    try {
      work->wait(Deadline::after(Seconds(0.2)));
      FAIL("rank 4 is not here");
    } catch (const TimeoutError& error) {
      CHECK(std::string(error.what()).find(" 4") != std::string::npos);
      group.abandon(std::current_exception(), error.what());
    } catch (const PeerLostError&) {
      group.abandon(std::current_exception(), "a peer gave up");
    }
  });
}
