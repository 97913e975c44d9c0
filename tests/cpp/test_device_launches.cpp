#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <string>

#include "collective_calls.h"
#include "core/error.h"
#include "device_world.h"

// When calls of NCCL begin, and which thread makes them: it waits for other ranks at the first use of a connection.

using namespace samestep;

namespace {

constexpr const char* kForGood = "1000000000";  // looks, before a call ends
constexpr std::size_t kLong = 20000;            // elements: more than what the stand-in reduces by its other path

void wait_for(const std::atomic<bool>& flag) {
  until([&] { return flag.load(); });
}

void order(Work& work, const UserStream& stream) {
  work.make_stream_wait(reinterpret_cast<StreamHandle>(stream.get()), soon());
}

void launch(Communicator& group, const OnGpu& x) { start_allreduce(group, x)->wait(soon()); }

}  // namespace

TEST_CASE("launches: calls return before the other ranks come, at each first use") {
  {
    DeviceWorld world(2, DevicePath::nccl);
    std::array<std::atomic<bool>, 4> called{};
    as_ranks(2, [&](int rank) {
      const auto group = world.join(rank);
      {
        const UserStream stream;
        OnGpu few(stream, contribution(rank, 100)), many(stream, contribution(rank, kLong));
        OnGpu sent(stream, Floats(6, static_cast<float>(rank))), received(stream, 6), all(stream, 200);
        const OnGpu part(stream, contribution(rank, 100));
        const std::array<std::function<Communicator::WorkPtr()>, 4> firsts{
            [&] { return start_allreduce(*group, few); }, [&] { return start_allreduce(*group, many); },
            [&] { return alltoall(*group, Buffer(sent), received, Shape::flat(3)); },
            [&] { return allgather(*group, Buffer(part), all, part.shape()); }};
        for (std::size_t i = 0; i < firsts.size(); ++i) {
          if (rank == 1) wait_for(called[i]);  // as for a message that rank 0 sends after its call
          const auto work = firsts[i]();
          if (rank == 0) called[i] = true;
          finish(work, stream);
        }
        REQUIRE(few.get() == sum(2, 100));
        REQUIRE(many.get() == sum(2, kLong));
        REQUIRE(received.get() == Floats{0, 0, 0, 1, 1, 1});
      }
      group->close(soon());
    });
  }
}

TEST_CASE("launches: calls return at the first use of what only complex numbers or a factor need") {
  constexpr std::size_t kShort = 10000;  // whose pairs are long
  for (const bool scaled : {false, true}) {
    DeviceWorld world(2, DevicePath::nccl);
    std::atomic<bool> called = false;
    as_ranks(2, [&](int rank) {
      const auto group = world.join(rank);
      {
        const UserStream stream;
        OnGpu x(stream, contribution(rank, kShort)), y(stream, contribution(rank, scaled ? kShort : 2 * kShort));
        launch(*group, x);
        Buffer values = y;
        values.count = kShort;
        if (!scaled) values.dtype = DType::complex64;
        const Reduction reduction{scaled ? ReduceOp::premul : ReduceOp::sum, scaled ? 0.5 : 1.0};
        if (rank == 1) wait_for(called);
        const auto work = allreduce(*group, values, values, reduction, x.shape());
        if (rank == 0) called = true;
        finish(work, stream);
        Floats expected = sum(2, scaled ? kShort : 2 * kShort);
        if (scaled) {
          for (float& value : expected) value *= 0.5F;
        }
        REQUIRE(y.get() == expected);
      }
      group->close(soon());
    });
  }
}

TEST_CASE("launches: in the steady state no thread, no memory, no wait of the host, and events from a pool") {
  DeviceWorld world(2, DevicePath::nccl);
  std::array<long, 4> before{}, after{};
  std::array<long, 2> n_threads{};
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank);
    {
      const UserStream stream;
      OnGpu x(stream, Floats(100, 0.0F)), sent(stream, Floats(6, 1.0F)), received(stream, 6);
      const auto step = [&] {
        for (const auto& begin : std::initializer_list<std::function<Communicator::WorkPtr()>>{
                 [&] { return start_allreduce(*group, x); },
                 [&] { return bcast(*group, received, 0, received.shape()); },
                 [&] { return alltoall(*group, Buffer(sent), received, Shape::flat(3)); }}) {
          const auto work = begin();
          finish(work, stream);
          work->wait(soon());  // so that there is one operation at a time
        }
      };
      for (int i = 0; i < 3; ++i) step();
      barrier(*group)->wait(soon());
      if (rank == 0) {
        fake().made(before.data());
        n_threads[0] = fake_nccl().threads();
      }
      barrier(*group)->wait(soon());
      for (int i = 0; i < 50; ++i) step();
      barrier(*group)->wait(soon());
      if (rank == 0) {
        fake().made(after.data());
        n_threads[1] = fake_nccl().threads();
      }
      barrier(*group)->wait(soon());
    }
    group->close(soon());
  });
  REQUIRE(after[0] == before[0]);      // blocks of memory
  REQUIRE(after[1] == before[1]);      // streams
  REQUIRE(after[2] - before[2] <= 8);  // events: of 300 operations those that a watching thread looks at just then
  REQUIRE(after[3] == before[3]);      // waits of the host
  REQUIRE(n_threads[0] == n_threads[1]);
}

