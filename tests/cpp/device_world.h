#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collective_calls.h"
#include "communicator/self_communicator.h"
#include "contributions.h"
#include "core/error.h"
#include "device/device_communicator.h"
#include "loopback.h"
#include "os/dynamic_library.h"

// Ranks as threads, each with a device of its own, on the stand-ins of tests/fakes.

namespace samestep {

/// What the stand-in offers to tests.
struct Fake {
  int (*hold)(void*);
  int (*release)(void*);
  void (*hold_writes)(int);
  void (*hold_queries)(int);
  long (*held_queries)();
  void (*run_unblocked)();
  void (*counts)(long*);
  void (*made)(long*);
  int (*make_stream)(void**, unsigned);
  int (*destroy_stream)(void*);
  int (*begin_capture)(void*, int);
  int (*end_capture)(void*, void**);
};

inline const Fake& fake() {
  static const Fake only = [] {
    const OpenedLibrary library(FAKE_CUDART);
    Fake found{};
    REQUIRE((library.find("fakeHold", found.hold) && library.find("fakeRelease", found.release) &&
             library.find("fakeHoldWrites", found.hold_writes) && library.find("fakeHoldQueries", found.hold_queries) &&
             library.find("fakeHeldQueries", found.held_queries) &&
             library.find("fakeRunUnblocked", found.run_unblocked) && library.find("fakeCounts", found.counts) &&
             library.find("fakeMade", found.made) && library.find("cudaStreamCreateWithFlags", found.make_stream) &&
             library.find("cudaStreamDestroy", found.destroy_stream) &&
             library.find("cudaStreamBeginCapture", found.begin_capture) &&
             library.find("cudaStreamEndCapture", found.end_capture)));
    return found;
  }();
  return only;
}

struct FakeNccl {
  long (*calls)();
  long (*comms)();
  long (*threads)();
  long (*looks_for_ends)();
};

inline const FakeNccl& fake_nccl() {
  static const FakeNccl only = [] {
    const OpenedLibrary library(FAKE_NCCL);
    FakeNccl found{};
    REQUIRE((library.find("fakeNcclCalls", found.calls) && library.find("fakeNcclComms", found.comms) &&
             library.find("fakeNcclThreads", found.threads) &&
             library.find("fakeNcclLooksForEnds", found.looks_for_ends)));
    return found;
  }();
  return only;
}

/// A stream as a library of arrays makes it, which the stand-in tells from those of the package.
class UserStream {
 public:
  UserStream() { REQUIRE(fake().make_stream(&stream_, 0) == 0); }
  UserStream(const UserStream&) = delete;
  UserStream& operator=(const UserStream&) = delete;
  ~UserStream() { fake().destroy_stream(stream_); }
  GpuLibrary::Stream get() const { return stream_; }

