#include <doctest/doctest.h>

#include <functional>
#include <string>

#include "collective_calls.h"
#include "device/overlap.h"
#include "device_world.h"

// Inputs and outputs in device memory that overlap: every verb gives what it gives with separate arrays.

using namespace samestep;

namespace {

constexpr int kRanks = 3;
constexpr std::size_t kWorld = kRanks;

/// Memory of `count` elements for each rank and more on both sides, from which inputs and outputs are cut.
struct Memory {
  Memory(const UserStream& stream, int of_rank, std::size_t n)
      : rank(of_rank), count(n), gpu(stream, (2 * kWorld + 2) * n) {
    gpu.set(start(rank));
  }
  Floats start(int of_rank) const { return contribution(of_rank, (2 * kWorld + 2) * count); }
  Buffer cut(std::size_t length, std::ptrdiff_t shift = 0) const {
    Buffer part = gpu;
    part.data = static_cast<float*>(part.data) + static_cast<std::ptrdiff_t>(count) + shift;
    part.count = length;
    return part;
  }
  /// What `cut` shows of a rank's memory before the operation.
  Floats was(int of_rank, std::size_t length, std::ptrdiff_t shift = 0) const {
    const Floats all = start(of_rank);
    const auto from = all.begin() + static_cast<std::ptrdiff_t>(count) + shift;
    return {from, from + static_cast<std::ptrdiff_t>(length)};
  }
  Floats now(std::size_t length, std::ptrdiff_t shift = 0) {
    const Floats all = gpu.get();
    const auto from = all.begin() + static_cast<std::ptrdiff_t>(count) + shift;
    return {from, from + static_cast<std::ptrdiff_t>(length)};
  }

