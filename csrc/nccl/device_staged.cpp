#include <algorithm>
#include <cstring>

#include "exchange/exchange_communicator.h"
#include "nccl/device_communicator.h"

namespace samestep {

Communicator::WorkPtr DeviceCommunicator::staged_pieces(ConstBuffer in, Buffer out, const Shape& shape,
                                                        std::function<WorkPtr(ConstBuffer, Buffer, const Shape&)> start,
                                                        bool only_moves) {
  const std::size_t item = itemsize(in.dtype), count = std::max(in.count, out.count);
  const std::size_t longest = std::max(options_.piece / item, std::size_t{1});
  StagedCall call;
  call.after = {in.stream, out.stream};
  for (std::size_t at = 0; at < count || at == 0; at += longest) {
    const std::size_t n = std::min(longest, count - at);
    StagedPart part;
    if (in.data != nullptr) part.in = static_cast<const std::byte*>(in.data) + at * item;
    if (out.data != nullptr) part.out = static_cast<std::byte*>(out.data) + at * item;
    part.by_address = only_moves && run_by_address(n * item);
    if (!part.by_address) part.in_nbytes = part.out_nbytes = n * item;
    part.in_place = true;
    const Shape described = at == 0 ? shape : Shape::flat(n);  // ranks are compared at the first piece
    const bool writes = out.data != nullptr;
    auto* const lies = part.by_address ? const_cast<std::byte*>(part.in != nullptr ? part.in : part.out) : nullptr;
    part.start = [start, described, n, dtype = in.dtype, writes, lies](std::byte* memory, std::byte*) {
      if (lies != nullptr) memory = lies;
      return start({memory, n, dtype}, writes ? Buffer{memory, n, dtype} : Buffer{}, described);
    };
    call.parts.push_back(std::move(part));
  }
  return stager_->start(std::move(call));
}

Communicator::WorkPtr DeviceCommunicator::staged_whole(ConstBuffer in, Buffer out,
                                                       std::function<WorkPtr(ConstBuffer, Buffer)> start,
                                                       bool message) {
  StagedPart part;
  part.in = static_cast<const std::byte*>(in.data);
  part.in_nbytes = in.nbytes();
  part.out = static_cast<std::byte*>(out.data);
  part.out_nbytes = out.nbytes();
  part.start = [start = std::move(start), in, out](std::byte* from, std::byte* to) {
    return start({in.count != 0 ? from : nullptr, in.count, in.dtype},
                 {out.count != 0 ? to : nullptr, out.count, out.dtype});
  };
  StagedCall call;
  call.after = {in.stream, out.stream};
  call.message = message;
  call.parts.push_back(std::move(part));
  return stager_->start(std::move(call));
}

// ---- by address: MPI gets device memory as it lies

bool DeviceCommunicator::by_address(std::size_t nbytes) const {
  // Shorter ones travel with their header, which the host writes and reads.
  constexpr std::size_t kShortest = 4 << 10;
  return options_.gpu_aware && host_->engine() == "mpi" && nbytes >= kShortest;
}

bool DeviceCommunicator::run_by_address(std::size_t nbytes) const {
  if (!by_address(nbytes)) return false;
  const auto* const exchange = dynamic_cast<const ExchangeCommunicator*>(through_host_.get());
  return exchange != nullptr && nbytes > exchange->most_with_header();
}

void DeviceCommunicator::reach_memory_by_address() {
  const auto* const exchange = dynamic_cast<const ExchangeCommunicator*>(through_host_.get());
  if (exchange == nullptr || host_->engine() != "mpi") return;
  exchange->engine_of_group()->copy_own_by(
      [stager = std::weak_ptr(stager_), gpu = options_.gpu](std::byte* to, const std::byte* from, std::size_t nbytes) {
        if (gpu->device_of(from) < 0) {
          std::memmove(to, from, nbytes);  // staged
        } else if (const auto copier = stager.lock()) {
          copier->copy_own(to, from, nbytes);
        }
      });
}

Communicator::WorkPtr DeviceCommunicator::started_by_address(std::vector<StreamHandle> after,
                                                             std::function<WorkPtr()> start) {
  StagedPart part;
  part.by_address = true;
  part.start = [start = std::move(start)](std::byte*, std::byte*) { return start(); };
  StagedCall call;
  call.after = std::move(after);
  call.parts.push_back(std::move(part));
  return stager_->start(std::move(call));
}

Communicator::WorkPtr DeviceCommunicator::moved(ConstBuffer in, Buffer out, std::span<const std::uint64_t> runs,
                                                std::function<WorkPtr(ConstBuffer, Buffer)> start) {
  const std::size_t item = itemsize(in.dtype);
  const bool any = std::any_of(runs.begin(), runs.end(), [](std::uint64_t count) { return count != 0; });
  const bool all_long = std::all_of(runs.begin(), runs.end(),
                                    [&](std::uint64_t count) { return count == 0 || run_by_address(count * item); });
  if (!any || !all_long) return staged_whole(in, out, std::move(start));
  const ConstBuffer from{in.data, in.count, in.dtype};
  const Buffer to{out.data, out.count, out.dtype};
  return started_by_address({in.stream, out.stream}, [start = std::move(start), from, to] { return start(from, to); });
}

}  // namespace samestep
