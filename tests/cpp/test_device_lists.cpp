#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "collective_calls.h"
#include "contributions.h"
#include "core/error.h"
#include "device/device_cliques.h"
#include "device_world.h"

// Lists of arrays on several devices of each rank, on the stand-ins of tests/fakes.

using namespace samestep;

namespace {

/// One float array on each of a rank's two devices, 2 * rank and 2 * rank + 1, each in a stream of its own.
class OnPair {
 public:
  OnPair(int rank, std::size_t count, std::size_t times = 1) {
    for (int j = 0; j < 2; ++j) {
      devices_[static_cast<std::size_t>(j)] = 2 * rank + j;
      gpu()->set_device(2 * rank + j);
      streams_.push_back(std::make_unique<UserStream>());
      arrays_.push_back(std::make_unique<OnGpu>(*streams_.back(), count * times));
      if (times == 1) arrays_.back()->set(contribution(2 * rank + j, count));
    }
    gpu()->set_device(rank);
  }
  std::vector<int> devices() const { return {devices_[0], devices_[1]}; }
  std::vector<Buffer> buffers() const { return {*arrays_[0], *arrays_[1]}; }
  std::vector<ConstBuffer> inputs() const { return {Buffer(*arrays_[0]), Buffer(*arrays_[1])}; }
  std::vector<InOut> in_place() const {
    return {{Buffer(*arrays_[0]), *arrays_[0]}, {Buffer(*arrays_[1]), *arrays_[1]}};
  }
  OnGpu& operator[](std::size_t j) { return *arrays_[j]; }
  const UserStream& stream(std::size_t j) const { return *streams_[j]; }
  void finish(const Communicator::WorkPtr& work) const {
    for (const auto& stream : streams_) {
      REQUIRE(work->make_stream_wait(reinterpret_cast<StreamHandle>(stream->get()), soon()));
    }
  }

 private:
  std::array<int, 2> devices_{};
  std::vector<std::unique_ptr<UserStream>> streams_;
  std::vector<std::unique_ptr<OnGpu>> arrays_;
};

}  // namespace

TEST_CASE("devices: lists of two devices on each rank") {
  const Variable many("FAKE_GPU_DEVICES", "8");
  for (const char* late : {"0", "1"}) {
    const Variable in_progress("FAKE_NCCL_IN_PROGRESS", late);
    for (const int size : {1, 2, 3}) {
      DeviceWorld world(size, DevicePath::nccl);
      as_ranks(size, [&](int rank) {
        const auto group = world.join(rank);
        DeviceCliques& cliques = group->cliques();
        for (const std::size_t count : {std::size_t{1}, std::size_t{5003}}) {
          const Floats total = sum(2 * size, count), last = contribution(2 * size - 1, count);
          OnPair x(rank, count);
          const int number = count == 1 ? cliques.add(x.devices(), soon()) : cliques.clique_id(x.devices());
          REQUIRE(number == 2);  // 1 is each rank's own device
          x.finish(cliques.allreduce(number, x.in_place(), {}));
          for (std::size_t j : {0, 1}) REQUIRE(x[j].get() == total);
          OnPair y(rank, count);
          x.finish(cliques.reduce(number, y.inputs(), x[1], {}, size - 1, 1));
          y.finish(cliques.bcast(number, y.buffers(), size - 1, 1));
          for (std::size_t j : {0, 1}) REQUIRE(y[j].get() == last);
          if (rank == size - 1) REQUIRE(x[1].get() == total);
          OnPair z(rank, count), all(rank, count, 2 * static_cast<std::size_t>(size));
          const std::vector<std::vector<Buffer>> whole{{all[0]}, {all[1]}};
          all.finish(cliques.allgather(number, z.inputs(), whole));
          Floats gathered;
          for (int member = 0; member < 2 * size; ++member) {
            const Floats one = contribution(member, count);
            gathered.insert(gathered.end(), one.begin(), one.end());
          }
          for (std::size_t j : {0, 1}) REQUIRE(all[j].get() == gathered);
        }
        group->close(soon());
      });
    }
  }
}

