#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <string>

#include "collective_calls.h"
#include "core/error.h"
#include "device_world.h"

// csrc/gpu, csrc/nccl and csrc/device on the stand-ins of tests/fakes: ranks are threads, each with a device of its
// own.

using namespace samestep;

namespace {

Floats joined(int size, std::size_t count) {
  Floats all;
  for (int rank = 0; rank < size; ++rank) {
    const Floats one = contribution(rank, count);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

constexpr DevicePath kPaths[] = {DevicePath::nccl, DevicePath::staged};
constexpr std::size_t kCounts[] = {0, 1, 5, 1023, 5003};  // of one piece, and of several

}  // namespace

TEST_CASE("devices: every verb gives what it gives on the host") {
  for (const DevicePath path : kPaths) {
    for (const int size : {1, 2, 3, 4}) {
      DeviceWorld world(size, path);
      as_ranks(size, [&](int rank) {
        const auto group = world.join(rank);
        {
          const UserStream stream;
          const auto n = static_cast<std::size_t>(size);
          for (const std::size_t count : kCounts) {
            const Floats mine = contribution(rank, count);
            OnGpu x(stream, mine), y(stream, count), all(stream, n * count), back(stream, count);
            const auto run = [&](const Communicator::WorkPtr& work) { finish(work, stream); };
            run(allreduce(*group, Buffer(x), y, {}, x.shape()));
            REQUIRE(y.get() == sum(size, count));
            run(allreduce(*group, Buffer(y), y, {ReduceOp::max, 1.0}, x.shape()));
            REQUIRE(y.get() == sum(size, count));
            run(reduce(*group, Buffer(x), y, {}, size - 1, x.shape()));
            if (rank == size - 1) REQUIRE(y.get() == sum(size, count));
            y.set(mine);
            run(bcast(*group, y, size - 1, y.shape()));
            REQUIRE(y.get() == contribution(size - 1, count));
            run(allgather(*group, Buffer(x), all, x.shape()));
            REQUIRE(all.get() == joined(size, count));
            run(reduce_scatter(*group, Buffer(all), y, {}, y.shape()));
            Floats scaled = mine;
            for (float& value : scaled) value *= static_cast<float>(size);
            REQUIRE(y.get() == scaled);
            run(scatter(*group, Buffer(all), back, 0, back.shape()));
            REQUIRE(back.get() == mine);
            run(gather(*group, Buffer(back), all, size - 1, back.shape()));
            if (rank == size - 1) REQUIRE(all.get() == joined(size, count));
            all.set(Floats(n * count, static_cast<float>(rank)));
            OnGpu received(stream, n * count);
            run(alltoall(*group, Buffer(all), received, back.shape()));
            Floats by_rank;
            for (int r = 0; r < size; ++r) by_rank.insert(by_rank.end(), count, static_cast<float>(r));
            REQUIRE(received.get() == by_rank);
            const auto sent = group->send(Buffer(x), (rank + 1) % size, 7);
            run(group->recv(y, (rank + size - 1) % size, 7, Fit::exactly));
            run(sent);
            REQUIRE(y.get() == contribution((rank + size - 1) % size, count));
          }
        }
        group->close(soon());
      });
    }
  }
}

namespace {

/// Elements are made late in a stream, and used there right after an operation. How many ranks found wrong numbers:
/// before they were made (`early`), or after the operation should have completed (`stale`).
struct Found {
  std::atomic<int> early = 0, stale = 0;
};

void torture(DevicePath path, int size, Found& found) {
  DeviceWorld world(size, path);
  constexpr std::size_t kCount = 3001;
  as_ranks(size, [&](int rank) {
    const auto group = world.join(rank);
    {
      const UserStream producer, consumer;
      OnGpu x(producer, Floats(kCount, -1.0F)), y(consumer, Floats(kCount, -1.0F));
      gpu()->synchronize(producer.get());
      gpu()->synchronize(consumer.get());
      fake().hold(producer.get());
      x.set(contribution(rank, kCount));
      auto work = allreduce(*group, Buffer(x), y, {}, x.shape());
      fake().run_unblocked();  // whatever does not wait for the producer has run by now
      fake().release(producer.get());
      work->wait(soon());
      if (y.get() != sum(size, kCount)) ++found.early;
    }
    barrier(*group)->wait(soon());
    if (rank == 0) fake().hold_writes(1);
    barrier(*group)->wait(soon());
    {
      const UserStream stream;
      OnGpu x(stream, contribution(rank, kCount)), y(stream, Floats(kCount, -1.0F));
      const auto work = allreduce(*group, Buffer(x), y, {}, x.shape());
      finish(work, stream);
      const Floats& got = y.begin_get();
      fake().run_unblocked();  // whatever does not wait for the operation has run by now
      barrier(*group)->wait(soon());
      if (rank == 0) fake().hold_writes(0);
      work->wait(soon());
      gpu()->synchronize(stream.get());
      if (got != sum(size, kCount)) ++found.stale;
    }
    group->close(soon());
  });
}

}  // namespace

TEST_CASE("devices: nothing is read before it is made, nor before it is complete") {
  for (const DevicePath path : kPaths) {
    for (const int size : {1, 3}) {
      for (const char* delay : {"0", "200"}) {
        const Variable delays("FAKE_GPU_DELAY_US", delay);
        Found found;
        torture(path, size, found);
        REQUIRE(found.early == 0);
        REQUIRE(found.stale == 0);
      }
    }
  }
}

TEST_CASE("devices without waits: the case above finds it where one side does not wait for the other") {
  for (const DevicePath path : kPaths) {
    Found library, user;
    {
      const Variable ignored("FAKE_GPU_IGNORE_WAITS", "library");
      torture(path, 1, library);
    }
    REQUIRE(library.early == 1);
    {
      const Variable ignored("FAKE_GPU_IGNORE_WAITS", "user");
      torture(path, 1, user);
    }
    REQUIRE(user.stale == 1);
  }
}

TEST_CASE("devices: many pending operations, waited for in another order") {
  for (const DevicePath path : kPaths) {
    const Variable delays("FAKE_GPU_DELAY_US", "200");
    const int size = 3;
    DeviceWorld world(size, path);
    as_ranks(size, [&](int rank) {
      const auto group = world.join(rank);
      {
        const UserStream stream;
        std::vector<std::unique_ptr<OnGpu>> arrays;
        std::vector<Communicator::WorkPtr> works;
        constexpr std::size_t kMany = 12;
        for (std::size_t i = 0; i < kMany; ++i) {
          arrays.push_back(std::make_unique<OnGpu>(stream, contribution(rank, 1 + 397 * i)));
          works.push_back(allreduce(*group, Buffer(*arrays[i]), *arrays[i], {}, arrays[i]->shape()));
        }
        for (std::size_t i = kMany; i-- > 0;) finish(works[(i * 7) % kMany], stream);
        for (std::size_t i = 0; i < kMany; ++i) REQUIRE(arrays[i]->get() == sum(size, 1 + 397 * i));
      }
      group->close(soon());
    });
  }
}

TEST_CASE("devices: a rank that waits on the host lets staged operations progress") {
  const int size = 2;
  for (const DevicePath path : kPaths) {
    DeviceWorld world(size, path);
    as_ranks(size, [&](int rank) {
      const auto group = world.join(rank);
      const auto part = group->split(0, 0, soon(), "");
      {
        const UserStream stream;
        OnGpu x(stream, 5003), y(stream, 5003);
        fake().hold(stream.get());
        x.set(contribution(rank, 5003));
        Communicator::WorkPtr work = rank == 0 ? part->send(Buffer(x), 1, 3) : part->recv(y, 0, 3);
        fake().release(stream.get());
        if (rank == 1) finish(work, stream);
        barrier(*group)->wait(soon());  // the other group's, which rank 1 comes to when it has its message
        work->wait(soon());
        if (rank == 1) REQUIRE(y.get() == contribution(0, 5003));
      }
      part->close(soon());
      group->close(soon());
    });
  }
}

TEST_CASE("devices: what is staged and late says whether a rank is missing or this one's device") {
  DeviceWorld world(2, DevicePath::staged);
  std::atomic<int> n_told = 0;
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank);
    const UserStream stream;
    OnGpu x(stream, contribution(rank, 100)), y(stream, contribution(rank, 50));
    const auto late = [&](const Communicator::WorkPtr& work) {
      try {
        work->wait(Deadline::after(Seconds(0.05)));
      } catch (const TimeoutError& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    gpu()->synchronize(stream.get());
    if (rank == 0) fake().hold(stream.get());
    const auto first = allreduce(*group, Buffer(x), x, {}, x.shape());
    const auto second = allreduce(*group, Buffer(y), y, {}, y.shape());
    if (rank == 0) {
      CHECK(late(first).find("this rank's device, which has not finished the work queued before") != std::string::npos);
      CHECK(late(second).find("queued before an earlier operation") != std::string::npos);
    } else {
      fake().run_unblocked();  // copies have completed
      for (const auto& work : {first, second}) CHECK(late(work).find("for rank 0") != std::string::npos);
    }
    ++n_told;
    for (const Deadline deadline = soon(); n_told < 2;) {
      REQUIRE(!deadline.passed());
      std::this_thread::yield();
    }
    if (rank == 0) fake().release(stream.get());
    first->wait(soon());
    second->wait(soon());
    REQUIRE(x.get() == sum(2, 100));
    REQUIRE(y.get() == sum(2, 50));
    group->close(soon());
  });
}

TEST_CASE("devices: a long message ends where its other end leaves the group") {
  for (const bool sender_leaves : {false, true}) {
    DeviceWorld world(2, DevicePath::staged);
    world.staging_bytes = 1 << 20;  // which no transport sends before the receive
    std::atomic<int> n_told = 0;
    as_ranks(2, [&](int rank) {
      const auto group = world.join(rank);
      const UserStream stream;
      OnGpu x(stream, Floats(1 << 20, 1.0F));
      const bool sends = rank == (sender_leaves ? 1 : 0);
      const bool is_late = sends && rank == 1;  // or another rank's thread could make it progress until it leaves
      gpu()->synchronize(stream.get());
      if (is_late) fake().hold(stream.get());
      Communicator::WorkPtr work;
      if (sends) work = group->send(Buffer(x), 1 - rank, 7);
      barrier(*group)->wait(soon());
      if (rank == 1) {
        group->abandon(std::make_exception_ptr(Error("rank 1 leaves")), "rank 1 leaves");
        if (is_late) fake().release(stream.get());
        return;
      }
      if (!sends) work = group->recv(x, 1, 7, Fit::exactly);
      try {
        work->wait(soon());
      } catch (const PeerLostError& error) {
        const std::string text = error.what();
        CAPTURE(text);
        REQUIRE(text.find(sends ? "send of 1048576 float32 to rank 1" : "recv of 1048576 float32") != text.npos);
        ++n_told;
      }
    });
    REQUIRE(n_told == 1);
  }
}

TEST_CASE("devices: an error of NCCL on one rank ends the operation on all") {
  const int size = 3;
  const Variable accident("FAKE_NCCL_FAIL", "1:2:error");
  DeviceWorld world(size, DevicePath::nccl);
  std::vector<std::string> texts(size);
  as_ranks(size, [&](int rank) {
    const auto group = world.join(rank);
    const UserStream stream;
    OnGpu x(stream, contribution(rank, 100));
    const auto once = [&] { allreduce(*group, Buffer(x), x, {}, x.shape())->wait(soon()); };
    once();
    once();
    try {
      once();
    } catch (const Error& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
    CHECK_THROWS_AS(once(), Error);  // and all that come later
    CHECK_THROWS_AS(barrier(*group)->wait(soon()), Error);
  });
  for (const std::string& text : texts) CHECK(text.find("injected error") != std::string::npos);
}

TEST_CASE("devices: an operation that hangs ends at its deadline") {
  const Variable accident("FAKE_NCCL_FAIL", "0:0:hang");  // the first one, so that none has to end in time
  DeviceWorld world(2, DevicePath::nccl);
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank, Seconds(0.5));
    const UserStream stream;
    OnGpu x(stream, contribution(rank, 100));
    const auto once = [&] { ended(allreduce(*group, Buffer(x), x, {}, x.shape()))->wait(soon()); };
    CHECK(error_of(once).find("has not ended after 0.5 s") != std::string::npos);
    CHECK_THROWS_AS(once(), Error);
  });
}

