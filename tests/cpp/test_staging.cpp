#include <doctest/doctest.h>

#include <atomic>

#include "device_world.h"
#include "gpu/staging.h"

// Operations on device memory that go through the host, with an operation on the host that tests end as they like.

namespace samestep {
namespace {

class HostWork final : public Work {
 public:
  explicit HostWork(const std::atomic<bool>& ended) : ended_(ended) {}
  bool done() override { return ended_; }
  void wait(const Deadline& /*deadline*/) override {}
  std::exception_ptr error() const override { return nullptr; }
  bool device_has_ended() const override { return true; }

 private:
  const std::atomic<bool>& ended_;
};

}  // namespace

TEST_CASE("staging: a segment whose operation ends last is copied back, however many have been copied before") {
  constexpr std::size_t kSegments = 100, kLast = 1;
  gpu()->set_device(0);
  const std::shared_ptr<Communicator> group = make_self_communicator("world");
  const auto staging = std::make_shared<HostStaging>(gpu(), 0, group, group);
  const UserStream stream;
  OnGpu x(stream, Floats(kSegments, 3.0F));
  auto* const elements = static_cast<std::byte*>(Buffer(x).data);
  std::atomic<bool> at_once = true, late = false;
  StagedOperation call;
  call.after = {Buffer(x).stream};
  call.copies_in_first = true;
  std::atomic<std::size_t> n_started = 0;
  for (std::size_t i = 0; i < kSegments; ++i) {
    StagedSegment part;
    part.in = part.out = elements;
    part.in_runs = part.out_runs = {{i * sizeof(float), sizeof(float)}};
    part.in_place = true;
    part.start = [&, i](std::byte* memory, std::byte*) -> Communicator::WorkPtr {
      *reinterpret_cast<float*>(memory) += static_cast<float>(i);
      ++n_started;
      return std::make_shared<HostWork>(i == kLast ? late : at_once);
    };
    call.parts.push_back(std::move(part));
  }
  const auto work = staging->start(std::move(call));
  until([&] { return !work->done() && n_started == kSegments; });
  for (int i = 0; i < 1000; ++i) REQUIRE(!work->done());  // as many are copied back as may be
  late = true;
  work->wait(soon());
  Floats expected(kSegments);
  for (std::size_t i = 0; i < kSegments; ++i) expected[i] = 3.0F + static_cast<float>(i);
  REQUIRE(x.get() == expected);
}

}  // namespace samestep
