#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <utility>

#include "device_world.h"
#include "nccl/nccl_library.h"
#include "os/dynamic_library.h"

// Of the stand-ins in tests/fakes themselves: what the other tests can only find out because these do as CUDA and NCCL.

using namespace samestep;

namespace {

constexpr int kWell = 0;

/// Functions whose codes the tests compare.
struct Runtime {
  int (*begin_capture)(void*, int);
  int (*end_capture)(void*, void**);
  int (*is_capturing)(void*, int*);
  int (*exchange_mode)(int*);
  int (*destroy_graph)(void*);
  int (*record)(void*, void*);
  int (*query)(void*);
  int (*wait_for)(void*, void*, unsigned);
  int (*synchronize)(void*);
  int (*copy)(void*, const void*, std::size_t, int, void*);
  int (*last_error)();
};

const Runtime& runtime() {
  static const Runtime only = [] {
    const OpenedLibrary library(FAKE_CUDART);
    Runtime found{};
    REQUIRE((library.find("cudaStreamBeginCapture", found.begin_capture) &&
             library.find("cudaStreamEndCapture", found.end_capture) &&
             library.find("cudaStreamIsCapturing", found.is_capturing) &&
             library.find("cudaThreadExchangeStreamCaptureMode", found.exchange_mode) &&
             library.find("cudaGraphDestroy", found.destroy_graph) && library.find("cudaEventRecord", found.record) &&
             library.find("cudaEventQuery", found.query) && library.find("cudaStreamWaitEvent", found.wait_for) &&
             library.find("cudaStreamSynchronize", found.synchronize) && library.find("cudaMemcpyAsync", found.copy) &&
             library.find("cudaGetLastError", found.last_error)));
    return found;
  }();
  return only;
}

class RawEvent {
 public:
  RawEvent() : event_(gpu()->make_event()) {}
  RawEvent(const RawEvent&) = delete;
  RawEvent& operator=(const RawEvent&) = delete;
  ~RawEvent() { gpu()->destroy_event(event_, gpu()->current_device()); }
  void* get() const { return event_; }

 private:
  void* event_;
};

}  // namespace

TEST_CASE("stand-in: a wait for an event is for what the event had recorded by then") {
  const UserStream late, early, waiting;
  const GpuEvent event(gpu(), 0);
  OnGpu x(late, Floats(100, -1.0F)), y(waiting, Floats(100, -1.0F));
  gpu()->synchronize(late.get());
  gpu()->synchronize(waiting.get());
  fake().hold(late.get());
  x.set(Floats(100, 1.0F));
  event.record(late.get());
  event.make_wait(waiting.get());
  event.record(early.get());
  gpu()->synchronize(early.get());
  REQUIRE(event.is_complete());
  gpu()->copy(Buffer(y).data, Buffer(x).data, Buffer(x).nbytes(), waiting.get());
  fake().run_unblocked();  // whatever does not wait for the late stream has run by now
  fake().release(late.get());
  REQUIRE(y.get() == Floats(100, 1.0F));
}

TEST_CASE("stand-in: streams of all devices wait for an event, but only those of its own can record it") {
  constexpr int kInvalidHandle = 400;
  const UserStream here;
  const RawEvent event;
  gpu()->set_device(1);
  {
    const UserStream there;
    CHECK(runtime().record(event.get(), there.get()) == kInvalidHandle);
    CHECK(runtime().last_error() == kInvalidHandle);
    CHECK(runtime().record(event.get(), here.get()) == kWell);
    CHECK(runtime().wait_for(there.get(), event.get(), 0) == kWell);
    gpu()->synchronize(there.get());
    CHECK(runtime().query(event.get()) == kWell);
  }
  gpu()->set_device(0);
}

namespace {

/// Whether a copy that is put into `later` is made only when what is in `earlier` has ended.
bool comes_after(GpuLibrary::Stream later, GpuLibrary::Stream earlier) {
  const GpuEvent copied(gpu(), gpu()->current_device());
  const UserStream own;
  OnGpu x(own, Floats{1.0F}), y(own, Floats{2.0F});
  gpu()->synchronize(own.get());
  fake().hold(earlier);
  gpu()->copy(Buffer(y).data, Buffer(x).data, sizeof(float), later);
  copied.record(later);
  fake().run_unblocked();
  const bool waits = !copied.is_complete();
  fake().release(earlier);
  gpu()->synchronize(later);
  REQUIRE(copied.is_complete());
  return waits;
}

}  // namespace

TEST_CASE("stand-in: the legacy stream and streams made without flags wait for each other, other streams do not") {
  const UserStream blocking, beside;
  const GpuLibrary::Stream legacy = nullptr, separate_stream = gpu()->make_stream();
  CHECK(comes_after(legacy, blocking.get()));
  CHECK(comes_after(blocking.get(), legacy));
  CHECK(!comes_after(beside.get(), blocking.get()));
  CHECK(!comes_after(legacy, separate_stream));
  CHECK(!comes_after(separate_stream, legacy));
  gpu()->set_device(1);
  CHECK(!comes_after(nullptr, blocking.get()));  // the other device's
  gpu()->set_device(0);
  gpu()->destroy_stream(separate_stream, 0);
}

