#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "shm/shared_heap.h"

using namespace samestep;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

bool holds(const void* data, std::size_t nbytes, unsigned char value) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  return std::all_of(bytes, bytes + nbytes, [value](unsigned char byte) { return byte == value; });
}

}  // namespace

TEST_CASE("shared heap: new blocks are aligned and zero, used ones come back as they were") {
  for (const std::size_t nbytes : {std::size_t{1}, 64 * std::size_t{1024}, kMiB + 1, 100 * kMiB}) {
    SharedHeap heap;
    const SharedHeap::Block block = heap.allocate(nbytes);
    REQUIRE(block.data != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(block.data) % 64 == 0);
    CHECK(heap.size_of(block.data) >= nbytes);
    CHECK(block.is_zero);
    CHECK(holds(block.data, nbytes, 0));
    std::memset(block.data, 7, nbytes);
    CHECK(heap.free(block.data));
    CHECK_FALSE(heap.free(block.data));
    const SharedHeap::Block again = heap.allocate(nbytes);
    CHECK(again.data == block.data);
    CHECK_FALSE(again.is_zero);
    CHECK(holds(again.data, nbytes, 7));
    CHECK(heap.free(again.data));
  }
}

TEST_CASE("shared heap: it knows its own memory") {
  SharedHeap heap;
  int other = 0;
  CHECK_FALSE(heap.free(&other));
  CHECK(heap.size_of(&other) == 0);
  CHECK_FALSE(heap.find(&other, sizeof other));
  auto* const data = static_cast<std::byte*>(heap.allocate(kMiB).data);
  const auto whole = heap.find(data, kMiB), part = heap.find(data + 4096, 8);
  REQUIRE(whole);
  REQUIRE(part);
  CHECK(part->segment == whole->segment);
  CHECK(part->offset == whole->offset + 4096);
  CHECK_FALSE(heap.find(data, 1024 * kMiB));
  CHECK_FALSE(heap.free(data + 4096));
  CHECK(heap.free(data));
}

TEST_CASE("shared heap: a segment is published once, and a refusal is remembered") {
  SharedHeap heap;
  void* const data = heap.allocate(1).data;
  const auto spot = heap.find(data, 1);
  REQUIRE(spot);
  int n_calls = 0;
  const auto refuse = [&](const SharedMemory&) { return ++n_calls == 0; };
  CHECK_FALSE(heap.publish(spot->segment, refuse));
  CHECK_FALSE(heap.publish(spot->segment, refuse));
  CHECK(n_calls == 1);
}

TEST_CASE("shared heap: at its limit it gives nothing, and something again once there is room") {
  SharedHeap heap;
  heap.set_bounds(4 * kMiB, 4 * kMiB);
  std::vector<void*> blocks;
  while (void* const data = heap.allocate(kMiB).data) blocks.push_back(data);
  CHECK(blocks.size() == 4);
  CHECK(heap.usage().present <= 4 * kMiB);
  CHECK(heap.allocate(kMiB).data == nullptr);
  CHECK(heap.free(blocks[1]));
  CHECK(heap.free(blocks[2]));
  CHECK(heap.allocate(2 * kMiB).data != nullptr);
  CHECK(heap.usage().present <= 4 * kMiB);
  CHECK(heap.allocate(5 * kMiB).data == nullptr);
  CHECK(heap.allocate(std::size_t{1} << 45).data == nullptr);
}

TEST_CASE("shared heap: unused memory is returned to the system, and what is in use stays as it is") {
  SharedHeap heap;
  heap.set_bounds(kNoLimit, 8 * kMiB);
  std::vector<void*> blocks(32);
  for (void*& block : blocks) {
    block = heap.allocate(kMiB).data;
    std::memset(block, 5, kMiB);
  }
  CHECK(heap.usage().present >= 32 * kMiB);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (i % 8 != 0) heap.free(blocks[i]);
  }
  CHECK(heap.usage().present <= (4 + 8) * kMiB);
  for (std::size_t i = 0; i < blocks.size(); i += 8) CHECK(holds(blocks[i], kMiB, 5));
  const SharedHeap::Block fresh = heap.allocate(7 * kMiB);
  CHECK(fresh.data != nullptr);
  if (fresh.is_zero) CHECK(holds(fresh.data, 7 * kMiB, 0));
  heap.free(fresh.data);
  for (std::size_t i = 0; i < blocks.size(); i += 8) heap.free(blocks[i]);
  heap.set_bounds(0, 0);
  CHECK(heap.usage().present == 0);
  CHECK(heap.usage().segments == 1);
}

