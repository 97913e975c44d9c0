#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "collective_calls.h"
#include "core/error.h"
#include "local_network.h"
#include "node_world.h"

using namespace samestep;

namespace {

Floats block_of(const Floats& from, std::size_t i, std::size_t count) {
  const auto begin = from.begin() + static_cast<std::ptrdiff_t>(i * count);
  return {begin, begin + static_cast<std::ptrdiff_t>(count)};
}

/// Every verb that moves data, with `count` elements for each rank, and what must come out.
void move_everything(Communicator& group, std::size_t count) {
  const int size = group.size(), rank = group.rank();
  const auto n = static_cast<std::size_t>(size), r = static_cast<std::size_t>(rank);
  Floats mine = contribution(rank, count), everyone(n * count), expected(n * count);
  for (std::size_t peer = 0; peer < n; ++peer) {
    const Floats theirs = contribution(static_cast<int>(peer), count);
    std::copy(theirs.begin(), theirs.end(), expected.begin() + static_cast<std::ptrdiff_t>(peer * count));
  }
  allgather(group, buffer(mine), buffer(everyone), shape(mine))->wait(soon());
  REQUIRE(everyone == expected);
  Floats blocks = contribution(rank, n * count), swapped(n * count);
  alltoall(group, buffer(blocks), buffer(swapped), shape(blocks))->wait(soon());
  for (std::size_t peer = 0; peer < n; ++peer) {
    REQUIRE(block_of(swapped, peer, count) == block_of(contribution(static_cast<int>(peer), n * count), r, count));
  }
  for (int root = 0; root < size; ++root) {
    Floats sent = contribution(rank, count);
    bcast(group, buffer(sent), root, shape(sent))->wait(soon());
    REQUIRE(sent == contribution(root, count));
    Floats gathered(rank == root ? n * count : 0), part(count);
    gather(group, buffer(mine), buffer(gathered), root, shape(mine))->wait(soon());
    if (rank == root) REQUIRE(gathered == expected);
    scatter(group, buffer(blocks), buffer(part), root, shape(part))->wait(soon());
    REQUIRE(part == block_of(contribution(root, n * count), r, count));
  }
  REQUIRE(mine == contribution(rank, count));
}

}  // namespace

TEST_CASE("node: long transfers take each path in turn, and arrive unchanged") {
  constexpr int kRepeats = 13;  // three of each of four paths, and more
  for (const int size : {2, 3, 4}) {
    NodeWorld world(size, Reach::cma);
    as_threads(size, [&](int rank) {
      const auto group = world.join(rank);
      // Inline, in one segment, in as many as a stage holds, in more: those on three ranks only, because they are slow
      // under the sanitizers.
      for (const std::size_t count : {std::size_t{4001}, std::size_t{16'385}, std::size_t{70'001}}) {
        if (count == 70'001 && size != 3) continue;
        for (int turn = 0; turn < kRepeats; ++turn) {
          // Another operation may be pending, which uses the stages as well.
          Floats other = contribution(rank, 70'001);
          const auto before = allreduce(*group, buffer(other), buffer(other), {}, shape(other));
          if ((turn + rank) % 3 != 0) before->wait(soon());
          move_everything(*group, count);
          before->wait(soon());
          REQUIRE(other == sum(size, other.size()));
        }
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: transfers that fill segments and stages to the byte, and one element more or less") {
  constexpr std::size_t kKiB = 1024 / sizeof(float);
  for (const Reach reach : {Reach::none, Reach::cma}) {
    NodeWorld world(2, reach);
    as_threads(2, [&](int rank) {
      const auto group = world.join(rank);
      for (const std::size_t kib : {36, 64, 128, 256, 512, 1024, 1100}) {
        for (const std::size_t count : {kib * kKiB - 1, kib * kKiB, kib * kKiB + 1}) {
          for (int turn = 0; turn < 3; ++turn) {
            Floats sent = contribution(rank, count);
            bcast(*group, buffer(sent), turn % 2, shape(sent))->wait(soon());
            REQUIRE(sent == contribution(turn % 2, count));
            Floats mine = contribution(rank, count), both(2 * count);
            allgather(*group, buffer(mine), buffer(both), shape(mine))->wait(soon());
            REQUIRE(block_of(both, 0, count) == contribution(0, count));
            REQUIRE(block_of(both, 1, count) == contribution(1, count));
          }
        }
      }
      group->close(soon());
    });
  }
}

TEST_CASE("node: some ranks' buffers are shared and others' are not") {
  constexpr std::size_t kCount = 50'001;
  const int size = 3;
  for (int odd = 0; odd < size; ++odd) {
    for (const bool odd_is_shared : {true, false}) {
      NodeWorld world(size, Reach::heap);
      as_threads(size, [&](int rank) {
        const auto group = world.join(rank);
        const bool shared = (rank == odd) == odd_is_shared;
        const auto heap = NodeWorld::host->heap();
        const std::size_t nbytes = static_cast<std::size_t>(size) * kCount * sizeof(float);
        const auto in_heap = allocate_shared(heap, nbytes);
        REQUIRE(in_heap != nullptr);
        Floats own(static_cast<std::size_t>(size) * kCount);
        auto* const data = shared ? reinterpret_cast<float*>(in_heap.get()) : own.data();
        for (int root = 0; root < size; ++root) {
          const Floats mine = contribution(rank, kCount);
          std::copy(mine.begin(), mine.end(), data);
          bcast(*group, {data, kCount, DType::float32}, root, Shape::flat(kCount))->wait(soon());
          REQUIRE(Floats(data, data + kCount) == contribution(root, kCount));
        }
        Floats mine = contribution(rank, kCount);
        allgather(*group, buffer(mine), {data, own.size(), DType::float32}, shape(mine))->wait(soon());
        for (int peer = 0; peer < size; ++peer) {
          const float* const theirs = data + static_cast<std::size_t>(peer) * kCount;
          REQUIRE(Floats(theirs, theirs + kCount) == contribution(peer, kCount));
        }
        barrier(*group)->wait(soon());
        group->close(soon());
      });
    }
  }
}

TEST_CASE("node: a rank that dies during long transfers is named by all others") {
  const int size = 3;
  for (const Reach reach : {Reach::none, Reach::cma}) {
    NodeWorld world(size, reach);
    as_threads(size, [&](int rank) {
      const auto group = world.join(rank);
      move_everything(*group, 50'001);
      if (rank == 2) return NodeWorld::host->die();
      Floats mine = contribution(rank, 300'001), everyone(mine.size() * static_cast<std::size_t>(size));
      try {
        allgather(*group, buffer(mine), buffer(everyone), shape(mine))->wait(soon());
        FAIL("rank 2 is dead");
      } catch (const PeerLostError& error) {
        CHECK(std::string(error.what()).find("rank 2 has left group 'world'") != std::string::npos);
      }
    });
  }
}
