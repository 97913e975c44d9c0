#include <doctest/doctest.h>

#include <atomic>
#include <string>

#include "collective_calls.h"
#include "core/error.h"
#include "device_world.h"

// Threads that call one communicator of NCCL while it says that a launch is in progress.

using namespace samestep;

namespace {

constexpr const char* kForGood = "1000000000";  // looks at the state, before it ends

/// Waits until so many calls of this process have reached NCCL.
void until_called(long n) {
  static long (*const calls)() = [] {
    const OpenedLibrary library(FAKE_NCCL);
    long (*found)() = nullptr;
    REQUIRE(library.find("fakeNcclCalls", found));
    return found;
  }();
  static long before = 0;
  if (n == 0) before = calls();
  for (const Deadline deadline = soon(); calls() - before < n;) {
    REQUIRE(!deadline.passed());
    std::this_thread::yield();
  }
}

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void launch(DeviceCommunicator& group, const OnGpu& x) { allreduce(group, Buffer(x), x, {}, x.shape())->wait(soon()); }

}  // namespace

TEST_CASE("launches: while one is in progress others close in vain and give up") {
  const Variable progress("FAKE_NCCL_IN_PROGRESS", kForGood);
  DeviceWorld world(1, DevicePath::nccl);
  as_ranks(1, [&](int rank) {
    const auto group = world.join(rank, Seconds(40));
    const UserStream stream;
    OnGpu x(stream, contribution(rank, 100)), y(stream, contribution(rank, 50));
    std::atomic<int> n_ended = 0;
    std::string texts[2];
    until_called(0);
    std::thread first([&] {
      texts[0] = error_of([&] { launch(*group, x); });
      ++n_ended;
    });
    until_called(1);
    std::thread second([&] {
      texts[1] = error_of([&] { launch(*group, y); });
      ++n_ended;
    });
    const std::string closed = error_of([&] { group->close(Deadline::after(Seconds(0.1))); });
    CHECK(closed.find("are pending") != std::string::npos);
    CHECK(n_ended == 0);
    group->abandon(std::make_exception_ptr(PeerLostError("given up")), "given up");
    first.join();
    second.join();
    for (const std::string& text : texts) CHECK(text.find("given up") != std::string::npos);
  });
}

TEST_CASE("launches: NCCL gets them in the order of the calls") {
  const Variable progress("FAKE_NCCL_IN_PROGRESS", "300");
  DeviceWorld world(2, DevicePath::nccl);
  std::atomic<bool> second_launched = false;
  until_called(0);
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank);
    {
      const UserStream stream;
      OnGpu x(stream, contribution(rank, 100)), y(stream, contribution(rank, 50));
      if (rank == 0) {
        std::thread first([&] { launch(*group, x); });
        until_called(1);
        const auto work = allreduce(*group, Buffer(y), y, {}, y.shape());
        second_launched = true;
        work->wait(soon());
        first.join();
      } else {
        // After both of the other rank, whose order the stand-in compares with this one.
        for (const Deadline deadline = soon(); !second_launched;) {
          REQUIRE(!deadline.passed());
          std::this_thread::yield();
        }
        launch(*group, x);
        launch(*group, y);
      }
      REQUIRE(x.get() == sum(2, 100));
      REQUIRE(y.get() == sum(2, 50));
    }
    group->close(soon());
  });
}

TEST_CASE("launches: many threads, each with operations of its own") {
  const Variable progress("FAKE_NCCL_IN_PROGRESS", "20");
  DeviceWorld world(1, DevicePath::nccl);
  as_ranks(1, [&](int rank) {
    const auto group = world.join(rank);
    {
      std::atomic<int> n_right = 0;
      std::vector<std::thread> threads;
      for (int k = 0; k < 4; ++k) {
        threads.emplace_back([&, k] {
          gpu()->set_device(rank);
          const UserStream stream;
          OnGpu x(stream, contribution(k, 100));
          for (int i = 0; i < 5; ++i) launch(*group, x);
          if (x.get() == contribution(k, 100)) ++n_right;
        });
      }
      for (std::thread& thread : threads) thread.join();
      REQUIRE(n_right == 4);
    }
    group->close(soon());
  });
}

TEST_CASE("launches: a mismatch is reported while NCCL waits for the signature check") {
  const Variable progress("FAKE_NCCL_IN_PROGRESS", kForGood);
  DeviceWorld world(2, DevicePath::nccl);
  all_are_told_of_a_difference(world);
}