namespace {

/// What the array of one device, the first or an extra one, is found to be: before it was made (`early`), or after the
/// operation should have completed (`stale`).
struct Found {
  int early = 0, stale = 0;
};

Found torture(std::size_t late) {
  constexpr std::size_t kCount = 3001;
  Found found;
  DeviceWorld world(1, DevicePath::nccl);
  as_ranks(1, [&](int rank) {
    const auto group = world.join(rank);
    {
      OnPair x(rank, kCount);
      const Floats total = sum(2, kCount);
      const int number = group->cliques().add(x.devices(), soon());
      x[late].set(Floats(kCount, -1.0F));
      for (std::size_t j : {0, 1}) gpu()->synchronize(x.stream(j).get());
      fake().hold(x.stream(late).get());
      x[late].set(contribution(static_cast<int>(late), kCount));
      auto work = group->cliques().allreduce(number, x.in_place(), {});
      fake().run_unblocked();  // whatever does not wait for the producer has run by now
      fake().release(x.stream(late).get());
      work->wait(soon());
      for (std::size_t j : {0, 1}) found.early += x[j].get() != total;

      for (std::size_t j : {0, 1}) x[j].set(contribution(static_cast<int>(j), kCount));
      for (std::size_t j : {0, 1}) gpu()->synchronize(x.stream(j).get());
      fake().hold_writes(1);
      work = group->cliques().allreduce(number, x.in_place(), {});
      x.finish(work);
      const Floats& got = x[late].begin_get();
      fake().run_unblocked();  // whatever does not wait for the operation has run by now
      fake().hold_writes(0);
      work->wait(soon());
      gpu()->synchronize(x.stream(late).get());
      found.stale += got != total;
    }
    group->close(soon());
  });
  return found;
}

}  // namespace

TEST_CASE("devices: lists are ordered with the streams of each device") {
  const Variable many("FAKE_GPU_DEVICES", "8");
  for (const std::size_t late : {0, 1}) {
    const Found found = torture(late);
    REQUIRE(found.early == 0);
    REQUIRE(found.stale == 0);
  }
}

TEST_CASE("devices: the end of a list is that of its slowest device") {
  const Variable many("FAKE_GPU_DEVICES", "8");
  for (const char* slow : {"0", "1"}) {
    const Variable one("FAKE_NCCL_SLOW", slow);
    DeviceWorld world(1, DevicePath::nccl);
    as_ranks(1, [&](int rank) {
      const auto group = world.join(rank);
      {
        OnPair x(rank, 101);
        const int number = group->cliques().add(x.devices(), soon());
        x.finish(group->cliques().allreduce(number, x.in_place(), {}));
        for (std::size_t j : {0, 1}) REQUIRE(x[j].get() == sum(2, 101));
      }
      group->close(soon());
    });
  }
}

TEST_CASE("devices without waits: the case of lists finds it where one side does not wait for the other") {
  const Variable many("FAKE_GPU_DEVICES", "8");
  for (const std::size_t late : {0, 1}) {
    {
      const Variable ignored("FAKE_GPU_IGNORE_WAITS", "library");
      REQUIRE(torture(late).early > 0);
    }
    const Variable ignored("FAKE_GPU_IGNORE_WAITS", "user");
    REQUIRE(torture(late).stale > 0);
  }
}

TEST_CASE("devices: lists that differ between ranks end on all of them") {
  const Variable many("FAKE_GPU_DEVICES", "8");
  DeviceWorld world(2, DevicePath::nccl);
  std::atomic<int> n_told = 0;
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank);
    OnPair x(rank, 100);
    const int number = group->cliques().add(x.devices(), soon());
    const Reduction reduction{rank == 0 ? ReduceOp::sum : ReduceOp::max, 1.0};
    try {
      group->cliques().allreduce(number, x.in_place(), reduction)->wait(soon());
    } catch (const MismatchError& error) {
      n_told += std::string(error.what()).find("of 2 arrays of float32[100]") != std::string::npos;
    }
    CHECK_THROWS_AS(group->cliques().allreduce(number, x.in_place(), {}), MismatchError);
    barrier(*group)->wait(soon());  // the host part of the group stays usable
  });
  REQUIRE(n_told == 2);
}

TEST_CASE("devices: an error of one member of a list ends it on all ranks") {
  const Variable many("FAKE_GPU_DEVICES", "8"), accident("FAKE_NCCL_FAIL", "3:1:error");
  DeviceWorld world(2, DevicePath::nccl);
  std::vector<std::string> texts(2);
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank);
    OnPair x(rank, 100);
    const int number = group->cliques().add(x.devices(), soon());
    const auto once = [&] { group->cliques().allreduce(number, x.in_place(), {})->wait(soon()); };
    once();
    try {
      once();
    } catch (const Error& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
    CHECK_THROWS_AS(once(), Error);
  });
  for (const std::string& text : texts) CHECK(text.find("injected error") != std::string::npos);
}

