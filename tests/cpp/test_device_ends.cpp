#include <doctest/doctest.h>

#include <atomic>
#include <string>

#include "core/error.h"
#include "device_world.h"
#include "nccl/nccl_member.h"

// How operations that have failed, and communicators of NCCL, end: both wait for the device.

using namespace samestep;

namespace {

void abandon(Communicator& group) { group.abandon(std::make_exception_ptr(StepError("given up")), "given up"); }

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("device ends: an operation that failed has its memory until the device has left it") {
  DeviceWorld world(1, DevicePath::nccl);
  as_ranks(1, [&](int rank) {
    const auto group = world.join(rank);
    const UserStream stream;
    const OnGpu x(stream, contribution(rank, 100));
    fake().hold(stream.get());
    const auto work = start_allreduce(*group, x);
    abandon(*group);
    CHECK(has(error_of([&] { work->wait(soon()); }), "given up"));
    fake().run_unblocked();
    CHECK(!work->device_has_ended());
    fake().release(stream.get());
    until([&] { return work->device_has_ended(); });
  });
}

TEST_CASE("device ends: what the device has completed is a result, although the group is given up before anyone asks") {
  for (int turn = 0; turn < 20; ++turn) {
    DeviceWorld world(1, DevicePath::nccl);
    as_ranks(1, [&](int rank) {
      const auto group = world.join(rank);
      const UserStream stream;
      OnGpu x(stream, contribution(rank, 100));
      const auto work = start_allreduce(*group, x);
      finish(work, stream);
      CHECK(x.get() == sum(1, 100));
      abandon(*group);
      CHECK(error_of([&] { work->wait(soon()); }) == "");
    });
  }
}

TEST_CASE("device ends: an operation that NCCL was never given leaves its memory at once") {
  DeviceWorld world(2, DevicePath::nccl);
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank);
    const auto other = group->split(0, rank, soon(), "other");
    if (rank == 0) {
      const UserStream stream;
      const OnGpu x(stream, contribution(rank, 100));
      const auto work = start_allreduce(*other, x);  // waits for rank 1, which does not come
      abandon(*other);
      CHECK(has(error_of([&] { work->wait(soon()); }), "given up"));
      until([&] { return work->device_has_ended(); });
    }
    barrier(*group)->wait(soon());
    group->close(soon());
  });
}

TEST_CASE("device ends: a call of the runtime that blocks holds up no deadline, and nobody who gives up") {
  DeviceWorld world(1, DevicePath::nccl);
  as_ranks(1, [&](int rank) {
    const auto group = world.join(rank);
    const UserStream stream;
    const OnGpu x(stream, contribution(rank, 100));
    fake().hold(stream.get());
    const auto work = start_allreduce(*group, x);
    fake().hold_queries(1);
    until([] { return fake().held_queries() > 0; });  // of the watching thread
    CHECK(has(error_of([&] { work->wait(Deadline::after(Seconds(0.1))); }), "has not ended after 0.1 s"));
    CHECK(has(error_of([&] { group->close(Deadline::after(Seconds(0.1))); }), "are pending"));
    abandon(*group);
    CHECK(has(error_of([&] { work->wait(soon()); }), "given up"));
    fake().hold_queries(0);
    fake().release(stream.get());
  });
}

TEST_CASE("device ends: a call of the runtime that blocks in one thread holds up no other one where all is staged") {
  DeviceWorld world(1, DevicePath::staged);
  as_ranks(1, [&](int rank) {
    const auto group = world.join(rank);
    const UserStream stream;
    const OnGpu x(stream, contribution(rank, 100));
    fake().hold(stream.get());
    const auto work = start_allreduce(*group, x);
    fake().hold_queries(1);
    std::thread other([&] {
      gpu()->set_device(rank);
      work->done();  // it is in the call until the end
    });
    until([] { return fake().held_queries() > 0; });
    CHECK(has(error_of([&] { work->wait(Deadline::after(Seconds(0.1))); }), "has waited 0.1 s"));
    CHECK(has(error_of([&] { group->close(Deadline::after(Seconds(0.1))); }), "are pending"));
    abandon(*group);
    fake().hold_queries(0);
    other.join();
    CHECK(has(error_of([&] { work->wait(soon()); }), "given up"));
    fake().release(stream.get());
  });
}

TEST_CASE("device ends: who drops a group does not wait for a call of the runtime that blocks") {
  DeviceWorld world(1, DevicePath::nccl);
  std::atomic<bool> dropped = false;
  std::thread gives_up([&] {  // else a failure would be a test that never ends
    const Deadline deadline = Deadline::after(Seconds(20));
    while (!dropped && !deadline.passed()) std::this_thread::yield();
    CHECK(dropped);
    fake().hold_queries(0);
  });
  as_ranks(1, [&](int rank) {
    auto group = world.join(rank);
    const UserStream stream;
    const OnGpu x(stream, contribution(rank, 100));
    fake().hold(stream.get());
    auto work = start_allreduce(*group, x);
    fake().hold_queries(1);
    until([] { return fake().held_queries() > 0; });  // of the watching thread
    SUBCASE("after an error") { abandon(*group); }
    SUBCASE("in progress") {}
    work.reset();
    group.reset();
    dropped = true;
    fake().release(stream.get());
  });
  gives_up.join();
  until([] { return fake_nccl().comms() == 0; });  // the watching thread ends NCCL
}

