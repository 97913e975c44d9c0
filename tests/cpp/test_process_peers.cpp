#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/socket.h>

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

namespace samestep {
namespace {

/// Two ranks in one process.
std::pair<std::shared_ptr<LocalPeers>, std::shared_ptr<LocalPeers>> connected_peers() {
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) == 0);
  std::array<std::shared_ptr<LocalPeers>, 2> peers;
  const auto open = [&](int rank) {
    std::vector<Fd> links(2);
    const auto me = static_cast<std::size_t>(rank);
    links[1 - me] = Fd(ends[me]);
    peers[me] = open_process_peers(rank, std::move(links), soon());
  };
  std::thread other(open, 1);
  open(0);
  other.join();
  return {peers[0], peers[1]};
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

}  // namespace samestep