TEST_CASE("launches: none starts a thread of NCCL") {
  {
    DeviceWorld world(2, DevicePath::nccl);
    const long calls_before = fake_nccl().calls(), threads_before = fake_nccl().threads();
    as_ranks(2, [&](int rank) {
      const auto group = world.join(rank);
      {
        const UserStream stream;
        OnGpu x(stream, contribution(rank, 100));
        for (int i = 0; i < 5; ++i) launch(*group, x);
      }
      group->close(soon());
    });
    REQUIRE(fake_nccl().calls() - calls_before == 10);
    REQUIRE(fake_nccl().threads() - threads_before == 0);
  }
}

TEST_CASE("launches: groups have no communicators of NCCL before they use one") {
  DeviceWorld world(2, DevicePath::nccl);
  const long before = fake_nccl().comms();
  std::array<long, 3> n{};
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank);
    const auto count = [&](std::size_t at) {
      barrier(*group)->wait(soon());
      if (rank == 0) n[at] = fake_nccl().comms() - before;
      barrier(*group)->wait(soon());
    };
    count(0);
    const auto used = group->split(0, rank, soon(), "used");
    const auto unused = group->split(rank, 0, soon(), "unused");
    count(1);
    {
      const UserStream stream;
      OnGpu x(stream, contribution(rank, 100));
      launch(*used, x);
      REQUIRE(x.get() == sum(2, 100));
    }
    count(2);
    unused->close(soon());
    used->close(soon());
    group->close(soon());
  });
  REQUIRE(n[0] == 4);  // on each rank the one that was made, and the one split off it
  REQUIRE(n[1] == n[0]);
  REQUIRE(n[2] == 2 * n[0]);
  REQUIRE(fake_nccl().comms() == before);
}

TEST_CASE("launches: while one is in progress others close in vain and give up") {
  {
    const Variable progress("FAKE_NCCL_IN_PROGRESS", kForGood);
    DeviceWorld world(2, DevicePath::nccl);
    const long before = fake_nccl().calls();
    std::array<std::atomic<bool>, 2> looked{};
    as_ranks(2, [&](int rank) {
      const auto group = world.join(rank, Seconds(40));
      const UserStream stream;
      OnGpu x(stream, contribution(rank, 100)), y(stream, contribution(rank, 50));
      const auto first = start_allreduce(*group, x), second = start_allreduce(*group, y);
      until([&] { return fake_nccl().calls() - before >= 2; });  // the first of both
      const std::string closed = error_of([&] { group->close(Deadline::after(Seconds(0.1))); });
      CHECK(closed.find("are pending") != std::string::npos);
      CHECK(!first->done());
      CHECK(!second->done());
      looked[static_cast<std::size_t>(rank)] = true;
      wait_for(looked[static_cast<std::size_t>(1 - rank)]);
      group->abandon(std::make_exception_ptr(PeerLostError("given up")), "given up");
      for (const auto& work : {first, second}) {
        CHECK(error_of([&] { work->wait(soon()); }).find("given up") != std::string::npos);
        CHECK(error_of([&] { order(*work, stream); }).find("given up") != std::string::npos);
      }
    });
  }
}

TEST_CASE("launches: one that NCCL never ends is given up at the group's deadline") {
  const Variable progress("FAKE_NCCL_IN_PROGRESS", kForGood);
  DeviceWorld world(2, DevicePath::nccl);
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank, Seconds(0.3));
    const UserStream stream;
    const OnGpu x(stream, contribution(rank, 100));
    CHECK(error_of([&] { order(*ended(start_allreduce(*group, x)), stream); }).find("has not ended after 0.3 s") !=
          std::string::npos);
  });
}

TEST_CASE("launches: NCCL gets them in the order of the calls") {
  const Variable progress("FAKE_NCCL_IN_PROGRESS", "300");
  DeviceWorld world(2, DevicePath::nccl);
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank);
    {
      const UserStream stream;
      OnGpu x(stream, contribution(rank, 100)), y(stream, contribution(rank, 50));
      launch(*group, y);
      y.set(contribution(rank, 50));
      const auto slow = start_allreduce(*group, x),
                 quick = start_allreduce(*group, y);  // whose order the stand-in compares
      quick->wait(soon());
      slow->wait(soon());
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