TEST_CASE("device ends: a rank that leaves with its result takes it from no rank whose device is behind") {
  bool graphs_exist = false;
  SUBCASE("") {}
  SUBCASE("while graphs hold operations") { graphs_exist = true; }
  const Variable slow("FAKE_NCCL_SLOW", "1");
  constexpr std::size_t kCount = 300000;  // elements: several of the pieces after each of which rank 1 is behind
  constexpr Seconds kGrace{1};            // that the device has after another rank has left
  std::atomic<Clock::time_point> left = Clock::time_point::max();
  DeviceWorld world(2, DevicePath::nccl);
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank);
    const UserStream stream;
    OnGpu x(stream, contribution(rank, kCount));
    if (graphs_exist) {
      REQUIRE(fake().begin_capture(stream.get(), 0) == 0);
      start_allreduce(*group, x);
      void* graph = nullptr;
      REQUIRE(fake().end_capture(stream.get(), &graph) == 0);
    }
    const auto work = start_allreduce(*group, x);
    const std::string error = error_of([&] { work->wait(soon()); });
    if (rank == 0) {
      left = Clock::now();
      abandon(*group);
    } else if (!error.empty() && Clock::now() - left.load() >= kGrace) {
      return;  // the thread that is its device has had no processor
    }
    CHECK(error == "");
    CHECK(x.get() == sum(2, kCount));
  });
}

TEST_CASE("device ends: a rank that has left because of an exception is not lost") {
  DeviceWorld world(2, DevicePath::nccl);
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank);
    group->membership().open_block(1);
    const UserStream stream;
    const OnGpu x(stream, contribution(rank, 100));
    if (rank == 0) fake().hold(stream.get());
    const auto work = start_allreduce(*group, x);
    if (rank == 1) {
      group->membership().revoke("rank 1 raised BadBatch", 1);
    } else {
      try {
        work->wait(soon());
        FAIL("rank 1 has left");
      } catch (const StepError& error) {
        CHECK(has(error.what(), "rank 1 raised BadBatch"));
      }
      fake().release(stream.get());
    }
    until([&] { return work->device_has_ended(); });
  });
}

TEST_CASE("device ends: to close has a deadline while NCCL waits for a device that does not come") {
  DeviceWorld world(1, DevicePath::nccl);
  as_ranks(1, [&](int rank) {
    const auto group = world.join(rank, Seconds(0.2));
    const UserStream stream;
    const OnGpu x(stream, contribution(rank, 100));
    fake().hold(stream.get());
    const auto work = start_allreduce(*group, x);
    CHECK(error_of([&] { ended(work)->wait(soon()); }).find("has not ended after 0.2 s") != std::string::npos);
    CHECK(error_of([&] { group->close(Deadline::after(Seconds(0.2))); }).find("NCCL of group") != std::string::npos);
    fake().release(stream.get());
  });
}

TEST_CASE("device ends: nothing is launched any more once close has seen that nothing is pending") {
  auto ends = connected_ranks(2);
  std::atomic<bool> refused = false;
  until([] { return fake_nccl().comms() == 0; });
  as_ranks(2, [&](int rank) {
    gpu()->set_device(rank);
    const std::shared_ptr<Communicator> host =
        open_tcp_world(rank, std::move(ends[static_cast<std::size_t>(rank)]), {});
    const std::shared_ptr<Communicator> check = host->split(0, rank, soon(), "check");
    NcclComm::Options options;
    options.gpu = gpu();
    options.nccl = NcclLibrary::open(FAKE_NCCL);
    options.device = rank;
    const auto comm = NcclComm::open(std::move(options), host, check, soon());
    if (rank == 1) {
      until([&] { return refused.load(); });
      return comm->close(soon());
    }
    const std::uint64_t before = check->counters().operations;
    std::thread closes([&] { comm->close(soon()); });
    until([&] { return check->counters().operations > before; });  // close waits for rank 1
    NcclLaunch late{.compared = {CollectiveType::barrier}};
    CHECK(has(error_of([&] { comm->launch(std::move(late)); }), "is closed"));
    refused = true;
    closes.join();
  });
}

TEST_CASE("device ends: a communicator that has failed is aborted, and later calls of its thread begin") {
  const Variable accident("FAKE_NCCL_FAIL", "0:0:error");
  const auto nccl = NcclLibrary::open(FAKE_NCCL);
  gpu()->set_device(0);
  NcclMember member(gpu(), nccl, 0);
  const auto comes_to = [&](int state) { until([&] { return member.state().state == state; }); };
  member.init(1, nccl->unique_id(), 0);
  comes_to(nccl_abi::kSuccess);
  member.split(0);
  comes_to(nccl_abi::kSuccess);
  const UserStream stream;
  const OnGpu x(stream, contribution(0, 5));
  const Buffer all = x;
  nccl->all_reduce(all.data, all.data, all.count, nccl_abi::kFloat32, nccl_abi::kSum, member.comm(), member.stream());
  constexpr int kSystemError = 2;
  comes_to(kSystemError);
  member.destroy();
  CHECK_THROWS_AS(nccl->group_end(), Error);  // this thread is in no group
}
