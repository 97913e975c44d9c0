#include "scenarios.h"

#include <string>

#include "../cpp/collective_calls.h"
#include "core/error.h"
#include "values.h"
#include "world.h"

namespace model {
namespace {

using namespace samestep;
using Body = std::function<void(World&, int)>;
using Act = std::function<Communicator::WorkPtr(World&, int)>;

Scenario in_world(std::string name, int size, Reach reach, Body body) {
  const auto world = std::make_shared<World>(size, reach);
  Scenario scenario;
  scenario.name = std::move(name);
  scenario.size = size;
  scenario.set_up = [world] { world->set_up(); };
  scenario.tear_down = [world] { world->tear_down(); };
  scenario.body = [world, body = std::move(body)](int rank) { body(*world, rank); };
  return scenario;
}

/// The same with at most `n` preemptions.
Scenario bounded(int n, Scenario scenario) {
  scenario.name += "-bounded";
  scenario.preemptions = n;
  return scenario;
}

// ---- without failures

/// `n` times two blocking allreduces on the fast path, the second of them in place.
Scenario inline_calls(std::string name, int size, std::size_t count, int n, Reach reach = Reach::none) {
  return in_world(std::move(name), size, reach, [=](World& world, int rank) {
    for (int i = 0; i < n; ++i) {
      const Floats in = world.contribution(rank, count), out = world.buffer(rank, count);
      world.all_reduce_inline(rank, in, out);
      world.expect_sum(out);
      world.all_reduce_inline(rank, in, in);
      world.expect_sum(in);
      world.forget_history(rank, static_cast<std::uint64_t>(i));
    }
  });
}

/// The same where its polling loop may end before the others have posted.
Scenario inline_or_queued(std::string name, int size, std::size_t count, int n, Reach reach = Reach::none) {
  Scenario scenario = inline_calls(std::move(name), size, count, n, reach);
  scenario.loops_end = true;
  return scenario;
}

/// Allreduces of these counts, in place, all started before the first is waited for. `first`: one that completes before
/// them.
Scenario queued(std::string name, int size, Reach reach, std::vector<std::size_t> counts, std::size_t first = 0) {
  return in_world(std::move(name), size, reach, [=](World& world, int rank) {
    if (first != 0) {
      const Floats values = world.contribution(rank, first);
      world.wait(rank, world.all_reduce(rank, values, values));
      world.expect_sum(values);
    }
    std::vector<Floats> values;
    std::vector<Communicator::WorkPtr> works;
    for (const std::size_t count : counts) values.push_back(world.contribution(rank, count));
    for (const Floats v : values) works.push_back(world.all_reduce(rank, v, v));
    for (const auto& work : works) world.wait(rank, work);
    for (const Floats v : values) world.expect_sum(v);
  });
}

/// Three allreduces; rank 1 begins the last before the second has ended.
Scenario one_late(std::string name, Reach reach, std::size_t count) {
  return in_world(std::move(name), 2, reach, [=](World& world, int rank) {
    std::array<Floats, 3> values;
    for (Floats& v : values) v = world.contribution(rank, count);
    std::array<Communicator::WorkPtr, 3> works;
    for (std::size_t i = 0; i < 3; ++i) {
      works[i] = world.all_reduce(rank, values[i], values[i]);
      if (rank == 0 || i != 1) world.wait(rank, works[i]);
    }
    if (rank == 1) world.wait(rank, works[1]);
    for (const Floats v : values) world.expect_sum(v);
  });
}

/// Allreduces of these counts, one after the other, in place.
Scenario in_turn(std::string name, int size, Reach reach, std::vector<std::size_t> counts) {
  return in_world(std::move(name), size, reach, [=](World& world, int rank) {
    std::uint64_t place = 0;
    for (const std::size_t count : counts) {
      const Floats values = world.contribution(rank, count);
      world.wait(rank, world.all_reduce(rank, values, values));
      world.expect_sum(values);
      world.forget_history(rank, place++);
    }
  });
}

/// One rank's allreduce differs: all get the same error text, and the group stays usable.
Scenario differing(std::string name, int size) {
  const auto texts = std::make_shared<std::array<std::string, kMaxRanks>>();
  Scenario scenario = in_world(std::move(name), size, Reach::none, [=](World& world, int rank) {
    const Floats odd = world.contribution(rank, rank == 1 ? 4 : 3);
    try {
      world.wait(rank, world.all_reduce(rank, odd, odd));
      violated("an allreduce of different counts ends well");
    } catch (const MismatchError& error) {
      (*texts)[static_cast<std::size_t>(rank)] = error.what();
    }
    world.forget_history(rank, 0);
    const Floats values = world.contribution(rank, 3);
    world.wait(rank, world.all_reduce(rank, values, values));
    world.expect_sum(values);
  });
  scenario.tear_down = [=, old = std::move(scenario.tear_down)] {
    for (int rank = 1; rank < size; ++rank) {
      if ((*texts)[static_cast<std::size_t>(rank)] != (*texts)[0]) violated("ranks differ in what was wrong");
    }
    old();
  };
  return scenario;
}

Communicator::WorkPtr gather_all(World& world, int rank, Floats mine, Floats all) {
  return allgather(world.group(rank), as_buffer(mine), as_buffer(all), shape_of(mine));
}

Scenario gathered(std::string name, int size, Reach reach, std::size_t count) {
  return in_world(std::move(name), size, reach, [=](World& world, int rank) {
    const Floats mine = world.buffer(rank, count), all = world.buffer(rank, count * static_cast<std::size_t>(size));
    fill(mine, static_cast<float>(rank));
    world.wait(rank, gather_all(world, rank, mine, all));
    fill(mine, -1);  // it is the caller's again
    for (int peer = 0; peer < size; ++peer) {
      expect(all.subspan(static_cast<std::size_t>(peer) * count, count), static_cast<float>(peer), 1);
    }
  });
}

Communicator::WorkPtr broadcast(World& world, int rank, Floats values, int root) {
  return bcast(world.group(rank), as_buffer(values), root, shape_of(values));
}

/// Broadcasts from these roots, one after the other.
Scenario broadcasted(std::string name, int size, Reach reach, std::size_t count, std::vector<int> roots) {
  return in_world(std::move(name), size, reach, [=](World& world, int rank) {
    for (std::size_t i = 0; i < roots.size(); ++i) {
      const Floats values = world.buffer(rank, count);
      fill(values, static_cast<float>(10 * i + static_cast<std::size_t>(rank)));
      world.wait(rank, broadcast(world, rank, values, roots[i]));
      expect(values, static_cast<float>(10 * i + static_cast<std::size_t>(roots[i])), 1);
      fill(values, -1);  // it is the caller's again
      world.forget_history(rank, i);
    }
  });
}

/// A broadcast between two reductions, of which the second stages its first segment ahead.
Scenario reduced_after_broadcast(std::string name, Reach reach, std::size_t count) {
  return in_world(std::move(name), 2, reach, [=](World& world, int rank) {
    const auto reduce = [&] {
      const Floats values = world.contribution(rank, count);
      world.wait(rank, world.all_reduce(rank, values, values));
      world.expect_sum(values);
    };
    reduce();
    const Floats values = world.buffer(rank, count);
    fill(values, static_cast<float>(rank));
    world.wait(rank, broadcast(world, rank, values, 0));
    reduce();
    expect(values, 0, 1);
  });
}

/// Three broadcasts from rank 0; this rank begins the last before the second has ended.
Scenario broadcasted_late(std::string name, Reach reach, std::size_t count, int late) {
  return in_world(std::move(name), 2, reach, [=](World& world, int rank) {
    std::array<Floats, 3> values;
    for (std::size_t i = 0; i < 3; ++i) {
      values[i] = world.buffer(rank, count);
      fill(values[i], static_cast<float>(10 * i + static_cast<std::size_t>(rank)));
    }
    std::array<Communicator::WorkPtr, 3> works;
    for (std::size_t i = 0; i < 3; ++i) {
      works[i] = broadcast(world, rank, values[i], 0);
      if (rank != late || i != 1) world.wait(rank, works[i]);
    }
    if (rank == late) world.wait(rank, works[1]);
    for (std::size_t i = 0; i < 3; ++i) expect(values[i], static_cast<float>(10 * i), 1);
  });
}

/// Every rank sends another run to every other.
Scenario swapped(std::string name, int size, Reach reach, std::size_t count) {
  return in_world(std::move(name), size, reach, [=](World& world, int rank) {
    const std::size_t all = count * static_cast<std::size_t>(size);
    const Floats out = world.buffer(rank, all), in = world.buffer(rank, all);
    for (int peer = 0; peer < size; ++peer) {
      fill(out.subspan(static_cast<std::size_t>(peer) * count, count), static_cast<float>(10 * rank + peer));
    }
    world.wait(rank, alltoall(world.group(rank), as_buffer(out), as_buffer(in), shape_of(out)));
    fill(out, -1);
    for (int peer = 0; peer < size; ++peer) {
      expect(in.subspan(static_cast<std::size_t>(peer) * count, count), static_cast<float>(10 * peer + rank), 1);
    }
  });
}

// Elements of a message: the one that does not fit at the end of a ring is too long by 64 bytes.
constexpr std::size_t kMessage = 3830;

/// Rank 0 sends `n` messages to rank 1, which takes them in order; with `both` also from 1 to 0.
Scenario messages(std::string name, Reach reach, std::size_t count, int n, bool both) {
  return in_world(std::move(name), 2, reach, [=](World& world, int rank) {
    std::vector<Communicator::WorkPtr> works;
    std::vector<Floats> sent, taken;
    for (int i = 0; i < n && (rank == 0 || both); ++i) {
      sent.push_back(world.buffer(rank, count));
      fill(sent.back(), static_cast<float>(10 * i + rank));
      works.push_back(world.group(rank).send(as_buffer(sent.back()), 1 - rank, 5));
    }
    for (int i = 0; i < n && (rank == 1 || both); ++i) {
      taken.push_back(world.buffer(rank, count));
      works.push_back(world.group(rank).recv(as_buffer(taken.back()), 1 - rank, 5));
    }
    for (const auto& work : works) world.wait(rank, work);
    for (const Floats buffer : sent) fill(buffer, -1);  // they are the caller's again
    for (std::size_t i = 0; i < taken.size(); ++i) expect(taken[i], static_cast<float>(10 * i + 1) - float(rank), 1);
  });
}

/// The same with blocking calls.
Scenario messages_inline(std::string name, std::size_t count, int n, bool both) {
  return in_world(std::move(name), 2, Reach::none, [=](World& world, int rank) {
    Communicator& group = world.group(rank);
    const Floats buffer = world.buffer(rank, count);
    Status status;
    for (int i = 0; i < n; ++i) {
      if (rank == 0 || both) {
        fill(buffer, static_cast<float>(10 * i + rank));
        if (const auto work = group.run(SendArgs{as_buffer(buffer), 1 - rank, 5})) world.wait(rank, work);
        fill(buffer, -1);  // it is the caller's again
      }
      if (rank == 1 || both) {
        if (const auto work = group.run(RecvArgs{as_buffer(buffer), 1 - rank, 5}, status)) world.wait(rank, work);
        expect(buffer, static_cast<float>(10 * i + 1 - rank), 1);
      }
    }
  });
}

/// Both ranks send and receive in one blocking call.
Scenario exchanged_inline(std::string name, Reach reach, std::size_t count) {
  return in_world(std::move(name), 2, reach, [=](World& world, int rank) {
    const Floats mine = world.buffer(rank, count), theirs = world.buffer(rank, count);
    fill(mine, static_cast<float>(rank));
    Status status;
    Communicator::WorkPtr sending;
    const auto receiving =
        world.group(rank).run({as_buffer(mine), 1 - rank}, {as_buffer(theirs), 1 - rank}, status, sending);
    if (receiving) world.wait(rank, receiving);
    expect(theirs, static_cast<float>(1 - rank), 1);
    if (sending) world.wait(rank, sending);
    fill(mine, -1);  // it is the caller's again
  });
}

/// Short blocking collectives of several kinds; every rank is root in turn.
Scenario moved_inline(std::string name, int size, std::size_t count, int n) {
  return in_world(std::move(name), size, Reach::none, [=](World& world, int rank) {
    const auto run = [&](const CollectiveArgs& call) {
      if (const auto work = world.group(rank).run(call)) world.wait(rank, work);
    };
    const Floats mine = world.buffer(rank, count), all = world.buffer(rank, count * static_cast<std::size_t>(size));
    for (int i = 0; i < n; ++i) {
      const int root = i % size;
      fill(mine, static_cast<float>(10 * i + rank));
      run({CollectiveType::allgather, as_buffer(mine), as_buffer(all), {}, -1, shape_of(mine)});
      run({CollectiveType::bcast, {}, as_buffer(mine), {}, root, shape_of(mine)});
      expect(mine, static_cast<float>(10 * i + root), 1);
      for (int peer = 0; peer < size; ++peer) {
        expect(all.subspan(static_cast<std::size_t>(peer) * count, count), static_cast<float>(10 * i + peer), 1);
      }
      run({CollectiveType::barrier});
    }
  });
}

/// Rank 0 begins all its gathers before it waits for the first; the others make blocking calls.
Scenario moved_ahead(std::string name, int size, std::size_t count, std::size_t n) {
  return in_world(std::move(name), size, Reach::none, [=](World& world, int rank) {
    std::vector<Communicator::WorkPtr> works;
    std::vector<Floats> gathered;
    for (std::size_t i = 0; i < n; ++i) {
      const Floats mine = world.buffer(rank, count);
      gathered.push_back(world.buffer(rank, count * static_cast<std::size_t>(size)));
      fill(mine, static_cast<float>(10 * i + static_cast<std::size_t>(rank)));
      const CollectiveArgs call{
          CollectiveType::allgather, as_buffer(mine), as_buffer(gathered.back()), {}, -1, shape_of(mine)};
      works.push_back(rank == 0 ? world.group(rank).start(call) : world.group(rank).run(call));
      if (rank != 0 && works.back() != nullptr) world.wait(rank, works.back());
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (works[i] != nullptr) world.wait(rank, works[i]);
      for (std::size_t peer = 0; peer < static_cast<std::size_t>(size); ++peer) {
        expect(gathered[i].subspan(peer * count, count), static_cast<float>(10 * i + peer), 1);
      }
    }
  });
}

// ---- a rank leaves

Act an_all_reduce(std::size_t count) {
  return [count](World& world, int rank) {
    const Floats values = world.contribution(rank, count);
    return world.all_reduce(rank, values, values);
  };
}

Act a_gather(std::size_t count) {
  return [count](World& world, int rank) {
    const Floats mine = world.contribution(rank, count);
    return gather_all(world, rank, mine, world.buffer(rank, count * static_cast<std::size_t>(world.size())));
  };
}

/// Succeeds, or fails with an error that names rank 1; then the next call fails, too.
void wait_or_lose(World& world, int rank, const Communicator::WorkPtr& work) {
  bool lost = false;
  try {
    world.wait(rank, work, true);
  } catch (const PeerLostError& error) {
    lost = true;
    if (std::string(error.what()).find("rank 1") == std::string::npos) violated("the wrong rank is named");
  }
  if (!lost) return;
  const Floats values = world.contribution(rank, 1);
  try {
    world.wait(rank, world.all_reduce(rank, values, values), true);
    violated("an operation after the loss of a rank ends well");
  } catch (const PeerLostError&) {
  }
}

/// Rank 1 is killed at any moment, or not at all.
Scenario killed(std::string name, int size, Reach reach, Act act) {
  Scenario scenario = in_world(std::move(name), size, reach,
                               [=](World& world, int rank) { wait_or_lose(world, rank, act(world, rank)); });
  scenario.victim = 1;
  return scenario;
}

/// Rank 1 leaves after any poll of its wait, or not at all, and makes no more calls. First it sends `n` messages that
/// nobody receives.
Scenario given_up(std::string name, int size, Reach reach, Act act, int n = 0) {
  return in_world(std::move(name), size, reach, [=](World& world, int rank) {
    if (rank != 1) return wait_or_lose(world, rank, act(world, rank));
    std::vector<Communicator::WorkPtr> sends;
    for (int i = 0; i < n; ++i) sends.push_back(world.group(1).send(as_buffer(world.buffer(1, kMessage)), 0, 5));
    if (explorer().pause(true)) return world.leave(1);  // before it has posted anything
    world.wait_or_leave(1, act(world, 1));
  });
}

constexpr std::size_t kDynamic = 4 << 15;  // the fewest elements of which two ranks take chunks dynamically
constexpr std::size_t kStaged = 70'000;    // in several segments
constexpr std::size_t kRunsOver = 80'000;  // more segments than a stage holds
constexpr int kManyMessages = 19;          // more than a ring holds

}  // namespace

std::vector<std::function<Scenario()>> scenarios() {
  const std::vector<std::size_t> around = {kDynamic, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, kDynamic};
  return {
      [] { return inline_calls("inline-slot-2", 2, 3, 10); },
      [] { return inline_calls("inline-slot-3", 3, 3, 1); },
      [] { return inline_calls("inline-second-line-2", 2, 14, 4); },
      [] { return inline_calls("inline-block-2", 2, 300, 4); },
      [] { return inline_calls("inline-posted-2", 2, 3000, 1); },
      [] { return inline_calls("inline-static-2", 2, 6000, 2, Reach::shared); },
      [] { return bounded(2, inline_calls("inline-staged-2", 2, 20'000, 2)); },
      [] { return bounded(1, inline_calls("inline-block-3", 3, 300, 3)); },
      [] { return inline_or_queued("inline-or-queued-slot-2", 2, 3, 1); },
      [] { return inline_or_queued("inline-or-queued-block-2", 2, 300, 1); },
      [] { return inline_or_queued("inline-or-queued-static-2", 2, 6000, 1, Reach::shared); },
      [] { return bounded(0, inline_or_queued("inline-or-queued-slot-3", 3, 3, 1)); },
      [] { return queued("queue-2", 2, Reach::none, std::vector<std::size_t>(4, 3)); },
      [] { return bounded(2, queued("queue-slots-2", 2, Reach::none, std::vector<std::size_t>(18, 3))); },
      [] {
        return bounded(2,
                       queued("queue-blocks-2", 2, Reach::none, std::vector<std::size_t>(ShmRegion::kBlocks + 2, 300)));
      },
      [] { return bounded(2, queued("queue-3", 3, Reach::none, {3, 3})); },
      [] { return differing("differing-2", 2); },
      [] { return bounded(1, differing("differing-3", 3)); },
      [] { return bounded(4, queued("dynamic-2", 2, Reach::shared, {kDynamic})); },
      [around] { return bounded(2, in_turn("dynamic-again-2", 2, Reach::shared, around)); },
      [] { return bounded(1, queued("dynamic-3", 3, Reach::shared, {6 << 15})); },
      [] { return queued("static-2", 2, Reach::shared, {6000}); },
      [] { return bounded(2, queued("static-3", 3, Reach::shared, {6000})); },
      [] { return bounded(1, queued("cma-2", 2, Reach::cma, {kDynamic * 9})); },
      [] { return bounded(2, queued("staged-2", 2, Reach::none, {kStaged})); },
      [] { return bounded(2, queued("staged-twice-2", 2, Reach::none, {30'000, 20'000})); },
      [] { return bounded(2, queued("staged-ahead-2", 2, Reach::none, {20'000, 20'000}, 20'000)); },
      [] { return bounded(2, one_late("staged-late-2", Reach::none, 20'000)); },
      [] { return bounded(0, queued("staged-3", 3, Reach::none, {kStaged})); },
      [] { return gathered("gathered-2", 2, Reach::shared, 20'000); },
      [] { return bounded(1, gathered("gathered-3", 3, Reach::cma, 20'000)); },
      [] { return bounded(2, broadcasted("staged-broadcast-2", 2, Reach::none, kRunsOver, {0})); },
      [] { return bounded(2, broadcasted("staged-broadcasts-2", 2, Reach::none, 20'000, {0, 0, 1})); },
      [] { return bounded(2, reduced_after_broadcast("staged-broadcast-reduced-2", Reach::none, 20'000)); },
      [] { return bounded(2, broadcasted_late("staged-broadcast-root-late-2", Reach::none, 20'000, 0)); },
      [] { return bounded(2, broadcasted_late("staged-broadcast-late-2", Reach::none, 20'000, 1)); },
      [] { return bounded(1, broadcasted("paths-broadcast-2", 2, Reach::cma, 70'000, {0, 0, 1, 0})); },
      [] { return bounded(0, broadcasted("staged-broadcast-3", 3, Reach::none, kRunsOver, {1})); },
      [] { return bounded(2, gathered("staged-gather-2", 2, Reach::none, kRunsOver)); },
      [] { return bounded(0, gathered("staged-gather-3", 3, Reach::none, 20'000)); },
      [] { return bounded(2, swapped("staged-swap-2", 2, Reach::none, kRunsOver)); },
      [] { return bounded(0, swapped("staged-swap-3", 3, Reach::none, 40'000)); },
      [] { return bounded(2, messages("messages-ring", Reach::none, kMessage, kManyMessages, false)); },
      [] { return messages("messages-both-directions", Reach::none, kMessage, 2, true); },
      [] { return bounded(3, messages("messages-rts", Reach::cma, 30'000, 1, true)); },
      [] { return bounded(3, messages("messages-data", Reach::none, 100'000, 1, false)); },
      [] { return bounded(2, messages_inline("messages-inline-ring", kMessage, kManyMessages, false)); },
      [] { return messages_inline("messages-inline-both-directions", kMessage, 2, true); },
      [] { return bounded(2, exchanged_inline("exchanged-inline-data", Reach::none, 100'000)); },
      [] { return moved_inline("moved-inline-2", 2, 300, 4); },
      [] { return bounded(2, moved_ahead("moved-ahead-2", 2, 300, ShmRegion::kBlocks + 2)); },
      [] { return bounded(1, moved_inline("moved-inline-3", 3, 300, 2)); },
      [] { return killed("killed-slot-2", 2, Reach::none, an_all_reduce(3)); },
      [] { return bounded(2, killed("killed-dynamic-2", 2, Reach::shared, an_all_reduce(kDynamic))); },
      [] { return bounded(2, killed("killed-staged-2", 2, Reach::none, an_all_reduce(20'000))); },
      [] { return bounded(2, killed("killed-staged-gather-2", 2, Reach::none, a_gather(20'000))); },
      [] { return killed("killed-gather-2", 2, Reach::cma, a_gather(20'000)); },
      [] { return bounded(1, killed("killed-slot-3", 3, Reach::none, an_all_reduce(3))); },
      [] { return bounded(0, killed("killed-static-3", 3, Reach::shared, an_all_reduce(6000))); },
      [] { return given_up("given-up-slot-2", 2, Reach::none, an_all_reduce(3)); },
      [] { return given_up("given-up-static-2", 2, Reach::shared, an_all_reduce(6000)); },
      [] { return bounded(2, given_up("given-up-staged-2", 2, Reach::none, an_all_reduce(20'000))); },
      [] { return given_up("given-up-gather-2", 2, Reach::shared, a_gather(20'000)); },
      [] { return bounded(1, given_up("given-up-staged-gather-2", 2, Reach::none, a_gather(20'000))); },
      [] { return bounded(3, given_up("given-up-cma-2", 2, Reach::cma, an_all_reduce(6000))); },
      [] { return bounded(0, given_up("given-up-cma-3", 3, Reach::cma, an_all_reduce(6000))); },
      [] { return bounded(0, given_up("given-up-static-3", 3, Reach::shared, an_all_reduce(6000))); },
      [] { return bounded(1, given_up("given-up-full-ring-2", 2, Reach::none, an_all_reduce(3), kManyMessages)); },
  };
}

}  // namespace model