 private:
  GpuLibrary::Stream stream_ = nullptr;
};

/// An environment variable that the stand-ins read, for a scope in which no other thread runs at the ends.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

inline std::shared_ptr<GpuLibrary> gpu() {
  static const std::shared_ptr<GpuLibrary> only = GpuLibrary::open(DeviceKind::cuda, FAKE_CUDART);
  return only;
}

enum class DevicePath { nccl, staged };

template <class Ready>
void until(Ready ready) {
  for (const Deadline deadline = soon(); !ready();) {
    REQUIRE(!deadline.passed());
    std::this_thread::yield();
  }
}

/// Until an operation has ended, without a wait, which would put the group's deadline off to its own.
inline std::shared_ptr<Work> ended(std::shared_ptr<Work> work) {
  until([&] { return work->done(); });
  return work;
}

struct DeviceWorld {
  DeviceWorld(int n_ranks, DevicePath path_of_world)
      : ends(connected_ranks(n_ranks)), size(n_ranks), path(path_of_world) {
    // Groups that an earlier test dropped without `close` end only when their launching threads have nothing to do.
    if (path == DevicePath::nccl) until([] { return fake_nccl().comms() == 0; });
  }
  std::shared_ptr<DeviceCommunicator> join(int rank, Seconds timeout = Seconds(60)) {
    gpu()->set_device(rank);
    DeviceOptions options{gpu(), rank, nullptr, timeout};
    options.staging_bytes = staging_bytes;
    if (path == DevicePath::nccl) options.nccl = NcclLibrary::open(FAKE_NCCL);
    ExchangeOptions exchange;
    exchange.oversubscribed = true;
    auto host = size == 1 ? make_self_communicator("world")
                          : open_tcp_world(rank, std::move(ends[static_cast<std::size_t>(rank)]), exchange);
    return DeviceCommunicator::open(std::move(host), std::move(options), soon());
  }
  std::vector<std::vector<TcpPeer>> ends;
  int size;
  DevicePath path;
  std::size_t staging_bytes = 4096;
};

/// The text of the error that `act` throws.
template <class Act>
std::string error_of(Act act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

template <class Act>
void as_ranks(int size, Act act) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back([&act, rank] { act(rank); });
  for (std::thread& thread : threads) thread.join();
}

/// Floats in device memory, set and read in one stream.
class OnGpu {
 public:
  OnGpu(const UserStream& stream, std::size_t count)
      : stream_(stream.get()), device_(gpu()->current_device()), count_(count) {
    void* const memory = gpu()->allocate(std::max<std::size_t>(count, 1) * sizeof(float));
    data_ = {memory, [device = device_](void* data) { gpu()->free(data, device); }};
  }
  OnGpu(const UserStream& stream, const Floats& values) : OnGpu(stream, values.size()) { set(values); }

  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  ~OnGpu() { gpu()->synchronize(stream_); }  // copies may still use what is kept

  /// Begins a copy from the host.
  void set(const Floats& values) {
    copies_.push_back(std::make_unique<Floats>(values));
    gpu()->copy(data_.get(), copies_.back()->data(), count_ * sizeof(float), stream_);
  }
  /// Begins a copy to the host, which is complete once the stream has reached it.
  const Floats& begin_get() {
    copies_.push_back(std::make_unique<Floats>(count_));
    gpu()->copy(copies_.back()->data(), data_.get(), count_ * sizeof(float), stream_);
    return *copies_.back();
  }
  Floats get() {
    const Floats& values = begin_get();
    gpu()->synchronize(stream_);
    return values;
  }
  operator Buffer() const {
    return {data_.get(), count_, DType::float32, {DeviceKind::cuda, device_}, reinterpret_cast<StreamHandle>(stream_)};
  }
  Shape shape() const { return Shape::flat(count_); }

 private:
  GpuLibrary::Stream stream_;
  int device_;
  std::size_t count_;
  std::shared_ptr<void> data_;
  std::vector<std::unique_ptr<Floats>> copies_;
};

/// Starts an allreduce in place.
inline Communicator::WorkPtr start_allreduce(Communicator& group, const OnGpu& x) {
  return allreduce(group, Buffer(x), x, {}, x.shape());
}

inline void finish(const Communicator::WorkPtr& work, const UserStream& stream) {
  REQUIRE(work->make_stream_wait(reinterpret_cast<StreamHandle>(stream.get()), soon()));
}

/// Of two ranks whose operations differ. The host part of the group stays usable.
inline void all_are_told_of_a_difference(DeviceWorld& world) {
  std::atomic<int> n_told = 0;
  as_ranks(2, [&](int rank) {
    const auto group = world.join(rank);
    const UserStream stream;
    OnGpu x(stream, contribution(rank, 100));
    const Reduction reduction{rank == 0 ? ReduceOp::sum : ReduceOp::max, 1.0};
    try {
      allreduce(*group, Buffer(x), x, reduction, x.shape())->wait(soon());
    } catch (const MismatchError&) {
      ++n_told;
    }
    barrier(*group)->wait(soon());
  });
  REQUIRE(n_told == 2);
}

}  // namespace samestep
