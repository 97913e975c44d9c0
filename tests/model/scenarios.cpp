#include "scenarios.h"

#include <string>

#include "core/error.h"
#include "town.h"
#include "values.h"

namespace model {
namespace {

using namespace samestep;
using Body = std::function<void(Town&, int)>;
using Act = std::function<Communicator::WorkPtr(Town&, int)>;

Scenario in_town(std::string name, int size, Reach reach, Body body) {
  const auto town = std::make_shared<Town>(size, reach);
  Scenario scenario;
  scenario.name = std::move(name);
  scenario.size = size;
  scenario.set_up = [town] { town->set_up(); };
  scenario.tear_down = [town] { town->tear_down(); };
  scenario.body = [town, body = std::move(body)](int rank) { body(*town, rank); };
  return scenario;
}

/// The same with at most `n` preemptions.
Scenario bounded(int n, Scenario scenario) {
  scenario.name += "-bounded";
  scenario.preemptions = n;
  return scenario;
}

// ---- all is well

/// Allreduces outside the queue, `n` times two, each to its end, the second of them in place.
Scenario now(std::string name, int size, std::size_t count, int n, Reach reach = Reach::none) {
  return in_town(std::move(name), size, reach, [=](Town& town, int rank) {
    for (int i = 0; i < n; ++i) {
      const Floats in = town.contribution(rank, count), out = town.buffer(rank, count);
      town.all_reduce_now(rank, in, out);
      town.expect_sum(out);
      town.all_reduce_now(rank, in, in);
      town.expect_sum(in);
      town.settle(rank, static_cast<std::uint64_t>(i));
    }
  });
}

/// The same where its loop may come to its end before the others are there.
Scenario now_or_later(std::string name, int size, std::size_t count, int n, Reach reach = Reach::none) {
  Scenario scenario = now(std::move(name), size, count, n, reach);
  scenario.loops_end = true;
  return scenario;
}

/// Allreduces of these counts, all begun before the first is waited for, in place; `first` before them by itself.
Scenario queued(std::string name, int size, Reach reach, std::vector<std::size_t> counts, std::size_t first = 0) {
  return in_town(std::move(name), size, reach, [=](Town& town, int rank) {
    if (first != 0) {
      const Floats values = town.contribution(rank, first);
      town.wait(rank, town.all_reduce(rank, values, values));
      town.expect_sum(values);
    }
    std::vector<Floats> values;
    std::vector<Communicator::WorkPtr> works;
    for (const std::size_t count : counts) values.push_back(town.contribution(rank, count));
    for (const Floats v : values) works.push_back(town.all_reduce(rank, v, v));
    for (const auto& work : works) town.wait(rank, work);
    for (const Floats v : values) town.expect_sum(v);
  });
}

/// Three allreduces; rank 1 begins the last before the second has ended.
Scenario one_late(std::string name, Reach reach, std::size_t count) {
  return in_town(std::move(name), 2, reach, [=](Town& town, int rank) {
    std::array<Floats, 3> values;
    for (Floats& v : values) v = town.contribution(rank, count);
    std::array<Communicator::WorkPtr, 3> works;
    for (std::size_t i = 0; i < 3; ++i) {
      works[i] = town.all_reduce(rank, values[i], values[i]);
      if (rank == 0 || i != 1) town.wait(rank, works[i]);
    }
    if (rank == 1) town.wait(rank, works[1]);
    for (const Floats v : values) town.expect_sum(v);
  });
}

/// Allreduces of these counts, one after the other, in place.
Scenario in_turn(std::string name, int size, Reach reach, std::vector<std::size_t> counts) {
  return in_town(std::move(name), size, reach, [=](Town& town, int rank) {
    std::uint64_t place = 0;
    for (const std::size_t count : counts) {
      const Floats values = town.contribution(rank, count);
      town.wait(rank, town.all_reduce(rank, values, values));
      town.expect_sum(values);
      town.settle(rank, place++);
    }
  });
}

/// One rank's allreduce differs: all learn the same of it, and go on.
Scenario differing(std::string name, int size) {
  const auto texts = std::make_shared<std::array<std::string, kMostRanks>>();
  Scenario scenario = in_town(std::move(name), size, Reach::none, [=](Town& town, int rank) {
    const Floats odd = town.contribution(rank, rank == 1 ? 4 : 3);
    try {
      town.wait(rank, town.all_reduce(rank, odd, odd));
      violated("an allreduce of different counts ends well");
    } catch (const MismatchError& error) {
      (*texts)[static_cast<std::size_t>(rank)] = error.what();
    }
    town.settle(rank, 0);
    const Floats values = town.contribution(rank, 3);
    town.wait(rank, town.all_reduce(rank, values, values));
    town.expect_sum(values);
  });
  scenario.tear_down = [=, old = std::move(scenario.tear_down)] {
    for (int rank = 1; rank < size; ++rank) {
      if ((*texts)[static_cast<std::size_t>(rank)] != (*texts)[0]) violated("ranks differ in what was wrong");
    }
    old();
  };
  return scenario;
}

Communicator::WorkPtr gather_all(Town& town, int rank, Floats mine, Floats all) {
  return town.group(rank).all_gather(as_buffer(mine), as_buffer(all), shape_of(mine));
}

Scenario gathered(std::string name, int size, Reach reach, std::size_t count) {
  return in_town(std::move(name), size, reach, [=](Town& town, int rank) {
    const Floats mine = town.buffer(rank, count), all = town.buffer(rank, count * static_cast<std::size_t>(size));
    fill(mine, static_cast<float>(rank));
    town.wait(rank, gather_all(town, rank, mine, all));
    fill(mine, -1);  // it is the caller's again
    for (int peer = 0; peer < size; ++peer) {
      expect(all.subspan(static_cast<std::size_t>(peer) * count, count), static_cast<float>(peer), 1);
    }
  });
}

Communicator::WorkPtr broadcast(Town& town, int rank, Floats values, int root) {
  return town.group(rank).broadcast(as_buffer(values), root, shape_of(values));
}

/// Broadcasts from these roots, one after the other.
Scenario broadcasted(std::string name, int size, Reach reach, std::size_t count, std::vector<int> roots) {
  return in_town(std::move(name), size, reach, [=](Town& town, int rank) {
    for (std::size_t i = 0; i < roots.size(); ++i) {
      const Floats values = town.buffer(rank, count);
      fill(values, static_cast<float>(10 * i + static_cast<std::size_t>(rank)));
      town.wait(rank, broadcast(town, rank, values, roots[i]));
      expect(values, static_cast<float>(10 * i + static_cast<std::size_t>(roots[i])), 1);
      fill(values, -1);  // it is the caller's again
      town.settle(rank, i);
    }
  });
}

/// Three broadcasts from rank 0; this rank begins the last before the second has ended.
Scenario broadcasted_late(std::string name, Reach reach, std::size_t count, int late) {
  return in_town(std::move(name), 2, reach, [=](Town& town, int rank) {
    std::array<Floats, 3> values;
    for (std::size_t i = 0; i < 3; ++i) {
      values[i] = town.buffer(rank, count);
      fill(values[i], static_cast<float>(10 * i + static_cast<std::size_t>(rank)));
    }
    std::array<Communicator::WorkPtr, 3> works;
    for (std::size_t i = 0; i < 3; ++i) {
      works[i] = broadcast(town, rank, values[i], 0);
      if (rank != late || i != 1) town.wait(rank, works[i]);
    }
    if (rank == late) town.wait(rank, works[1]);
    for (std::size_t i = 0; i < 3; ++i) expect(values[i], static_cast<float>(10 * i), 1);
  });
}

/// Every rank sends another run to every other.
Scenario swapped(std::string name, int size, Reach reach, std::size_t count) {
  return in_town(std::move(name), size, reach, [=](Town& town, int rank) {
    const std::size_t all = count * static_cast<std::size_t>(size);
    const Floats out = town.buffer(rank, all), in = town.buffer(rank, all);
    for (int peer = 0; peer < size; ++peer) {
      fill(out.subspan(static_cast<std::size_t>(peer) * count, count), static_cast<float>(10 * rank + peer));
    }
    town.wait(rank, town.group(rank).all_to_all(as_buffer(out), as_buffer(in), shape_of(out)));
    fill(out, -1);
    for (int peer = 0; peer < size; ++peer) {
      expect(in.subspan(static_cast<std::size_t>(peer) * count, count), static_cast<float>(10 * peer + rank), 1);
    }
  });
}

// Elements of a message: the one that does not fit at the end of a ring is too long by 64 bytes.
constexpr std::size_t kMessage = 3830;

/// Rank 0 sends `n` messages to rank 1, which takes them in order; with `both` the other way, too.
Scenario mailed(std::string name, Reach reach, std::size_t count, int n, bool both) {
  return in_town(std::move(name), 2, reach, [=](Town& town, int rank) {
    std::vector<Communicator::WorkPtr> works;
    std::vector<Floats> sent, taken;
    for (int i = 0; i < n && (rank == 0 || both); ++i) {
      sent.push_back(town.buffer(rank, count));
      fill(sent.back(), static_cast<float>(10 * i + rank));
      works.push_back(town.group(rank).send(as_buffer(sent.back()), 1 - rank, 5));
    }
    for (int i = 0; i < n && (rank == 1 || both); ++i) {
      taken.push_back(town.buffer(rank, count));
      works.push_back(town.group(rank).recv(as_buffer(taken.back()), 1 - rank, 5));
    }
    for (const auto& work : works) town.wait(rank, work);
    for (const Floats buffer : sent) fill(buffer, -1);  // they are the caller's again
    for (std::size_t i = 0; i < taken.size(); ++i) expect(taken[i], static_cast<float>(10 * i + 1) - float(rank), 1);
  });
}

/// The same at once: each message is waited for before the next.
Scenario mailed_now(std::string name, std::size_t count, int n, bool both) {
  return in_town(std::move(name), 2, Reach::none, [=](Town& town, int rank) {
    Communicator& group = town.group(rank);
    const Floats buffer = town.buffer(rank, count);
    Status status;
    for (int i = 0; i < n; ++i) {
      if (rank == 0 || both) {
        fill(buffer, static_cast<float>(10 * i + rank));
        if (const auto work = group.send_now(as_buffer(buffer), 1 - rank, 5)) town.wait(rank, work);
        fill(buffer, -1);  // it is the caller's again
      }
      if (rank == 1 || both) {
        if (const auto work = group.recv_now(as_buffer(buffer), 1 - rank, 5, status)) town.wait(rank, work);
        expect(buffer, static_cast<float>(10 * i + 1 - rank), 1);
      }
    }
  });
}

/// Both ranks send and receive at once, and wait for both.
Scenario exchanged_now(std::string name, Reach reach, std::size_t count) {
  return in_town(std::move(name), 2, reach, [=](Town& town, int rank) {
    const Floats mine = town.buffer(rank, count), theirs = town.buffer(rank, count);
    fill(mine, static_cast<float>(rank));
    Status status;
    Communicator::WorkPtr sending;
    const auto receiving =
        town.group(rank).sendrecv_now(as_buffer(mine), 1 - rank, as_buffer(theirs), 1 - rank, status, sending);
    if (receiving) town.wait(rank, receiving);
    expect(theirs, static_cast<float>(1 - rank), 1);
    if (sending) town.wait(rank, sending);
    fill(mine, -1);  // it is the caller's again
  });
}

/// Short collectives of several kinds, at once, root and all others in turn.
Scenario moved_now(std::string name, int size, std::size_t count, int n) {
  return in_town(std::move(name), size, Reach::none, [=](Town& town, int rank) {
    const auto run = [&](const Call& call) {
      if (const auto work = town.group(rank).now(call)) town.wait(rank, work);
    };
    const Floats mine = town.buffer(rank, count), all = town.buffer(rank, count * static_cast<std::size_t>(size));
    for (int i = 0; i < n; ++i) {
      const int root = i % size;
      fill(mine, static_cast<float>(10 * i + rank));
      run({Verb::all_gather, as_buffer(mine), as_buffer(all), {}, -1, shape_of(mine)});
      run({Verb::broadcast, {}, as_buffer(mine), {}, root, shape_of(mine)});
      expect(mine, static_cast<float>(10 * i + root), 1);
      for (int peer = 0; peer < size; ++peer) {
        expect(all.subspan(static_cast<std::size_t>(peer) * count, count), static_cast<float>(10 * i + peer), 1);
      }
      run({Verb::barrier});
    }
  });
}

/// Rank 0 begins all its gathers before it waits for the first; the others do each at once.
Scenario moved_ahead(std::string name, int size, std::size_t count, std::size_t n) {
  return in_town(std::move(name), size, Reach::none, [=](Town& town, int rank) {
    std::vector<Communicator::WorkPtr> works;
    std::vector<Floats> gathered;
    for (std::size_t i = 0; i < n; ++i) {
      const Floats mine = town.buffer(rank, count);
      gathered.push_back(town.buffer(rank, count * static_cast<std::size_t>(size)));
      fill(mine, static_cast<float>(10 * i + static_cast<std::size_t>(rank)));
      const Call call{Verb::all_gather, as_buffer(mine), as_buffer(gathered.back()), {}, -1, shape_of(mine)};
      works.push_back(rank == 0 ? town.group(rank).begin(call) : town.group(rank).now(call));
      if (rank != 0 && works.back() != nullptr) town.wait(rank, works.back());
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (works[i] != nullptr) town.wait(rank, works[i]);
      for (std::size_t peer = 0; peer < static_cast<std::size_t>(size); ++peer) {
        expect(gathered[i].subspan(peer * count, count), static_cast<float>(10 * i + peer), 1);
      }
    }
  });
}

// ---- a rank goes

Act an_all_reduce(std::size_t count) {
  return [count](Town& town, int rank) {
    const Floats values = town.contribution(rank, count);
    return town.all_reduce(rank, values, values);
  };
}

Act a_gather(std::size_t count) {
  return [count](Town& town, int rank) {
    const Floats mine = town.contribution(rank, count);
    return gather_all(town, rank, mine, town.buffer(rank, count * static_cast<std::size_t>(town.size())));
  };
}

/// Ends well, or with the error that names rank 1; then it does so again.
void wait_or_lose(Town& town, int rank, const Communicator::WorkPtr& work) {
  bool lost = false;
  try {
    town.wait(rank, work, true);
  } catch (const PeerLostError& error) {
    lost = true;
    if (std::string(error.what()).find("rank 1") == std::string::npos) violated("the wrong rank is named");
  }
  if (!lost) return;
  const Floats values = town.contribution(rank, 1);
  try {
    town.wait(rank, town.all_reduce(rank, values, values), true);
    violated("an operation after the loss of a rank ends well");
  } catch (const PeerLostError&) {
  }
}

/// Rank 1 is killed at any moment, or not at all.
Scenario killed(std::string name, int size, Reach reach, Act act) {
  Scenario scenario =
      in_town(std::move(name), size, reach, [=](Town& town, int rank) { wait_or_lose(town, rank, act(town, rank)); });
  scenario.victim = 1;
  return scenario;
}

/// Rank 1 gives up after any turn of its wait, or not at all, and never calls again. First it sends `n` messages that
/// nobody takes.
Scenario given_up(std::string name, int size, Reach reach, Act act, int n = 0) {
  return in_town(std::move(name), size, reach, [=](Town& town, int rank) {
    if (rank != 1) return wait_or_lose(town, rank, act(town, rank));
    std::vector<Communicator::WorkPtr> sends;
    for (int i = 0; i < n; ++i) sends.push_back(town.group(1).send(as_buffer(town.buffer(1, kMessage)), 0, 5));
    if (explorer().pause(true)) return town.give_up(1);  // before it has said anything
    town.wait_or_give_up(1, act(town, 1));
  });
}

constexpr std::size_t kClaimed = 4 << 15;  // the fewest elements that two ranks claim chunks of
constexpr std::size_t kStaged = 70'000;    // in several windows
constexpr std::size_t kRunsOver = 80'000;  // more windows than a stage holds
constexpr int kManyMessages = 19;          // more than a ring holds

}  // namespace

std::vector<std::function<Scenario()>> scenarios() {
  const std::vector<std::size_t> around = {kClaimed, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, kClaimed};
  return {
      [] { return now("now-line-2", 2, 3, 10); },
      [] { return now("now-line-3", 3, 3, 1); },
      [] { return now("now-far-2", 2, 14, 4); },
      [] { return now("now-block-2", 2, 300, 4); },
      [] { return now("now-posted-2", 2, 3000, 1); },
      [] { return now("now-dealt-2", 2, 6000, 2, Reach::shared); },
      [] { return bounded(2, now("now-staged-2", 2, 20'000, 2)); },
      [] { return bounded(1, now("now-block-3", 3, 300, 3)); },
      [] { return now_or_later("now-or-later-line-2", 2, 3, 1); },
      [] { return now_or_later("now-or-later-block-2", 2, 300, 1); },
      [] { return now_or_later("now-or-later-dealt-2", 2, 6000, 1, Reach::shared); },
      [] { return bounded(0, now_or_later("now-or-later-line-3", 3, 3, 1)); },
      [] { return queued("queue-2", 2, Reach::none, std::vector<std::size_t>(4, 3)); },
      [] { return bounded(2, queued("queue-slots-2", 2, Reach::none, std::vector<std::size_t>(18, 3))); },
      [] {
        return bounded(2, queued("queue-blocks-2", 2, Reach::none, std::vector<std::size_t>(Arena::kBlocks + 2, 300)));
      },
      [] { return bounded(2, queued("queue-3", 3, Reach::none, {3, 3})); },
      [] { return differing("differing-2", 2); },
      [] { return bounded(1, differing("differing-3", 3)); },
      [] { return bounded(4, queued("claimed-2", 2, Reach::shared, {kClaimed})); },
      [around] { return bounded(2, in_turn("claimed-again-2", 2, Reach::shared, around)); },
      [] { return bounded(1, queued("claimed-3", 3, Reach::shared, {6 << 15})); },
      [] { return queued("dealt-2", 2, Reach::shared, {6000}); },
      [] { return bounded(2, queued("dealt-3", 3, Reach::shared, {6000})); },
      [] { return bounded(1, queued("kernel-2", 2, Reach::kernel, {kClaimed * 9})); },
      [] { return bounded(2, queued("staged-2", 2, Reach::none, {kStaged})); },
      [] { return bounded(2, queued("staged-twice-2", 2, Reach::none, {30'000, 20'000})); },
      [] { return bounded(2, queued("staged-ahead-2", 2, Reach::none, {20'000, 20'000}, 20'000)); },
      [] { return bounded(2, one_late("staged-late-2", Reach::none, 20'000)); },
      [] { return bounded(0, queued("staged-3", 3, Reach::none, {kStaged})); },
      [] { return gathered("gathered-2", 2, Reach::shared, 20'000); },
      [] { return bounded(1, gathered("gathered-3", 3, Reach::kernel, 20'000)); },
      [] { return bounded(2, broadcasted("staged-broadcast-2", 2, Reach::none, kRunsOver, {0})); },
      [] { return bounded(2, broadcasted("staged-broadcasts-2", 2, Reach::none, 20'000, {0, 0, 1})); },
      [] { return bounded(2, broadcasted_late("staged-broadcast-root-late-2", Reach::none, 20'000, 0)); },
      [] { return bounded(2, broadcasted_late("staged-broadcast-late-2", Reach::none, 20'000, 1)); },
      [] { return bounded(1, broadcasted("ways-broadcast-2", 2, Reach::kernel, 70'000, {0, 0, 1, 0})); },
      [] { return bounded(0, broadcasted("staged-broadcast-3", 3, Reach::none, kRunsOver, {1})); },
      [] { return bounded(2, gathered("staged-gather-2", 2, Reach::none, kRunsOver)); },
      [] { return bounded(0, gathered("staged-gather-3", 3, Reach::none, 20'000)); },
      [] { return bounded(2, swapped("staged-swap-2", 2, Reach::none, kRunsOver)); },
      [] { return bounded(0, swapped("staged-swap-3", 3, Reach::none, 40'000)); },
      [] { return bounded(2, mailed("mailed-ring", Reach::none, kMessage, kManyMessages, false)); },
      [] { return mailed("mailed-both-ways", Reach::none, kMessage, 2, true); },
      [] { return bounded(3, mailed("mailed-offer", Reach::kernel, 30'000, 1, true)); },
      [] { return bounded(3, mailed("mailed-pieces", Reach::none, 100'000, 1, false)); },
      [] { return bounded(2, mailed_now("mailed-now-ring", kMessage, kManyMessages, false)); },
      [] { return mailed_now("mailed-now-both-ways", kMessage, 2, true); },
      [] { return bounded(2, exchanged_now("exchanged-now-pieces", Reach::kernel, 100'000)); },
      [] { return moved_now("moved-now-2", 2, 300, 4); },
      [] { return bounded(2, moved_ahead("moved-ahead-2", 2, 300, Arena::kBlocks + 2)); },
      [] { return bounded(1, moved_now("moved-now-3", 3, 300, 2)); },
      [] { return killed("killed-line-2", 2, Reach::none, an_all_reduce(3)); },
      [] { return bounded(2, killed("killed-claimed-2", 2, Reach::shared, an_all_reduce(kClaimed))); },
      [] { return bounded(2, killed("killed-staged-2", 2, Reach::none, an_all_reduce(20'000))); },
      [] { return bounded(2, killed("killed-staged-gather-2", 2, Reach::none, a_gather(20'000))); },
      [] { return killed("killed-gather-2", 2, Reach::kernel, a_gather(20'000)); },
      [] { return bounded(1, killed("killed-line-3", 3, Reach::none, an_all_reduce(3))); },
      [] { return bounded(0, killed("killed-dealt-3", 3, Reach::shared, an_all_reduce(6000))); },
      [] { return given_up("given-up-line-2", 2, Reach::none, an_all_reduce(3)); },
      [] { return given_up("given-up-dealt-2", 2, Reach::shared, an_all_reduce(6000)); },
      [] { return bounded(2, given_up("given-up-staged-2", 2, Reach::none, an_all_reduce(20'000))); },
      [] { return given_up("given-up-gather-2", 2, Reach::shared, a_gather(20'000)); },
      [] { return bounded(1, given_up("given-up-staged-gather-2", 2, Reach::none, a_gather(20'000))); },
      [] { return bounded(0, given_up("given-up-dealt-3", 3, Reach::shared, an_all_reduce(6000))); },
      [] { return bounded(1, given_up("given-up-full-ring-2", 2, Reach::none, an_all_reduce(3), kManyMessages)); },
  };
}

}  // namespace model
