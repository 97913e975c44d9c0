#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "collective_calls.h"
#include "core/error.h"
#include "shm/process_peers.h"
#include "shm/shared_heap.h"
#include "shm/write_fence.h"

namespace samestep {
namespace {

using AllPeers = std::vector<std::shared_ptr<LocalPeers>>;

/// `act` on each rank, in a thread of its own.
template <class Act>
void on_all(std::size_t n, const Act& act) {
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < n; ++rank) threads.emplace_back(act, rank);
  for (std::thread& thread : threads) thread.join();
}

/// Ranks in one process.
AllPeers connected_ranks(std::size_t n) {
  std::vector<std::vector<Fd>> links(n);
  for (auto& of_rank : links) of_rank.resize(n);
  for (std::size_t a = 0; a < n; ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      std::array<int, 2> ends{};
      REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) == 0);
      links[a][b] = Fd(ends[0]);
      links[b][a] = Fd(ends[1]);
    }
  }
  AllPeers peers(n);
  const std::vector<std::uint64_t> probes(n, probe_address());
  on_all(n, [&](std::size_t rank) {
    peers[rank] = open_process_peers(static_cast<int>(rank), std::move(links[rank]), probes, soon());
  });
  return peers;
}

/// Two of them.
std::pair<std::shared_ptr<LocalPeers>, std::shared_ptr<LocalPeers>> connected_peers() {
  const AllPeers peers = connected_ranks(2);
  return {peers[0], peers[1]};
}

/// The members of a group, in the order of their ranks there; the first makes its memory.
const std::array kThree{2, 0, 1};

void require_that_all_meet(const AllPeers& peers, std::uint64_t number) {
  std::vector<LocalPeers::Meeting> met(peers.size());
  on_all(peers.size(), [&](std::size_t rank) { met[rank] = peers[rank]->meet(kThree, 8, number, soon()); });
  for (const LocalPeers::Meeting& meeting : met) REQUIRE(meeting.memory != nullptr);
  *met[1].memory = std::byte(7);
  REQUIRE(*met[0].memory == std::byte(7));
  REQUIRE(*met[2].memory == std::byte(7));
}

}  // namespace