TEST_CASE("shared heap: a part with a block in it is not returned to the system") {
  SharedHeap heap;
  heap.set_bounds(kMiB, kMiB);
  constexpr std::size_t kSmall = 4096, kInPart = SharedHeap::kPart / kSmall;
  std::vector<void*> blocks;
  while (void* const data = heap.allocate(kSmall).data) {
    std::memset(data, 9, kSmall);
    blocks.push_back(data);
  }
  REQUIRE(blocks.size() == kMiB / kSmall);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (i % kInPart != 5) heap.free(blocks[i]);
  }
  CHECK(heap.allocate(kMiB / 2).data == nullptr);
  CHECK(heap.usage().present == kMiB);
  for (std::size_t i = 5; i < blocks.size(); i += kInPart) CHECK(holds(blocks[i], kSmall, 9));
  for (std::size_t i = 5; i < blocks.size() / 2; i += kInPart) heap.free(blocks[i]);
  CHECK(heap.allocate(kMiB / 4).data != nullptr);
}

TEST_CASE("shared heap: thousands of blocks, from several threads, freed by others") {
  SharedHeap heap;
  constexpr int kThreads = 4, kBlocks = 500;
  std::vector<std::vector<unsigned char*>> made(kThreads);
  const auto each = [](const auto& work) {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
    for (std::thread& thread : threads) thread.join();
  };
  each([&](int t) {
    for (int i = 0; i < kBlocks; ++i) {
      const std::size_t nbytes = 4096 * static_cast<std::size_t>(1 + (i * 7 + t) % 20);
      auto* const data = static_cast<unsigned char*>(heap.allocate(nbytes).data);
      if (data == nullptr) return;
      data[0] = data[nbytes - 1] = static_cast<unsigned char>(t);
      made[static_cast<std::size_t>(t)].push_back(data);
      if (i % 3 == 0) heap.free(heap.allocate(nbytes).data);
    }
  });
  CHECK(heap.usage().blocks.blocks == kThreads * kBlocks);
  each([&](int t) {
    for (unsigned char* data : made[static_cast<std::size_t>((t + 1) % kThreads)]) {
      if (data[0] == (t + 1) % kThreads) heap.free(data);
    }
  });
  CHECK(heap.usage().blocks.blocks == 0);
  CHECK(heap.usage().blocks.used == 0);
}

TEST_CASE("shared heap: a child's writes are its own, and what it sees is not used again while it lives") {
  SharedHeap heap;
  auto* const data = static_cast<unsigned char*>(heap.allocate(kMiB).data);
  std::memset(data, 1, kMiB);
  int go[2];
  REQUIRE(::pipe(go) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte;
    ::close(go[1]);
    const bool seen = holds(data, kMiB / 2, 1);
    std::memset(data, 2, kMiB / 2);
    while (::read(go[0], &byte, 1) > 0) continue;  // until the parent has made its blocks
    const bool kept = holds(data, kMiB / 2, 2) && holds(data + kMiB / 2, kMiB / 2, 1);
    const bool nothing = heap.allocate(kMiB).data == nullptr;
    ::_exit(seen && kept && nothing && heap.free(data) ? 0 : 1);
  }
  ::close(go[0]);
  CHECK(heap.free(data));
  CHECK(heap.usage().blocks.held == kMiB);
  void* const other = heap.allocate(kMiB).data;
  CHECK(other != data);
  std::memset(other, 3, kMiB);
  CHECK(holds(data, kMiB, 1));
  ::close(go[1]);
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(holds(data, kMiB, 1));
  CHECK(heap.usage().blocks.held == 0);
  CHECK(heap.allocate(kMiB).data == data);
}
