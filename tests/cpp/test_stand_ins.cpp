#include <doctest/doctest.h>

#include "device_world.h"

// Of the stand-ins in tests/fakes themselves: what the other tests can only find out because these do as CUDA and NCCL.

using namespace samestep;

TEST_CASE("stand-in: a wait for an event is for what the event had recorded by then") {
  const UserStream late, early, waiting;
  const GpuEvent event(gpu());
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

namespace {

/// Whether a copy that is put into `later` is made only when what is in `earlier` has ended.
bool comes_after(GpuLibrary::Stream later, GpuLibrary::Stream earlier) {
  const GpuEvent copied(gpu());
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
  gpu()->destroy_stream(separate_stream);
}
