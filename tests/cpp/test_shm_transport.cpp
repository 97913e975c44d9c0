#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "shm/shm_region.h"
#include "shm/shm_transport.h"
#include "thread_peers.h"

using namespace samestep;

TEST_CASE("shm: a receive that is cancelled while its message arrives is not written any more") {
  constexpr int kSize = 2;
  constexpr std::size_t kPage = 4096, kLong = 4 << 20;  // more than a ring holds
  const std::size_t nbytes = ShmRegion::nbytes_for(kSize);
  const std::shared_ptr<std::byte> memory(static_cast<std::byte*>(std::aligned_alloc(kPage, nbytes)), std::free);
  std::memset(memory.get(), 0, nbytes);
  const auto region = std::make_shared<ShmRegion>(memory, kSize);
  const auto state = std::make_shared<ThreadPeers::SharedState>();
  const auto peers = [&](int rank) { return std::make_shared<ThreadPeers>(state, rank, kSize, Reach::none); };
  ShmTransport sender(region, peers(0), {0, 1}, 0), receiver(region, peers(1), {0, 1}, 1);

  const std::vector<std::byte> sent(kLong, std::byte{7});
  std::vector<std::byte> into(kLong);
  Transport::Request sending = sender.send(sent.data(), kLong, 1, 5),
                     receiving = receiver.receive(into.data(), kLong, 0, 5);
  while (into[0] != std::byte{7}) {
    REQUIRE_FALSE(receiver.test(receiving, nullptr));
    REQUIRE_FALSE(sender.test(sending, nullptr));
  }
  REQUIRE(into.back() != std::byte{7});
  REQUIRE(receiver.cancel(receiving));
  std::ranges::fill(into, std::byte{1});  // the caller's again
  Transport::Envelope envelope;
  while (!sender.test(sending, nullptr)) REQUIRE_FALSE(receiver.probe(5, envelope));
  REQUIRE_FALSE(receiver.probe(5, envelope));
  REQUIRE(std::ranges::all_of(into, [](std::byte value) { return value == std::byte{1}; }));

  std::byte next{};
  receiving = receiver.receive(&next, 1, 0, 5);  // the next message is received as ever
  sending = sender.send(sent.data(), 1, 1, 5);
  while (!receiver.test(receiving, nullptr)) sender.test(sending, nullptr);
  REQUIRE(next == std::byte{7});
}