TEST_CASE("devices: a rank that does not call is named at the group's own deadline") {
  DeviceWorld world(2, DevicePath::nccl);
  std::atomic<bool> notified = false;
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank, Seconds(0.5));
    const UserStream stream;
    OnGpu x(stream, contribution(rank, 100));
    if (rank == 0) {
      const std::string text = error_of([&] { ended(start_allreduce(*group, x))->wait(soon()); });
      CAPTURE(text);
      CHECK(text.find("not all ranks have reached it: ") != std::string::npos);
      CHECK(text.find("has waited 0.5 s for rank 1") != std::string::npos);
      notified = true;
    }
    until([&] { return notified.load(); });
  });
}

TEST_CASE("devices: a mismatch is reported on all ranks") {
  DeviceWorld world(2, DevicePath::nccl);
  all_are_told_of_a_difference(world);
}

TEST_CASE("devices: wrong memory is refused before anything happens") {
  DeviceWorld world(1, DevicePath::nccl);
  as_ranks(1, [&](int rank) {
    const auto group = world.join(rank);
    {
      const UserStream stream;
      OnGpu x(stream, 5), shorter(stream, 4);
      Buffer elsewhere = x;
      elsewhere.device.index = 2;
      CHECK_THROWS_AS(allreduce(*group, Buffer(x), shorter, {}, x.shape()), InvalidArgumentError);
      CHECK_THROWS_AS(allreduce(*group, elsewhere, elsewhere, {}, x.shape()), InvalidArgumentError);
      elsewhere.device.kind = DeviceKind::rocm;
      CHECK_THROWS_AS(allreduce(*group, elsewhere, elsewhere, {}, x.shape()), UnavailableError);
      CHECK_THROWS_AS(bcast(*group, x, 3, x.shape()), InvalidArgumentError);
    }
    group->close(soon());
  });
}

TEST_CASE("devices: nothing is left behind") {
  std::array<long, 4> before{}, after{};
  fake().counts(before.data());
  for (const DevicePath path : kPaths) {
    DeviceWorld world(2, path);
    as_ranks(2, [&](int rank) {
      auto group = world.join(rank);
      {
        const UserStream stream;
        OnGpu x(stream, contribution(rank, 5003));
        finish(allreduce(*group, Buffer(x), x, {}, x.shape()), stream);
        REQUIRE(x.get() == sum(2, 5003));
      }
      group->close(soon());
    });
  }
  // A thread that has launched operations holds its group until it sees that it has been closed. Fewer are left where
  // groups of earlier tests have ended only now.
  until([&] {
    fake().counts(after.data());
    return std::ranges::equal(after, before, std::less_equal{});
  });
}