namespace {

constexpr int kGlobal = 0, kThreadLocal = 1, kRelaxed = 2;  // modes of capture
using Codes = std::pair<int, int>;

/// What `act` gives while `stream` is being captured, and what the end of the capture gives then.
Codes while_capturing(const UserStream& stream, const std::function<int()>& act, int mode = kGlobal) {
  REQUIRE(runtime().begin_capture(stream.get(), mode) == kWell);
  const int code = act();
  void* graph = nullptr;
  const int ended = runtime().end_capture(stream.get(), &graph);
  CHECK((graph != nullptr) == (ended == kWell));
  if (graph != nullptr) runtime().destroy_graph(graph);
  runtime().last_error();  // which would be found by the next call that looks
  return {code, ended};
}

/// The code of `act` in another thread.
int in_a_thread(const std::function<int()>& act) {
  int code = -1;
  std::thread([&] { code = act(); }).join();
  return code;
}

}  // namespace

TEST_CASE("stand-in: what a capture allows leaves it alone") {
  const UserStream stream, other;
  const RawEvent inside, joined, beside;
  REQUIRE(runtime().record(beside.get(), other.get()) == kWell);
  CHECK(while_capturing(stream, [&] { return runtime().record(inside.get(), stream.get()); }) == Codes(0, 0));
  CHECK(while_capturing(stream, [&] { return runtime().record(beside.get(), other.get()); }) == Codes(0, 0));
  const auto fork = [&] {
    CHECK(runtime().record(inside.get(), stream.get()) == kWell);
    CHECK(runtime().wait_for(other.get(), inside.get(), 0) == kWell);
    CHECK(runtime().record(joined.get(), other.get()) == kWell);
    return runtime().wait_for(stream.get(), joined.get(), 0);
  };
  CHECK(while_capturing(stream, fork) == Codes(0, 0));
}

TEST_CASE("stand-in: 900 for calls that a capture does not allow, by its mode and the thread") {
  const UserStream stream, other;
  const auto ask_of = [](const UserStream& one) { return runtime().synchronize(one.get()); };
  CHECK(while_capturing(stream, [&] { return ask_of(stream); }) == Codes(900, 901));
  CHECK(while_capturing(stream, [&] { return ask_of(stream); }, kRelaxed) == Codes(900, 901));
  const auto ask_there = [&] { return in_a_thread([&] { return ask_of(other); }); };
  CHECK(while_capturing(stream, [&] { return ask_of(other); }) == Codes(900, 901));
  CHECK(while_capturing(stream, ask_there) == Codes(900, 901));
  CHECK(while_capturing(stream, [&] { return ask_of(other); }, kThreadLocal) == Codes(900, 901));
  CHECK(while_capturing(stream, ask_there, kThreadLocal) == Codes(0, 0));
  CHECK(while_capturing(stream, [&] { return ask_of(other); }, kRelaxed) == Codes(0, 0));
  const auto ask_relaxed = [&] {
    int mode = kRelaxed;
    runtime().exchange_mode(&mode);
    const int code = ask_of(other);
    runtime().exchange_mode(&mode);
    return code;
  };
  CHECK(while_capturing(stream, ask_relaxed) == Codes(0, 0));
}

TEST_CASE("stand-in: 901 for all that comes into a capture after a mistake") {
  const UserStream stream;
  const RawEvent event;
  const auto after_a_mistake = [&](const std::function<int()>& act) {
    return while_capturing(stream, [&] {
      CHECK(runtime().synchronize(stream.get()) == 900);
      return act();
    });
  };
  CHECK(after_a_mistake([&] { return runtime().record(event.get(), stream.get()); }) == Codes(901, 901));
  float from = 1.0F, to = 0.0F;
  const auto copy = [&] { return runtime().copy(&to, &from, sizeof(float), gpu_abi::kCopyEitherWay, stream.get()); };
  CHECK(after_a_mistake(copy) == Codes(901, 901));
  CHECK(to == 0.0F);
  const auto state = [&] {
    int found = 0;
    CHECK(runtime().is_capturing(stream.get(), &found) == kWell);
    return found;
  };
  CHECK(while_capturing(stream, state) == Codes(1, 0));
  CHECK(after_a_mistake(state) == Codes(2, 901));
}

