#include <doctest/doctest.h>

#include <numeric>
#include <vector>

#include "nccl/packing_plan.h"

namespace samestep {
namespace {

using Sizes = std::vector<std::size_t>;

TEST_CASE("packing: small leaves share a bucket, each begins where a thread can move 16 bytes") {
  const auto rounds = plan_packing(Sizes{1, 16, 17, 0, 100, 3}, 100, 1 << 20);
  REQUIRE(rounds.size() == 1);
  CHECK(rounds[0].leaves == Sizes{0, 1, 2, 5});  // neither the empty one nor the one that is not below 100
  CHECK(rounds[0].starts == std::vector<std::uint32_t>{0, 1, 2, 4});
  CHECK(rounds[0].nbytes == 80);
}

TEST_CASE("packing: few leaves stay where they are") {
  CHECK(plan_packing(Sizes{4, 4, 4}, 100, 1 << 20).empty());
  CHECK(plan_packing(Sizes{4, 4, 4, 4}, 100, 1 << 20).size() == 1);
  CHECK(plan_packing(Sizes{4, 4, 4, 4}, 0, 1 << 20).empty());
  CHECK(plan_packing(Sizes{}, 100, 1 << 20).empty());
}

TEST_CASE("packing: a round holds 128 leaves and a bucket's bytes at most") {
  const auto many = plan_packing(Sizes(300, 16), 100, 1 << 20);
  REQUIRE(many.size() == 3);
  CHECK(many[0].leaves.size() == 128);
  CHECK(many[2].leaves.size() == 44);
  CHECK(many[2].leaves.front() == 256);
  const auto full = plan_packing(Sizes(9, 33), 64, 96);  // 48 bytes each
  REQUIRE(full.size() == 5);
  for (const PackedRound& round : full) CHECK(round.nbytes <= 96);
  CHECK(full[4].leaves == Sizes{8});
}

}  // namespace
}  // namespace samestep