TEST_CASE("process peers: a rank that takes nothing is named at the deadline") {
  const auto [mine, other] = connected_peers();
  const std::array members{0, 1};
  std::string text;
  for (std::uint64_t number = 0; number < 10'000 && text.empty(); ++number) {
    try {
      mine->share(members, 1, number, Deadline::after(Seconds(0.05)));
    } catch (const TimeoutError& error) {
      text = error.what();
    }
  }
  REQUIRE(text == "rank 1 of this host has not taken the memory that rank 0 shares with it after 0.05 s");
  // What it has been sent is there all the same, and after that there is room again.
  REQUIRE(other->share(members, 1, 0, soon()) != nullptr);
  REQUIRE(mine->share(members, 1, 10'000, soon()) != nullptr);
  REQUIRE(other->share(members, 1, 10'000, soon()) != nullptr);
}

TEST_CASE("process peers: memory that a rank cannot be told of counts as not shared") {
  const auto [mine, other] = connected_peers();
  const std::array members{0, 1};
  const SharedHeap::Block block = mine->heap()->allocate(1 << 20);
  REQUIRE(block.data != nullptr);
  for (std::uint64_t number = 0; number < 10'000; ++number) {
    try {
      mine->share(members, 1, number, Deadline::after(Seconds(0)));
    } catch (const TimeoutError&) {
      break;
    }
  }
  REQUIRE((mine->to_remote_address(block.data, 1) & LocalPeers::kSharedAddressBit) == 0);
}

TEST_CASE("process peers: memory that a rank could not open is missed at once") {
  const auto [mine, other] = connected_peers();
  const SharedHeap::Block block = other->heap()->allocate(1 << 20);
  REQUIRE(block.data != nullptr);
  const std::uint64_t address = other->to_remote_address(block.data, 1);
  REQUIRE((address & LocalPeers::kSharedAddressBit) != 0);
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{0, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  std::exception_ptr error;
  try {
    mine->map_peer_memory(1, address, 1);
  } catch (...) {  // looked at later: sanitizers need descriptors for that
    error = std::current_exception();
  }
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  REQUIRE(error != nullptr);
  CHECK_THROWS_WITH_AS(std::rethrow_exception(error), doctest::Contains("raise `ulimit -n`"), UnavailableError);
  CHECK_THROWS_WITH_AS(mine->map_peer_memory(1, address, 1), doctest::Contains("could not open memory that rank 1"),
                       UnavailableError);
}

TEST_CASE("process peers: where a rank of a new group has given up, all come to the next one") {
  const AllPeers peers = connected_ranks(3);
  const Deadline none = Deadline::after(Seconds(0));
  require_that_all_meet(peers, 1);
  std::uint64_t number = 1;
  for (const std::size_t first : {0u, 1u, 2u}) {  // 2 makes the memory
    ++number;
    const LocalPeers::Meeting given_up = peers[first]->meet(kThree, 8, number, none);
    CHECK(given_up.memory == nullptr);
    CHECK(given_up.absent.size() == 2);
    for (const std::size_t later : {(first + 1) % 3, (first + 2) % 3}) {
      const LocalPeers::Meeting meeting = peers[later]->meet(kThree, 8, number, soon());
      CHECK(meeting.memory == nullptr);
      CHECK(meeting.absent.empty());
    }
    require_that_all_meet(peers, ++number);
  }
  CHECK(peers[1]->meet(kThree, 8, ++number, none).absent == std::vector{2, 0});
}

TEST_CASE("process peers: a new group lacks a rank whose process has ended") {
  AllPeers peers = connected_ranks(3);
  peers[0].reset();
  for (const std::size_t rank : {1u, 2u}) {
    CHECK_THROWS_WITH_AS(peers[rank]->meet(kThree, 8, 1, soon()), doctest::Contains("rank 0 of this host"),
                         PeerLostError);
  }
}

TEST_CASE("process peers: a forked process makes no group") {
  const AllPeers peers = connected_ranks(3);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      peers[0]->meet(kThree, 8, 1, Deadline::after(Seconds(0)));
    } catch (const NotInitializedError&) {
      ::_exit(0);
    } catch (...) {
    }
    ::_exit(1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  require_that_all_meet(peers, 1);
}

TEST_CASE("process peers: a rank that has closed its fence is written to no more, and writes itself") {
  const auto [mine, other] = connected_peers();
  if (!mine->has_cma()) return;
  const std::shared_ptr<std::byte> words = mine->share(std::array{0, 1}, WriteFence::nbytes_for(2), 0, soon());
  WriteFence fence(mine, {0, 1}, 0, words), of_other(other, {0, 1}, 1, words);
  std::array<int, 2> here{1, 1}, there{2, 2}, value{3, 3};
  const auto address = [](const auto& array) { return reinterpret_cast<std::uintptr_t>(array.data()); };
  REQUIRE(of_other.write(0, address(here), value.data(), sizeof value));
  CHECK(here == value);
  fence.close();
  here = {1, 1};
  CHECK_FALSE(of_other.write(0, address(here), value.data(), sizeof value));
  CHECK_FALSE(of_other.write(0, address(here), value.data(), sizeof(int)));
  CHECK(here == std::array{1, 1});
  CHECK(fence.write(1, address(there), value.data(), sizeof value));
  CHECK(there == value);
}

TEST_CASE("process peers: what a rank stores into withdrawn memory of another goes nowhere") {
  const auto [mine, other] = connected_peers();
  constexpr std::size_t kPage = 4096, kNbytes = 4 * kPage;
  const std::shared_ptr<SharedHeap> heap = mine->heap();
  auto* const data = static_cast<std::byte*>(heap->allocate(kNbytes).data);
  REQUIRE(data != nullptr);
  const std::uint64_t address = mine->to_remote_address(data, kNbytes);
  REQUIRE((address & LocalPeers::kSharedAddressBit) != 0);
  std::byte* const seen = other->map_peer_memory(0, address, kNbytes);
  const auto is_shared = [&](std::size_t from, std::size_t to) {
    return (mine->to_remote_address(data + from, to - from) & LocalPeers::kSharedAddressBit) != 0;
  };
  const auto store = [](std::byte* to, int value) { std::fill_n(to, kNbytes, std::byte(value)); };
  const auto holds = [&](std::size_t from, std::size_t to, int value) {
    return std::all_of(data + from, data + to, [value](std::byte byte) { return byte == std::byte(value); });
  };
  store(seen, 1);
  heap->withdraw(data + kPage + 1, 2);
  store(seen, 2);
  CHECK(holds(0, kPage, 2));
  CHECK(holds(kPage, 2 * kPage, 1));
  CHECK(holds(2 * kPage, kNbytes, 2));
  CHECK(is_shared(0, kPage));
  CHECK_FALSE(is_shared(0, kPage + 1));
  CHECK(is_shared(2 * kPage, kNbytes));
  store(data, 3);
  heap->withdraw(data, kNbytes);  // some of it again: what this rank has stored since stays
  store(seen, 4);
  CHECK(holds(0, kNbytes, 3));
  CHECK_FALSE(is_shared(0, kNbytes));
  const pid_t child = ::fork();
  if (child == 0) ::_exit(holds(0, kNbytes, 3) ? 0 : 1);
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(heap->free(data));
  CHECK(heap->allocate(kNbytes).data != data);  // the other may still store there
}

}  // namespace samestep