TEST_CASE("stand-in: 902, 903, 904 and 908 for captures that meet, or end elsewhere or unjoined") {
  const UserStream stream, other;
  const RawEvent event;
  const auto merge = [&] {
    int code = 0;
    const auto inner = [&] {
      CHECK(runtime().record(event.get(), stream.get()) == kWell);
      return code = runtime().wait_for(other.get(), event.get(), 0);
    };
    CHECK(while_capturing(other, inner) == Codes(902, 901));
    return code;
  };
  CHECK(while_capturing(stream, merge) == Codes(902, 901));
  void* none = nullptr;
  const auto fork = [&] {
    CHECK(runtime().record(event.get(), stream.get()) == kWell);
    return runtime().wait_for(other.get(), event.get(), 0);
  };
  CHECK(while_capturing(stream, fork) == Codes(0, 904));
  const auto end_fork = [&] {
    fork();
    return runtime().end_capture(other.get(), &none);
  };
  CHECK(while_capturing(stream, end_fork) == Codes(903, 901));
  const auto end_there = [&] { return in_a_thread([&] { return runtime().end_capture(stream.get(), &none); }); };
  CHECK(while_capturing(stream, end_there) == Codes(908, 901));
}

TEST_CASE("stand-in: 905 for a captured stream that waits for an event from outside") {
  const UserStream stream, other;
  const RawEvent event;
  REQUIRE(runtime().record(event.get(), other.get()) == kWell);
  CHECK(while_capturing(stream, [&] { return runtime().wait_for(stream.get(), event.get(), 0); }) == Codes(905, 901));
}

TEST_CASE("stand-in: 906 for the legacy stream while a stream that waits for it is captured") {
  const UserStream stream;
  const RawEvent event;
  int capturing = 0;
  const auto record = [&] { return runtime().record(event.get(), nullptr); };
  CHECK(while_capturing(stream, record) == Codes(906, 901));
  CHECK(while_capturing(stream, record, kRelaxed) == Codes(906, 901));
  CHECK(while_capturing(stream, [&] { return runtime().synchronize(nullptr); }, kRelaxed) == Codes(906, 901));
  CHECK(while_capturing(stream, [&] { return runtime().is_capturing(nullptr, &capturing); }) == Codes(906, 0));
  CHECK(record() == kWell);
}

TEST_CASE("stand-in: 907 for an event of a capture that is asked for, or waited for after the end") {
  const UserStream stream, other;
  const RawEvent event;
  const auto query = [&] {
    CHECK(runtime().record(event.get(), stream.get()) == kWell);
    return runtime().query(event.get());
  };
  CHECK(while_capturing(stream, query, kRelaxed) == Codes(907, 901));
  CHECK(while_capturing(stream, [&] { return runtime().record(event.get(), stream.get()); }) == Codes(0, 0));
  CHECK(runtime().wait_for(other.get(), event.get(), 0) == 907);
  CHECK(runtime().query(event.get()) == 907);
  runtime().last_error();
}

namespace {

/// A communicator that this thread has made.
NcclLibrary::Comm make_comm(const NcclLibrary& nccl, int size, const nccl_abi::UniqueId& id, int rank) {
  NcclLibrary::Comm comm = nullptr;
  nccl.init(comm, size, id, rank);
  until([&] { return nccl.state(comm) == nccl_abi::kSuccess; });
  return comm;
}

}  // namespace

TEST_CASE("stand-in: a communicator of one rank copies in the call, whatever the group") {
  {
    const Variable progress("FAKE_NCCL_IN_PROGRESS", "1000000000");
    const auto nccl = NcclLibrary::open(FAKE_NCCL);
    const NcclLibrary::Comm comm = make_comm(*nccl, 1, nccl->unique_id(), 0);
    const long n_threads = fake_nccl().threads();
    const UserStream stream;
    OnGpu x(stream, Floats{1, 2, 3}), y(stream, Floats(3, -1.0F));
    nccl->group_start();
    nccl->all_reduce(Buffer(x).data, Buffer(y).data, 3, nccl_abi::kFloat32, nccl_abi::kSum, comm, stream.get());
    CHECK(y.get() == Floats{1, 2, 3});
    nccl->group_end();
    CHECK(nccl->state(comm) == nccl_abi::kSuccess);
    CHECK(fake_nccl().threads() == n_threads);
    nccl->abort(comm);
  }
}

TEST_CASE("stand-in: a communicator is destroyed when all ranks destroy theirs, and aborted at once") {
  for (const bool aborts : {false, true}) {
    const auto nccl = NcclLibrary::open(FAKE_NCCL);
    const nccl_abi::UniqueId id = nccl->unique_id();
    const long n_looks = fake_nccl().looks_for_ends();
    std::atomic<bool> returned = false;
    as_ranks(2, [&](int rank) {
      gpu()->set_device(rank);
      const NcclLibrary::Comm comm = make_comm(*nccl, 2, id, rank);
      const auto end = [&] { aborts ? nccl->abort(comm) : nccl->destroy(comm); };
      if (rank == 0) {
        end();
        returned = true;
        return;
      }
      until([&] { return returned || (!aborts && fake_nccl().looks_for_ends() > n_looks); });
      CHECK(returned == aborts);
      end();
    });
    CHECK(returned);
  }
}
