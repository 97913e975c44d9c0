#include <doctest/doctest.h>

#include <atomic>
#include <latch>
#include <string>
#include <thread>

#include "communicator/fused.h"
#include "core/error.h"
#include "local_network.h"
#include "node_town.h"

using namespace samestep;

namespace {

Deadline soon() { return soon_enough(); }
using Town = NodeTown;
Buffer buffer(Floats& values) { return buffer_of(values); }
Shape shape(const Floats& values) { return shape_of(values); }

/// The verb, waited for at once.
void run_now(Communicator& group, const Call& call) {
  if (const auto work = group.now(call)) work->wait(soon());
}

// Every way through: in the line, behind it, staged in one and in several windows, dealt out, claimed.
constexpr std::size_t kLong = 20'003;  // longer ones take time under the sanitizers: on three ranks only
constexpr std::size_t kCounts[] = {0, 1, 2, 5, 26, 27, 300, 3000, 20'003, 100'003, 270'001};

}  // namespace

TEST_CASE("node: reductions and broadcasts by every way, in place, every root") {
  for (const Reach reach : {Reach::none, Reach::kernel, Reach::shared}) {
    for (const int size : {1, 2, 3, 4}) {
      Town town(size, reach);
      as_threads(size, [&](int rank) {
        const auto group = town.join(rank);
        for (const std::size_t count : kCounts) {
          if (count > kLong && size != 3) continue;
          Floats all = contribution(rank, count);
          group->all_reduce(buffer(all), buffer(all), {}, shape(all))->wait(soon());
          REQUIRE(all == sum(size, count));
          Floats now = contribution(rank, count), into(count);
          run_now(*group, {Verb::all_reduce, buffer(now), buffer(into), {}, -1, shape(now)});
          REQUIRE(into == sum(size, count));
          REQUIRE(now == contribution(rank, count));
          for (int root = count > kLong ? size - 1 : 0; root < size; ++root) {
            Floats one = contribution(rank, count);
            group->reduce(buffer(one), buffer(one), {}, root, shape(one))->wait(soon());
            REQUIRE(one == (rank == root ? sum(size, count) : contribution(rank, count)));
            Floats sent = contribution(rank, count);
            group->broadcast(buffer(sent), root, shape(sent))->wait(soon());
            REQUIRE(sent == contribution(root, count));
          }
        }
        group->close(soon());
      });
    }
  }
}

TEST_CASE("node: private memory takes one way and the other, ahead or not: the same bits") {
  constexpr int kTurns = 9;  // three of each way, then one of them
  for (const int size : {2, 3, 4}) {
    Town town(size, Reach::kernel);
    as_threads(size, [&](int rank) {
      const auto group = town.join(rank);
      for (const std::size_t count : {std::size_t{5000}, std::size_t{20'003}, std::size_t{70'001}}) {
        Floats mine(count), first, result(count);
        for (std::size_t i = 0; i < count; ++i)
          mine[i] = 1.0F / static_cast<float>(i + 3 * static_cast<std::size_t>(rank) + 1);
        for (int turn = 0; turn < kTurns; ++turn) {
          // Where another one is under way nothing is copied ahead.
          Floats other = contribution(rank, count);
          const bool both = (turn + rank) % 3 == 0;
          const auto before = group->all_reduce(buffer(other), buffer(other), {}, shape(other));
          if (!both) before->wait(soon());
          group->all_reduce(buffer(mine), buffer(result), {}, shape(mine))->wait(soon());
          before->wait(soon());
          REQUIRE(other == sum(size, count));
          if (turn == 0) first = result;
          REQUIRE(result == first);
          Floats blocks = contribution(rank, count * static_cast<std::size_t>(size)), block(count);
          group->reduce_scatter(buffer(blocks), buffer(block), {}, shape(block))->wait(soon());
          const Floats all = sum(size, blocks.size());
          REQUIRE(std::equal(block.begin(), block.end(),
                             all.begin() + static_cast<std::ptrdiff_t>(rank * static_cast<int>(count))));
        }
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: verbs done at once agree with those started, also where ranks choose differently") {
  for (const int size : {1, 2, 3, 4}) {
    Town town(size, Reach::kernel);
    as_threads(size, [&](int rank) {
      const auto group = town.join(rank);
      const auto n = static_cast<std::size_t>(size), r = static_cast<std::size_t>(rank);
      int turn = 0;
      const auto run = [&](const Call& call) {
        if ((rank + turn++) % 2 == 0) return run_now(*group, call);
        group->begin(call)->wait(soon());
      };
      const auto block = [](const Floats& from, std::size_t i, std::size_t count) {
        return Floats(from.begin() + static_cast<std::ptrdiff_t>(i * count),
                      from.begin() + static_cast<std::ptrdiff_t>((i + 1) * count));
      };
      for (const std::size_t count : kCounts) {
        if (count > kLong) continue;
        for (int again = 0; again < 3; ++again) {
          run({Verb::barrier});
          for (int root = 0; root < size; ++root) {
            Floats one = contribution(rank, count);
            run({Verb::reduce, buffer(one), buffer(one), {}, root, shape(one)});
            REQUIRE(one == (rank == root ? sum(size, count) : contribution(rank, count)));
            Floats sent = contribution(rank, count);
            run({Verb::broadcast, {}, buffer(sent), {}, root, shape(sent)});
            REQUIRE(sent == contribution(root, count));
          }
          Floats all = contribution(rank, count);
          run({Verb::all_reduce, buffer(all), buffer(all), {}, -1, shape(all)});
          REQUIRE(all == sum(size, count));
          Floats blocks = contribution(rank, n * count), mine(count), swapped(n * count), everyone(n * count);
          run({Verb::reduce_scatter, buffer(blocks), buffer(mine), {}, -1, shape(mine)});
          REQUIRE(mine == block(sum(size, n * count), r, count));
          run({Verb::all_to_all, buffer(blocks), buffer(swapped), {}, -1, shape(blocks)});
          run({Verb::all_gather, buffer(mine), buffer(everyone), {}, -1, shape(mine)});
          REQUIRE(everyone == sum(size, n * count));
          for (std::size_t i = 0; i < n; ++i) {
            REQUIRE(block(swapped, i, count) == block(contribution(static_cast<int>(i), n * count), r, count));
          }
        }
      }
      Floats odd = contribution(rank, static_cast<std::size_t>(2 + (rank == size - 1)));
      if (size > 1) {
        REQUIRE_THROWS_AS(run_now(*group, {Verb::broadcast, {}, buffer(odd), {}, 0, shape(odd)}), MismatchError);
        REQUIRE_THROWS_AS(run_now(*group, {Verb::broadcast, {}, buffer(odd), {}, size, shape(odd)}),
                          InvalidArgumentError);
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: many buffers fused, packed and where they lie, again and again") {
  constexpr std::size_t kLengths[] = {0, 1, 70'001, 5, 140'000, 33'000, 0};  // short, across pieces, and a large one
  for (const Reach reach : {Reach::kernel, Reach::shared}) {
    for (const int size : {1, 2, 3}) {
      Town town(size, reach);
      as_threads(size, [&](int rank) {
        const auto group = town.join(rank);
        Fused fused(group);
        for (int root = 0; root < size; ++root) {
          std::vector<Floats> sent, summed;
          std::vector<Buffer> to_send, to_sum;
          for (const std::size_t length : kLengths) {
            sent.push_back(contribution(rank, length));
            summed.push_back(contribution(rank, length));
          }
          for (Floats& values : sent) to_send.push_back(buffer(values));
          for (Floats& values : summed) to_sum.push_back(buffer(values));
          fused.broadcast(to_send, root, soon());
          fused.all_reduce(to_sum, {}, soon());
          for (std::size_t i = 0; i < std::size(kLengths); ++i) {
            REQUIRE(sent[i] == contribution(root, kLengths[i]));
            REQUIRE(summed[i] == sum(size, kLengths[i]));
          }
        }
        group->close(soon());
      });
    }
  }
}

TEST_CASE("node: reduce_scatter, allgather and alltoall by every way") {
  for (const Reach reach : {Reach::none, Reach::kernel, Reach::shared}) {
    for (const int size : {1, 2, 3, 4}) {
      Town town(size, reach);
      as_threads(size, [&](int rank) {
        const auto group = town.join(rank);
        const auto n = static_cast<std::size_t>(size), r = static_cast<std::size_t>(rank);
        for (const std::size_t count : kCounts) {
          if (count > kLong && size != 3) continue;
          Floats blocks = contribution(rank, n * count), mine(count);
          group->reduce_scatter(buffer(blocks), buffer(mine), {}, shape(mine))->wait(soon());
          const Floats total = sum(size, n * count);
          REQUIRE(std::equal(mine.begin(), mine.end(), total.begin() + static_cast<std::ptrdiff_t>(r * count)));

          Floats sent = contribution(rank, count), everyone(n * count);
          group->all_gather(buffer(sent), buffer(everyone), shape(sent))->wait(soon());
          Floats swapped(n * count);
          group->all_to_all(buffer(blocks), buffer(swapped), shape(blocks))->wait(soon());
          Floats all_parts(n * count), all_blocks(n * count);
          for (std::size_t peer = 0; peer < n; ++peer) {
            for (std::size_t i = 0; i < count; ++i) {
              all_parts[peer * count + i] = element(static_cast<int>(peer), i);
              all_blocks[peer * count + i] = element(static_cast<int>(peer), r * count + i);
            }
          }
          REQUIRE(everyone == all_parts);
          REQUIRE(swapped == all_blocks);
        }
        group->close(soon());
      });
    }
  }
}

TEST_CASE("node: each rank's factor counts in every way") {
  for (const Reach reach : {Reach::none, Reach::kernel, Reach::shared}) {
    const int size = 3;
    Town town(size, reach);
    as_threads(size, [&](int rank) {
      const auto group = town.join(rank);
      for (const std::size_t count : {std::size_t{1}, std::size_t{300}, std::size_t{100'003}, std::size_t{400'007}}) {
        Floats values(count, 1.0F);
        const Reduction reduction{ReduceOp::premul, static_cast<double>(1 << rank)};
        group->all_reduce(buffer(values), buffer(values), reduction, shape(values))->wait(soon());
        REQUIRE(values == Floats(count, 7.0F));
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: more operations under way than there are slots, finished in any order") {
  for (const Reach reach : {Reach::none, Reach::kernel, Reach::shared}) {
    const int size = 3;
    Town town(size, reach);
    as_threads(size, [&](int rank) {
      const auto group = town.join(rank);
      constexpr std::size_t kMany = 40;
      std::vector<Floats> values;
      std::vector<Communicator::WorkPtr> works;
      for (std::size_t i = 0; i < kMany; ++i) values.push_back(contribution(rank, 1 + 1997 * (i * i % 40)));
      for (Floats& v : values) works.push_back(group->all_reduce(buffer(v), buffer(v), {}, shape(v)));
      for (std::size_t i = kMany; i-- > 0;) {
        const std::size_t at = (i * 7) % kMany;
        works[at]->wait(soon());
        REQUIRE(values[at] == sum(size, values[at].size()));
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: a difference raises the same text on every rank, and the group goes on") {
  const int size = 3;
  for (const std::size_t count : {std::size_t{3}, std::size_t{2000}}) {
    Town town(size, Reach::kernel);
    std::vector<std::string> texts(size);
    as_threads(size, [&](int rank) {
      const auto group = town.join(rank);
      Floats odd(rank == 1 ? count + 1 : count);
      try {
        if (const auto work = group->now({Verb::all_reduce, buffer(odd), buffer(odd), {}, -1, shape(odd)}))
          work->wait(soon());
      } catch (const MismatchError& error) {
        texts[static_cast<std::size_t>(rank)] = error.what();
      }
      Floats all = contribution(rank, 2000);
      group->all_reduce(buffer(all), buffer(all), {}, shape(all))->wait(soon());
      REQUIRE(all == sum(size, 2000));
      group->close(soon());
    });
    CHECK(texts[0].find("float32[" + std::to_string(count + 1) + "]") != std::string::npos);
    CHECK(texts[0] == texts[1]);
    CHECK(texts[1] == texts[2]);
  }
}

TEST_CASE("node: a rank that has died is named by all others; what it took part in ends well") {
  const int size = 3;
  Town town(size, Reach::none);
  as_threads(size, [&](int rank) {
    const auto group = town.join(rank);
    Floats all = contribution(rank, 3);
    group->all_reduce(buffer(all), buffer(all), {}, shape(all))->wait(soon());
    REQUIRE(all == sum(size, 3));
    if (rank == 2) return Town::host->die();
    try {
      group->barrier()->wait(soon());
      FAIL("rank 2 is dead");
    } catch (const PeerLostError& error) {
      CHECK(std::string(error.what()).find("rank 2 has left group 'world'") != std::string::npos);
    }
    CHECK_THROWS_AS(group->barrier()->wait(soon()), PeerLostError);
  });
}

TEST_CASE("node: of ranks that are found dead at once each is named") {
  Town town(3, Reach::none);
  std::latch dead(2);
  as_threads(3, [&](int rank) {
    const auto group = town.join(rank);
    if (rank != 1) {
      Town::host->die();
      dead.count_down();
      return;
    }
    dead.wait();
    try {
      group->barrier()->wait(soon());
      FAIL("the others are dead");
    } catch (const PeerLostError& error) {
      const std::string text = error.what();
      CHECK(text.find("rank 0 has left group 'world': its process has ended; rank 2 has left") != std::string::npos);
    }
  });
}

TEST_CASE("node: a rank that gives up behind messages that nobody takes is named, with its reason") {
  Town town(2, Reach::none);
  std::latch given_up(1);
  as_threads(2, [&](int rank) {
    const auto group = town.join(rank);
    Floats values(1000);
    if (rank == 1) {
      for (int i = 0; i < 80; ++i) group->send(buffer(values), 0, 5);  // more than its ring holds
      group->abandon(std::make_exception_ptr(TimeoutError("too late")), "its patience ended");
      given_up.count_down();
      return;
    }
    given_up.wait();
    try {
      group->barrier()->wait(Deadline::after(Seconds(20)));
      FAIL("rank 1 has given up");
    } catch (const PeerLostError& error) {
      CHECK(std::string(error.what()).find("rank 1 has left group 'world': its patience ended") != std::string::npos);
    }
  });
}

TEST_CASE("node: point to point: order, any source, any tag, long bodies in both ways, differing counts") {
  for (const Reach reach : {Reach::none, Reach::kernel}) {
    const int size = 3;
    Town town(size, reach);
    as_threads(size, [&](int rank) {
      const auto group = town.join(rank);
      for (const std::size_t count : {std::size_t{0}, std::size_t{3}, std::size_t{5000}, std::size_t{200'000}}) {
        if (rank != 0) {
          Floats values = contribution(rank, count);
          group->send(buffer(values), 0, rank)->wait(soon());
          group->send(buffer(values), 0, 7)->wait(soon());
        } else {
          for (int source = size - 1; source > 0; --source) {
            Floats values(count);
            const auto work = group->recv(buffer(values), source, kAnyTag);
            work->wait(soon());
            REQUIRE(work->status().tag == source);
            REQUIRE(values == contribution(source, count));
          }
          for (int i = 1; i < size; ++i) {
            Floats values(count + 1);
            const auto work = group->recv(buffer(values), kAnySource, 7);
            REQUIRE_THROWS_AS(work->wait(soon()), MismatchError);
          }
        }
        group->barrier()->wait(soon());
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: long messages of senders that wait, through the kernel and in pieces, in turn: the same bits") {
  for (const bool oversubscribed : {true, false}) {
    const int size = 3;
    Town town(size, Reach::kernel, oversubscribed);
    as_threads(size, [&](int rank) {
      const auto group = town.join(rank);
      const int right = (rank + 1) % size, left = (rank + size - 1) % size;
      // More than lies in a ring; pieces of equal lengths and not; too long for pieces.
      for (const std::size_t count : {std::size_t{64 << 10}, std::size_t{200'003}, std::size_t{(2 << 20) / 4 + 1}}) {
        for (int turn = 0; turn < 7; ++turn) {  // three of each way, and one more
          Floats mine = contribution(rank + turn, count), theirs(count);
          Status status;
          Communicator::WorkPtr sending;
          const Buffer in = buffer(mine);
          const auto receiving = group->sendrecv_now(in, right, buffer(theirs), left, status, sending);
          if (receiving) receiving->wait(soon());
          if (sending) sending->wait(soon());
          REQUIRE(theirs == contribution(left + turn, count));
        }
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: a long message is pulled where one of its ends does not wait") {
  constexpr std::size_t kCount = 200'000;
  Town town(2, Reach::kernel);
  as_threads(2, [&](int rank) {
    const auto group = town.join(rank);
    Floats values = contribution(0, kCount), taken(kCount);
    Status status;
    const auto wait = [](const Communicator::WorkPtr& work) {
      if (work) work->wait(soon());
    };
    if (rank == 0) {
      wait(group->send_now(buffer(values), 1, 7));
      wait(group->send(buffer(values), 1, 8));
    } else {
      wait(group->recv(buffer(taken), 0, 7));
      REQUIRE(taken == values);
      REQUIRE(Town::host->n_pulls == 1);
      std::fill(taken.begin(), taken.end(), -1.0F);
      wait(group->recv_now(buffer(taken), 0, 8, status));
      REQUIRE(taken == values);
      REQUIRE(Town::host->n_pulls == 2);
    }
    group->barrier()->wait(soon());
    group->close(soon());
  });
}

TEST_CASE("node: groups of some ranks, in another order, beside each other") {
  const int size = 4;
  Town town(size, Reach::kernel);
  as_threads(size, [&](int rank) {
    const auto group = town.join(rank);
    const auto half = group->split(rank % 2, -rank, soon());
    REQUIRE(half->size() == 2);
    REQUIRE(half->rank() == (rank < 2 ? 1 : 0));
    Floats values(5000, static_cast<float>(rank));
    half->all_reduce(buffer(values), buffer(values), {}, shape(values))->wait(soon());
    REQUIRE(values == Floats(5000, rank % 2 == 0 ? 2.0F : 4.0F));
    half->close(soon());
    group->close(soon());
  });
}
