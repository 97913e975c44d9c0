#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "shm/block_pool.h"

using namespace samestep;

namespace {

constexpr std::size_t kPage = BlockPool::kPage;
constexpr std::uint64_t kSecond = std::uint64_t{1} << BlockPool::kOffsetBits;  // where the second range begins

}  // namespace

TEST_CASE("block pool: sizes are whole pages, at most an eighth above what is asked for, and never fall") {
  std::size_t before = 0;
  for (std::size_t nbytes = 1; nbytes <= BlockPool::kMaxBytes; nbytes += 1 + nbytes / 7) {
    const std::size_t size = BlockPool::size_for(nbytes);
    REQUIRE(size >= nbytes);
    REQUIRE(size % kPage == 0);
    REQUIRE(size < nbytes + nbytes / 8 + kPage);
    REQUIRE(size >= before);
    REQUIRE(BlockPool::size_for(size) == size);
    before = size;
  }
  CHECK(BlockPool::size_for(0) == kPage);
  CHECK(BlockPool::size_for(std::size_t{1} << 20) == std::size_t{1} << 20);
  CHECK(BlockPool::size_for(BlockPool::kMaxBytes) == BlockPool::kMaxBytes);
}

TEST_CASE("block pool: the block freed last is the next of its size") {
  BlockPool pool;
  pool.add(0, 64 * kPage);
  const auto a = pool.take(3 * kPage), b = pool.take(3 * kPage);
  REQUIRE(a);
  REQUIRE(b);
  CHECK(pool.size_at(*a) == 3 * kPage);
  CHECK(pool.give(*a));
  CHECK(pool.give(*b));
  CHECK(pool.size_at(*b) == 0);
  CHECK(pool.take(3 * kPage - 1) == b);
  CHECK(pool.take(2 * kPage + 1) == a);
}

TEST_CASE("block pool: what begins no block in use is refused") {
  BlockPool pool;
  pool.add(0, 8 * kPage);
  CHECK_FALSE(pool.give(0));
  const auto block = pool.take(2 * kPage);
  REQUIRE(block);
  CHECK_FALSE(pool.give(*block + kPage));
  CHECK(pool.give(*block));
  CHECK_FALSE(pool.give(*block));
  CHECK(pool.usage().available == 8 * kPage);
}

TEST_CASE("block pool: blocks of one size become blocks of another") {
  BlockPool pool;
  pool.add(0, 64 * kPage);
  std::vector<std::uint64_t> small;
  while (const auto block = pool.take(kPage)) small.push_back(*block);
  CHECK(small.size() == 64);
  for (const std::uint64_t block : small) pool.give(block);
  CHECK(pool.take(64 * kPage) == std::uint64_t{0});
  CHECK_FALSE(pool.take(1));
}

TEST_CASE("block pool: any order of taking and giving keeps blocks disjoint and loses nothing") {
  std::mt19937 random(7);
  BlockPool pool;
  const std::map<std::uint64_t, std::size_t> ranges = {{0, 1000 * kPage}, {kSecond, 3000 * kPage}};
  for (const auto& [handle, nbytes] : ranges) pool.add(handle, nbytes);
  std::map<std::uint64_t, std::size_t> model;  // in use
  for (int step = 0; step < 20'000; ++step) {
    if (random() % 5 < 3) {
      const std::size_t nbytes = 1 + random() % (std::size_t{kPage} << (random() % 8));
      const auto block = pool.take(nbytes);
      if (!block) continue;
      const std::size_t size = BlockPool::size_for(nbytes);
      const auto next = model.lower_bound(*block);
      REQUIRE((next == model.end() || *block + size <= next->first));
      if (next != model.begin()) {
        const auto before = std::prev(next);
        REQUIRE(before->first + before->second <= *block);
      }
      const auto range = std::prev(ranges.upper_bound(*block));
      REQUIRE(*block + size <= range->first + range->second);
      model.emplace(*block, size);
    } else if (!model.empty()) {
      const auto chosen = std::next(model.begin(), static_cast<std::ptrdiff_t>(random() % model.size()));
      REQUIRE(pool.give(chosen->first));
      model.erase(chosen);
    }
    std::size_t used = 0;
    if (step % 1000 == 0) {
      for (const auto& [handle, nbytes] : model) used += nbytes;
      REQUIRE(pool.usage().used == used);
      REQUIRE(pool.usage().blocks == model.size());
      REQUIRE(pool.usage().available == 4000 * kPage - used);
    }
  }
  for (const auto& [handle, nbytes] : model) pool.give(handle);
  const auto left = pool.free_ranges();
  REQUIRE(left.size() == 2);
  CHECK(left[0].handle == kSecond);
  CHECK(left[0].nbytes == 3000 * kPage);
  CHECK(left[1].handle == 0);
  CHECK(left[1].nbytes == 1000 * kPage);
}

TEST_CASE("block pool: what a child sees is held until that child has ended") {
  BlockPool pool;
  pool.add(0, 4 * kPage);
  const auto before = pool.take(kPage), kept = pool.take(kPage);
  const std::uint32_t child = pool.note_fork();
  const auto after = pool.take(kPage);
  REQUIRE(before);
  REQUIRE(kept);
  REQUIRE(after);
  CHECK(pool.give(*before));
  CHECK(pool.give(*after));  // made after the fork: the child knows nothing of it
  CHECK(pool.usage().held == kPage);
  CHECK(pool.take(kPage) == after);
  CHECK(pool.take(kPage));
  CHECK_FALSE(pool.take(kPage));

  const std::uint32_t second = pool.note_fork();  // `before` was freed by then
  pool.set_children(std::vector{second});
  CHECK(pool.usage().held == 0);
  CHECK(pool.take(kPage) == before);

  CHECK(pool.give(*kept));
  CHECK(pool.usage().held == kPage);
  pool.set_children(std::vector{child});  // older than the second
  CHECK(pool.usage().held == kPage);
  pool.set_children({});
  CHECK(pool.take(kPage) == kept);
}