  int rank;
  std::size_t count;
  OnGpu gpu;
};

Floats sum_of(const std::function<Floats(int)>& of_rank) {
  Floats total = of_rank(0);
  for (int r = 1; r < kRanks; ++r) {
    const Floats more = of_rank(r);
    for (std::size_t i = 0; i < total.size(); ++i) total[i] += more[i];
  }
  return total;
}

Floats joined(const std::function<Floats(int)>& of_rank) {
  Floats all;
  for (int r = 0; r < kRanks; ++r) {
    const Floats one = of_rank(r);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

Floats block_of(const Floats& all, int rank, std::size_t count) {
  const auto from = all.begin() + static_cast<std::ptrdiff_t>(rank * count);
  return {from, from + static_cast<std::ptrdiff_t>(count)};
}

void check_verbs(Communicator& group, int rank, std::size_t n, const std::function<std::ptrdiff_t(int)>& shift_of) {
  const std::ptrdiff_t shift = shift_of(rank);
  const std::size_t wide = kWorld * n;
  const std::vector<std::uint64_t> counts(kWorld, n);
  const UserStream stream;
  const auto check = [&](const char* verb, const auto& start, std::size_t length, std::ptrdiff_t at,
                         const auto& expected) {
    Memory memory(stream, rank, n);
    finish(start(memory), stream);
    REQUIRE_MESSAGE(memory.now(length, at) == expected(memory), std::string(verb)
                                                                    << " of " << n << ", shift " << shift);
  };
  const Shape one = Shape::flat(n), all = Shape::flat(wide);
  check(
      "allreduce", [&](Memory& m) { return allreduce(group, Buffer(m.cut(n)), m.cut(n, shift), {}, one); }, n, shift,
      [&](Memory& m) { return sum_of([&](int r) { return m.was(r, n); }); });
  check(
      "reduce", [&](Memory& m) { return reduce(group, Buffer(m.cut(n)), m.cut(n, shift), {}, kRanks - 1, one); }, n,
      shift,
      [&](Memory& m) {
        return rank == kRanks - 1 ? sum_of([&](int r) { return m.was(r, n); }) : m.was(rank, n, shift);
      });
  check(
      "reduce_scatter", [&](Memory& m) { return reduce_scatter(group, Buffer(m.cut(wide)), m.cut(n, shift), {}, one); },
      n, shift, [&](Memory& m) { return block_of(sum_of([&](int r) { return m.was(r, wide); }), rank, n); });
  check(
      "scatter", [&](Memory& m) { return scatter(group, Buffer(m.cut(wide)), m.cut(n, shift), 0, one); }, n, shift,
      [&](Memory& m) { return block_of(m.was(0, wide), rank, n); });
  check(
      "scatterv", [&](Memory& m) { return scatterv(group, Buffer(m.cut(wide)), counts, m.cut(n, shift), 0); }, n, shift,
      [&](Memory& m) { return block_of(m.was(0, wide), rank, n); });
  const auto gathered = [&](Memory& m) { return joined([&](int r) { return m.was(r, n, shift_of(r)); }); };
  const auto at_root = [&](Memory& m) { return rank == 0 ? gathered(m) : m.was(rank, wide); };
  check(
      "allgather", [&](Memory& m) { return allgather(group, Buffer(m.cut(n, shift)), m.cut(wide), one); }, wide, 0,
      gathered);
  check(
      "allgatherv", [&](Memory& m) { return allgatherv(group, Buffer(m.cut(n, shift)), m.cut(wide), counts); }, wide, 0,
      gathered);
  check(
      "gather", [&](Memory& m) { return gather(group, Buffer(m.cut(n, shift)), m.cut(wide), 0, one); }, wide, 0,
      at_root);
  check(
      "gatherv", [&](Memory& m) { return gatherv(group, Buffer(m.cut(n, shift)), m.cut(wide), counts, 0); }, wide, 0,
      at_root);
  const auto turned = [&](Memory& m) { return joined([&](int r) { return block_of(m.was(r, wide), rank, n); }); };
  check(
      "alltoall", [&](Memory& m) { return alltoall(group, Buffer(m.cut(wide)), m.cut(wide, shift), all); }, wide, shift,
      turned);
  check(
      "alltoallv", [&](Memory& m) { return alltoallv(group, Buffer(m.cut(wide)), counts, m.cut(wide, shift), counts); },
      wide, shift, turned);
}

}  // namespace

TEST_CASE("devices: an input that overlaps its output is read before it is overwritten") {
  for (const DevicePath path : {DevicePath::nccl, DevicePath::staged}) {
    DeviceWorld world(kRanks, path);
    as_ranks(kRanks, [&](int rank) {
      const auto group = world.join(rank);
      for (const std::size_t n :
           {std::size_t{4}, std::size_t{600}, std::size_t{5003}}) {  // of one segment, and of several
        // In place, block `rank`, and between these.
        const auto block = [n](int r) { return static_cast<std::ptrdiff_t>(static_cast<std::size_t>(r) * n); };
        for (const std::ptrdiff_t shift : {0, 1, -3}) check_verbs(*group, rank, n, [=](int) { return shift; });
        check_verbs(*group, rank, n, block);
      }
      group->close(soon());
    });
  }
}

TEST_CASE("devices: of uneven blocks, only a rank's own one is in place") {
  const std::vector<std::uint64_t> counts{3, 0, 2};
  Floats memory(5);
  const auto part = [&](std::size_t at, std::size_t n) { return Buffer{memory.data() + at, n, DType::float32}; };
  const std::size_t begin[] = {0, 3, 3};
  for (int rank = 0; rank < 3; ++rank) {
    for (std::size_t at = 0; at + counts[static_cast<std::size_t>(rank)] <= 5; ++at) {
      const Buffer own = part(at, counts[static_cast<std::size_t>(rank)]);
      const bool expected = own.count != 0 && at != begin[rank];
      CHECK(overwrites_input({CollectiveType::allgatherv, own, part(0, 5), {}, -1, {}, counts}, rank) == expected);
      CHECK(overwrites_input({CollectiveType::scatterv, part(0, 5), own, {}, rank, {}, counts}, rank) == expected);
    }
  }
}

TEST_CASE("devices: of many ranges those are found that share memory which is written") {
  Floats memory(20);
  const auto range = [&](std::size_t at, std::size_t n, bool written = true) {
    return MemoryRange{memory.data() + at, n * sizeof(float), written};
  };
  using Pair = std::pair<std::size_t, std::size_t>;
  const auto found = [](std::vector<MemoryRange> ranges) { return find_conflict(ranges); };
  CHECK(found({}) == std::nullopt);
  CHECK(found({range(5, 5), range(0, 5), range(10, 5), range(7, 0)}) == std::nullopt);
  CHECK(found({range(8, 5), range(15, 2), range(0, 9)}) == Pair{0, 2});
  CHECK(found({range(0, 5), range(0, 5)}) == Pair{0, 1});
  CHECK(found({range(0, 9, false), range(3, 9, false)}) == std::nullopt);
  CHECK(found({range(0, 9, false), range(8, 5)}) == Pair{0, 1});
  // Behind a short one that lies in the same long one.
  CHECK(found({range(0, 20, false), range(1, 2, false), range(4, 2)}) == Pair{0, 2});
  CHECK(found({range(0, 20), range(20, 0), range(4, 2, false)}) == Pair{0, 2});
  CHECK(found({range(0, 4), range(2, 18, false), range(10, 2, false)}) == Pair{0, 1});
}
