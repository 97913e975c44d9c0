#include <doctest/doctest.h>

#include <atomic>
#include <latch>
#include <string>
#include <thread>

#include "collective_calls.h"
#include "communicator/fused_collectives.h"
#include "core/error.h"
#include "local_network.h"
#include "node_world.h"
#include "transport_laws.h"

using namespace samestep;

namespace {

/// The blocking collective.
void run_blocking(Communicator& group, const CollectiveArgs& call) {
  if (const auto work = group.run(call)) work->wait(soon());
}

// For every path: in the header slot, in a block, staged in one and in several segments, static and dynamic chunks.
constexpr std::size_t kLong = 20'003;  // longer ones take time under the sanitizers: on three ranks only
constexpr std::size_t kCounts[] = {0, 1, 2, 5, 26, 27, 300, 3000, 20'003, 100'003, 270'001};

}  // namespace

TEST_CASE("node: reductions and broadcasts by every path, in place, every root") {
  for (const Reach reach : {Reach::none, Reach::cma, Reach::shared}) {
    for (const int size : {1, 2, 3, 4}) {
      NodeWorld world(size, reach);
      as_threads(size, [&](int rank) {
        const auto group = world.join(rank);
        for (const std::size_t count : kCounts) {
          if (count > kLong && size != 3) continue;
          Floats all = contribution(rank, count);
          allreduce(*group, buffer(all), buffer(all), {}, shape(all))->wait(soon());
          REQUIRE(all == sum(size, count));
          Floats now = contribution(rank, count), into(count);
          run_blocking(*group, {CollectiveType::allreduce, buffer(now), buffer(into), {}, -1, shape(now)});
          REQUIRE(into == sum(size, count));
          REQUIRE(now == contribution(rank, count));
          for (int root = count > kLong ? size - 1 : 0; root < size; ++root) {
            Floats one = contribution(rank, count);
            reduce(*group, buffer(one), buffer(one), {}, root, shape(one))->wait(soon());
            REQUIRE(one == (rank == root ? sum(size, count) : contribution(rank, count)));
            Floats sent = contribution(rank, count);
            bcast(*group, buffer(sent), root, shape(sent))->wait(soon());
            REQUIRE(sent == contribution(root, count));
          }
        }
        group->close(soon());
      });
    }
  }
}

TEST_CASE("node: non-shared buffers take either path, prestaged or not: the same bits") {
  constexpr int kRepeats = 9;  // three of each path, then the faster one
  for (const int size : {2, 3, 4}) {
    NodeWorld world(size, Reach::cma);
    as_threads(size, [&](int rank) {
      const auto group = world.join(rank);
      for (const std::size_t count : {std::size_t{5000}, std::size_t{20'003}, std::size_t{70'001}}) {
        Floats mine(count), first, result(count);
        for (std::size_t i = 0; i < count; ++i)
          mine[i] = 1.0F / static_cast<float>(i + 3 * static_cast<std::size_t>(rank) + 1);
        for (int turn = 0; turn < kRepeats; ++turn) {
          // While another operation is pending nothing is prestaged.
          Floats other = contribution(rank, count);
          const bool both = (turn + rank) % 3 == 0;
          const auto before = allreduce(*group, buffer(other), buffer(other), {}, shape(other));
          if (!both) before->wait(soon());
          allreduce(*group, buffer(mine), buffer(result), {}, shape(mine))->wait(soon());
          before->wait(soon());
          REQUIRE(other == sum(size, count));
          if (turn == 0) first = result;
          REQUIRE(result == first);
          Floats blocks = contribution(rank, count * static_cast<std::size_t>(size)), block(count);
          reduce_scatter(*group, buffer(blocks), buffer(block), {}, shape(block))->wait(soon());
          const Floats all = sum(size, blocks.size());
          REQUIRE(std::equal(block.begin(), block.end(),
                             all.begin() + static_cast<std::ptrdiff_t>(rank * static_cast<int>(count))));
        }
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: blocking collectives agree with started ones, also where ranks mix them") {
  for (const int size : {1, 2, 3, 4}) {
    NodeWorld world(size, Reach::cma);
    as_threads(size, [&](int rank) {
      const auto group = world.join(rank);
      const auto n = static_cast<std::size_t>(size), r = static_cast<std::size_t>(rank);
      int turn = 0;
      const auto run = [&](const CollectiveArgs& call) {
        if ((rank + turn++) % 2 == 0) return run_blocking(*group, call);
        group->start(call)->wait(soon());
      };
      const auto block = [](const Floats& from, std::size_t i, std::size_t count) {
        return Floats(from.begin() + static_cast<std::ptrdiff_t>(i * count),
                      from.begin() + static_cast<std::ptrdiff_t>((i + 1) * count));
      };
      for (const std::size_t count : kCounts) {
        if (count > kLong) continue;
        for (int again = 0; again < 3; ++again) {
          run({CollectiveType::barrier});
          for (int root = 0; root < size; ++root) {
            Floats one = contribution(rank, count);
            run({CollectiveType::reduce, buffer(one), buffer(one), {}, root, shape(one)});
            REQUIRE(one == (rank == root ? sum(size, count) : contribution(rank, count)));
            Floats sent = contribution(rank, count);
            run({CollectiveType::bcast, {}, buffer(sent), {}, root, shape(sent)});
            REQUIRE(sent == contribution(root, count));
          }
          Floats all = contribution(rank, count);
          run({CollectiveType::allreduce, buffer(all), buffer(all), {}, -1, shape(all)});
          REQUIRE(all == sum(size, count));
          Floats blocks = contribution(rank, n * count), mine(count), swapped(n * count), everyone(n * count);
          run({CollectiveType::reduce_scatter, buffer(blocks), buffer(mine), {}, -1, shape(mine)});
          REQUIRE(mine == block(sum(size, n * count), r, count));
          run({CollectiveType::alltoall, buffer(blocks), buffer(swapped), {}, -1, shape(blocks)});
          run({CollectiveType::allgather, buffer(mine), buffer(everyone), {}, -1, shape(mine)});
          REQUIRE(everyone == sum(size, n * count));
          for (std::size_t i = 0; i < n; ++i) {
            REQUIRE(block(swapped, i, count) == block(contribution(static_cast<int>(i), n * count), r, count));
          }
        }
      }
      Floats odd = contribution(rank, static_cast<std::size_t>(2 + (rank == size - 1)));
      if (size > 1) {
        REQUIRE_THROWS_AS(run_blocking(*group, {CollectiveType::bcast, {}, buffer(odd), {}, 0, shape(odd)}),
                          MismatchError);
        REQUIRE_THROWS_AS(run_blocking(*group, {CollectiveType::bcast, {}, buffer(odd), {}, size, shape(odd)}),
                          InvalidArgumentError);
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: many buffers fused, packed and in place, repeatedly") {
  constexpr std::size_t kLengths[] = {0, 1, 70'001, 5, 140'000, 33'000, 0};  // short, across pieces, and a large one
  for (const Reach reach : {Reach::cma, Reach::shared}) {
    for (const int size : {1, 2, 3}) {
      NodeWorld world(size, reach);
      as_threads(size, [&](int rank) {
        const auto group = world.join(rank);
        FusedCollectives fused(group);
        for (int root = 0; root < size; ++root) {
          std::vector<Floats> sent, summed;
          std::vector<Buffer> to_send, to_sum;
          for (const std::size_t length : kLengths) {
            sent.push_back(contribution(rank, length));
            summed.push_back(contribution(rank, length));
          }
          for (Floats& values : sent) to_send.push_back(buffer(values));
          for (Floats& values : summed) to_sum.push_back(buffer(values));
          fused.bcast(to_send, root, soon());
          fused.allreduce(to_sum, {}, soon());
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

TEST_CASE("node: reduce_scatter, allgather and alltoall by every path") {
  for (const Reach reach : {Reach::none, Reach::cma, Reach::shared}) {
    for (const int size : {1, 2, 3, 4}) {
      NodeWorld world(size, reach);
      as_threads(size, [&](int rank) {
        const auto group = world.join(rank);
        const auto n = static_cast<std::size_t>(size), r = static_cast<std::size_t>(rank);
        for (const std::size_t count : kCounts) {
          if (count > kLong && size != 3) continue;
          Floats blocks = contribution(rank, n * count), mine(count);
          reduce_scatter(*group, buffer(blocks), buffer(mine), {}, shape(mine))->wait(soon());
          const Floats total = sum(size, n * count);
          REQUIRE(std::equal(mine.begin(), mine.end(), total.begin() + static_cast<std::ptrdiff_t>(r * count)));

          Floats sent = contribution(rank, count), everyone(n * count);
          allgather(*group, buffer(sent), buffer(everyone), shape(sent))->wait(soon());
          Floats swapped(n * count);
          alltoall(*group, buffer(blocks), buffer(swapped), shape(blocks))->wait(soon());
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

TEST_CASE("node: each rank's factor counts on every path") {
  for (const Reach reach : {Reach::none, Reach::cma, Reach::shared}) {
    const int size = 3;
    NodeWorld world(size, reach);
    as_threads(size, [&](int rank) {
      const auto group = world.join(rank);
      for (const std::size_t count : {std::size_t{1}, std::size_t{300}, std::size_t{100'003}, std::size_t{400'007}}) {
        Floats values(count, 1.0F);
        const Reduction reduction{ReduceOp::premul, static_cast<double>(1 << rank)};
        allreduce(*group, buffer(values), buffer(values), reduction, shape(values))->wait(soon());
        REQUIRE(values == Floats(count, 7.0F));
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: more pending operations than there are slots, finished in any order") {
  for (const Reach reach : {Reach::none, Reach::cma, Reach::shared}) {
    const int size = 3;
    NodeWorld world(size, reach);
    as_threads(size, [&](int rank) {
      const auto group = world.join(rank);
      constexpr std::size_t kMany = 40;
      std::vector<Floats> values;
      std::vector<Communicator::WorkPtr> works;
      for (std::size_t i = 0; i < kMany; ++i) values.push_back(contribution(rank, 1 + 1997 * (i * i % 40)));
      for (Floats& v : values) works.push_back(allreduce(*group, buffer(v), buffer(v), {}, shape(v)));
      for (std::size_t i = kMany; i-- > 0;) {
        const std::size_t at = (i * 7) % kMany;
        works[at]->wait(soon());
        REQUIRE(values[at] == sum(size, values[at].size()));
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: a difference raises the same text on every rank, and the group stays usable") {
  for (const std::size_t count : {std::size_t{3}, std::size_t{2000}}) {
    NodeWorld world(3, Reach::cma);
    check_that_a_difference_is_reported(world, 3, count);
  }
}

TEST_CASE("node: a rank that has died is named by all others; what it has joined succeeds") {
  const int size = 3;
  NodeWorld world(size, Reach::none);
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    Floats all = contribution(rank, 3);
    allreduce(*group, buffer(all), buffer(all), {}, shape(all))->wait(soon());
    REQUIRE(all == sum(size, 3));
    if (rank == 2) return NodeWorld::host->die();
    try {
      barrier(*group)->wait(soon());
      FAIL("rank 2 is dead");
    } catch (const PeerLostError& error) {
      CHECK(std::string(error.what()).find("rank 2 has left group 'world'") != std::string::npos);
    }
    CHECK_THROWS_AS(barrier(*group)->wait(soon()), PeerLostError);
  });
}

TEST_CASE("node: what all others have finished ends well on a rank that gives up before it has looked") {
  NodeWorld world(2, Reach::none);
  std::latch started(1), finished(1);
  as_threads(2, [&](int rank) {
    const auto group = world.join(rank);
    Floats values = contribution(rank, 3);
    if (rank == 1) started.wait();
    const auto work = allreduce(*group, buffer(values), buffer(values), {}, shape(values));
    if (rank == 0) started.count_down();
    if (rank == 1) {
      work->wait(soon());
      return finished.count_down();
    }
    finished.wait();
    // As where another group of this rank has found that rank 1 has ended since.
    group->abandon(std::make_exception_ptr(PeerLostError("rank 1 has left")), "rank 1 has left");
    work->wait(soon());
    CHECK(values == sum(2, 3));
    CHECK_THROWS_AS(barrier(*group)->wait(soon()), PeerLostError);
  });
}

TEST_CASE("node: of ranks that are found dead together one is named, and the others are counted") {
  NodeWorld world(3, Reach::none);
  std::latch dead(2);
  as_threads(3, [&](int rank) {
    const auto group = world.join(rank);
    if (rank != 1) {
      NodeWorld::host->die();
      dead.count_down();
      return;
    }
    dead.wait();
    try {
      barrier(*group)->wait(soon());
      FAIL("the others are dead");
    } catch (const PeerLostError& error) {
      const std::string text = error.what();
      CHECK(text.find("rank 0 has left group 'world': its process has ended; 1 other rank has left since") !=
            std::string::npos);
    }
  });
}

TEST_CASE("node: a rank that leaves behind messages that nobody receives is named, with its reason") {
  NodeWorld world(2, Reach::none);
  std::latch given_up(1);
  as_threads(2, [&](int rank) {
    const auto group = world.join(rank);
    Floats values(1000);
    if (rank == 1) {
      for (int i = 0; i < 80; ++i) group->send(buffer(values), 0, 5);  // more than its ring holds
      group->abandon(std::make_exception_ptr(TimeoutError("too late")), "its patience ended");
      given_up.count_down();
      return;
    }
    given_up.wait();
    try {
      barrier(*group)->wait(Deadline::after(Seconds(20)));
      FAIL("rank 1 has given up");
    } catch (const PeerLostError& error) {
      CHECK(std::string(error.what()).find("rank 1 has left group 'world': its patience ended") != std::string::npos);
    }
  });
}

TEST_CASE("node: point to point: order, any source, any tag, long bodies, differing counts") {
  for (const Reach reach : {Reach::none, Reach::cma}) {
    NodeWorld world(3, reach);
    check_point_to_point(world, 3, {0, 3, 5000, 200'000});
  }
}

TEST_CASE("node: long messages are read by CMA, or sent in data frames if CMA is refused: the same bits") {
  struct Case {
    Reach reach;
    bool refuses;  // rank 0 alone
  };
  for (const auto& [reach, refuses] : {Case{Reach::cma, false}, Case{Reach::cma, true}, Case{Reach::none, false}}) {
    const int size = 3;
    NodeWorld world(size, reach);
    as_threads(size, [&, reach = reach, refuses = refuses](int rank) {
      const auto group = world.join(rank);
      const bool reads = reach == Reach::cma && !(refuses && rank == 0);
      NodeWorld::host->refuses = !reads;
      const int right = (rank + 1) % size, left = (rank + size - 1) % size;
      int n_reads = 0;
      // More than lies in a ring; frames of equal lengths and not; more than all frames of a ring.
      for (const std::size_t count : {std::size_t{64 << 10}, std::size_t{200'003}, std::size_t{(2 << 20) / 4 + 1}}) {
        for (int turn = 0; turn < 3; ++turn) {
          Floats mine = contribution(rank + turn, count), theirs(count);
          Status status;
          Communicator::WorkPtr sending;
          const Buffer in = buffer(mine);
          const auto receiving = group->run({in, right}, {buffer(theirs), left}, status, sending);
          if (sending) sending->wait(soon());
          std::fill(mine.begin(), mine.end(), -1.0F);  // it is the caller's again, whatever the receiver has seen
          if (receiving) receiving->wait(soon());
          REQUIRE(theirs == contribution(left + turn, count));
          REQUIRE(NodeWorld::host->n_reads == (reads ? ++n_reads : 0));
        }
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: groups of some ranks, in another order, beside each other") {
  const int size = 4;
  NodeWorld world(size, Reach::cma);
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    const auto half = group->split(rank % 2, -rank, soon());
    REQUIRE(half->size() == 2);
    REQUIRE(half->rank() == (rank < 2 ? 1 : 0));
    Floats values(5000, static_cast<float>(rank));
    allreduce(*half, buffer(values), buffer(values), {}, shape(values))->wait(soon());
    REQUIRE(values == Floats(5000, rank % 2 == 0 ? 2.0F : 4.0F));
    half->close(soon());
    group->close(soon());
  });
}
