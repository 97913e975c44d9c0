#include <doctest/doctest.h>

#include <vector>

#include "collectives/segment_plan.h"

using samestep::Chunk;
using samestep::SegmentPlan;

namespace {

constexpr std::size_t kCounts[] = {0, 1, 2, 5, 15, 16, 17, 1000, 4096, 100'003};
constexpr std::size_t kPieces[] = {1, 7, 16, 64, 1000, 1 << 20};

}  // namespace

TEST_CASE("chunks of all segments and owners cover a buffer exactly once") {
  for (int n_ranks = 1; n_ranks <= 9; ++n_ranks) {
    for (const std::size_t count : kCounts) {
      for (const std::size_t piece : kPieces) {
        const SegmentPlan plan = SegmentPlan::of_buffer(n_ranks, count, piece);
        std::vector<int> covered(count);
        for (std::size_t segment = 0; segment < plan.segments(); ++segment) {
          for (int owner = 0; owner < n_ranks; ++owner) {
            const Chunk chunk = plan.chunk(segment, owner);
            REQUIRE(chunk.in_offset == chunk.out_offset);
            REQUIRE(chunk.count <= plan.longest());
            for (std::size_t i = 0; i < chunk.count; ++i) ++covered[chunk.in_offset + i];
          }
        }
        for (const int times : covered) REQUIRE(times == 1);
      }
    }
  }
}

TEST_CASE("played by 1 to 64 ranks in turns, owners reduce and distribute every element") {
  for (int n_ranks = 1; n_ranks <= 64; ++n_ranks) {
    constexpr std::size_t kCount = 2003;
    const SegmentPlan plan = SegmentPlan::of_buffer(n_ranks, kCount, 24);
    const auto n = static_cast<std::size_t>(n_ranks);
    std::vector<std::vector<long>> buffers(n, std::vector<long>(kCount));
    for (std::size_t rank = 0; rank < n; ++rank) {
      for (std::size_t i = 0; i < kCount; ++i) buffers[rank][i] = static_cast<long>(rank * rank + i);
    }
    std::vector<long> expected(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      for (const auto& buffer : buffers) expected[i] += buffer[i];
    }
    for (std::size_t segment = 0; segment < plan.segments(); ++segment) {
      for (int owner = 0; owner < n_ranks; ++owner) {
        const Chunk chunk = plan.chunk(segment, owner);
        for (std::size_t i = 0; i < chunk.count; ++i) {
          long sum = 0;
          for (const auto& buffer : buffers) sum += buffer[chunk.in_offset + i];
          for (auto& buffer : buffers) buffer[chunk.out_offset + i] = sum;
        }
      }
    }
    for (const auto& buffer : buffers) REQUIRE(buffer == expected);
  }
}

TEST_CASE("chunks of blocks lie in the owner's block and land at the same offset of its result") {
  for (int n_ranks = 1; n_ranks <= 5; ++n_ranks) {
    for (const std::size_t block : kCounts) {
      const SegmentPlan plan = SegmentPlan::of_blocks(n_ranks, block, 64);
      for (int owner = 0; owner < n_ranks; ++owner) {
        std::size_t next = 0;
        for (std::size_t segment = 0; segment < plan.segments(); ++segment) {
          const Chunk chunk = plan.chunk(segment, owner);
          REQUIRE(chunk.out_offset == next);
          REQUIRE(chunk.in_offset == static_cast<std::size_t>(owner) * block + next);
          REQUIRE(chunk.count <= plan.longest());
          next += chunk.count;
        }
        REQUIRE(next == block);
      }
    }
  }
}

TEST_CASE("no chunk is much longer than the piece size requested") {
  const SegmentPlan plan = SegmentPlan::of_buffer(4, 1'000'003, 4096);
  CHECK(plan.longest() <= 4096 + 16);
  CHECK(plan.segments() >= 1'000'003 / (4 * 4096));
}
