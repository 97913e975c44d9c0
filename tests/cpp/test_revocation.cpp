#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "collective_calls.h"
#include "collectives/exchange_communicator.h"
#include "contributions.h"
#include "core/error.h"
#include "local_network.h"

using namespace samestep;

namespace {

constexpr int kRanks = 3;
constexpr std::uint64_t kBlock = 7;

/// `linear`: headers go to each rank, else in log2 of their number of messages.
std::shared_ptr<Communicator> join(const std::shared_ptr<LocalNetwork>& network, int rank, bool linear = true) {
  ExchangeOptions options;
  options.bruck_above = linear ? kRanks : 1;
  options.oversubscribed = true;
  return std::make_shared<ExchangeCommunicator>(std::make_unique<LocalTransport>(network, rank), options);
}

std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const StepError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a revoked group ends on all ranks, whatever they wait for, and no other group does") {
  bool linear = true;
  SUBCASE("headers to each rank") {}
  SUBCASE("headers in log2 of the ranks") { linear = false; }
  const auto network = std::make_shared<LocalNetwork>(kRanks), beside = std::make_shared<LocalNetwork>(kRanks);
  as_threads(kRanks, [&](int rank) {
    const auto group = join(network, rank, linear);
    const auto other = join(beside, rank, linear);
    group->membership().open_block(kBlock);
    barrier(*group)->wait(soon());  // a rank may still be in it when another has revoked the group
    Floats values(3);
    if (rank == 0) {
      group->membership().revoke("rank 0 raised an error", kBlock);
      group->membership().revoke("only the first reason counts", kBlock);
    } else {
      const auto work = rank == 1 ? barrier(*group) : group->recv({values.data(), 3, DType::float32}, 1, 0);
      CHECK(text_of([&] { work->wait(soon()); }).find("rank 0 raised an error") != std::string::npos);
      CHECK(work->done());
    }
    CHECK_FALSE(group->usable());
    CHECK(text_of([&] { barrier(*group)->wait(soon()); }) != "");
    REQUIRE(other->usable());
    barrier(*other)->wait(soon());
    CHECK_FALSE(group->membership().discard());  // this network does not say that it forgets
    other->close(soon());
  });
}

TEST_CASE("who waits for a rank that is at the end of the block revokes the group") {
  bool linear = true;
  SUBCASE("headers to each rank") {}
  SUBCASE("headers in log2 of the ranks") { linear = false; }
  const auto network = std::make_shared<LocalNetwork>(kRanks);
  std::atomic<int> n_revoked = 0;
  as_threads(kRanks, [&](int rank) {
    const auto group = join(network, rank, linear);
    group->membership().open_block(kBlock);
    barrier(*group)->wait(soon());
    if (rank == 2) {
      group->membership().announce_block_end(kBlock);
      while (n_revoked != 2) std::this_thread::yield();
      CHECK_FALSE(group->membership().is_revoked());
      group->membership().check_peers();
      CHECK(group->membership().is_revoked());
      return;
    }
    CHECK(text_of([&] { barrier(*group)->wait(soon()); }).find("waits for rank 2") != std::string::npos);
    ++n_revoked;
  });
}

TEST_CASE("the end of a block that is over here says nothing") {
  const auto network = std::make_shared<LocalNetwork>(kRanks);
  std::atomic<int> n_waited = 0;
  as_threads(kRanks, [&](int rank) {
    const auto group = join(network, rank);
    group->membership().open_block(kBlock);
    barrier(*group)->wait(soon());
    if (rank == 2) group->membership().announce_block_end(kBlock);
    group->membership().close_block(kBlock);
    group->membership().open_block(kBlock + 1);
    if (rank == 2) {
      while (n_waited != 2) std::this_thread::yield();
      barrier(*group)->wait(soon());
    } else {
      const auto work = barrier(*group);
      CHECK_THROWS_AS(work->wait(Deadline::after(Seconds(0.05))), TimeoutError);
      ++n_waited;
      work->wait(soon());
    }
    group->membership().close_block(kBlock + 1);
    group->close(soon());
  });
}