TEST_CASE("devices: lists that do not fit are refused before anything happens") {
  const Variable many("FAKE_GPU_DEVICES", "8");
  DeviceWorld world(1, DevicePath::nccl);
  as_ranks(1, [&](int rank) {
    const auto group = world.join(rank);
    {
      OnPair x(rank, 5), shorter(rank, 4);
      DeviceCliques& cliques = group->cliques();
      const int number = cliques.add(x.devices(), soon());
      std::vector<Buffer> swapped{x[1], x[0]}, unequal{x[0], shorter[1]}, one{x[0]};
      for (const auto& wrong : {swapped, unequal, one}) {
        CHECK_THROWS_AS(cliques.bcast(number, wrong, 0, 0), InvalidArgumentError);
      }
      CHECK_THROWS_AS(cliques.bcast(number, x.buffers(), 1, 0), InvalidArgumentError);
      CHECK_THROWS_AS(cliques.bcast(number, x.buffers(), 0, 2), InvalidArgumentError);
      CHECK_THROWS_AS(cliques.bcast(7, x.buffers(), 0, 0), InvalidArgumentError);
      CHECK_THROWS_AS(cliques.allreduce(number, x.in_place(), {ReduceOp::bor, 1.0}), InvalidArgumentError);
    }
    group->close(soon());
  });
}

TEST_CASE("devices: lists whose outputs share memory with what NCCL reads are refused before anything happens") {
  const Variable many("FAKE_GPU_DEVICES", "8");
  DeviceWorld world(1, DevicePath::nccl);
  as_ranks(1, [&](int rank) {
    const auto group = world.join(rank);
    {
      OnPair x(rank, 40);
      DeviceCliques& cliques = group->cliques();
      const int number = cliques.add(x.devices(), soon());
      const auto part = [&](std::size_t j, std::size_t at, std::size_t n) {
        Buffer cut = x[j];
        cut.data = static_cast<float*>(cut.data) + at;
        cut.count = n;
        return cut;
      };
      const auto all = [&](std::size_t at, std::size_t n) {
        return std::vector<ConstBuffer>{part(0, at, n), part(1, at, n)};
      };
      const auto reduced = [&](std::size_t at) {
        return std::vector<InOut>{{part(0, 0, 5), part(0, at, 5)}, {part(1, 0, 5), part(1, at, 5)}};
      };
      using Outs = std::vector<std::vector<Buffer>>;
      const auto shares = [](const auto& act) { return error_of(act).find("shares memory with") != std::string::npos; };
      CHECK(shares([&] { cliques.allreduce(number, reduced(3), {}); }));
      CHECK(shares([&] { cliques.reduce(number, all(0, 5), part(1, 2, 5), {}, 0, 1); }));
      CHECK(shares([&] { cliques.allgather(number, all(3, 5), Outs{{part(0, 0, 10)}, {part(1, 0, 10)}}); }));
      const auto pieces = [&](std::size_t j, std::size_t at) { return std::vector{part(j, 0, 5), part(j, at, 5)}; };
      CHECK(shares([&] { cliques.allgather(number, all(10, 5), Outs{pieces(0, 3), pieces(1, 20)}); }));
      CHECK(shares([&] { cliques.allgather(number, all(10, 5), Outs{pieces(0, 20), pieces(1, 12)}); }));
      // In place, each member in its own block, and with gaps.
      x.finish(cliques.allreduce(number, reduced(0), {}));
      x.finish(cliques.reduce(number, all(0, 5), part(1, 0, 5), {}, 0, 1));
      const std::vector<ConstBuffer> blocks{part(0, 0, 5), part(1, 5, 5)}, places{part(0, 0, 5), part(1, 7, 5)};
      x.finish(cliques.allgather(number, blocks, Outs{{part(0, 0, 10)}, {part(1, 0, 10)}}));
      x.finish(cliques.allgather(number, places, Outs{pieces(0, 7), pieces(1, 7)}));
    }
    group->close(soon());
  });
}
