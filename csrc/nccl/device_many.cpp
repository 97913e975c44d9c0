#include "communicator/checks.h"
#include "core/error.h"
#include "core/format.h"
#include "nccl/device_communicator.h"
#include "nccl/device_detail.h"
#include "nccl/nccl_calls.h"
#include "nccl/nccl_form.h"

namespace samestep {

using namespace device_detail;

namespace {

std::size_t nbytes_of(std::span<const Buffer> buffers) {
  std::size_t nbytes = 0;
  for (const Buffer& buffer : buffers) nbytes += buffer.nbytes();
  return nbytes;
}

/// For ranks to compare: how many buffers, and a digest of their lengths.
Shape shape_of_all(std::span<const Buffer> buffers) {
  Shape shape = Shape::flat(buffers.size());
  shape.n_dims = 2;
  for (const Buffer& buffer : buffers) shape.extents[1] = shape.extents[1] * 31 + buffer.count + 1;
  return shape;
}

std::vector<std::size_t> sizes_of(std::span<const Buffer> buffers) {
  std::vector<std::size_t> sizes;
  for (const Buffer& buffer : buffers) sizes.push_back(buffer.nbytes());
  return sizes;
}

}  // namespace

NcclLaunch DeviceCommunicator::packed_or_apart(
    std::span<const std::size_t> nbytes,
    const std::function<std::vector<nccl_calls::Calls>(nccl_calls::Packing)>& packed,
    const std::function<nccl_calls::Calls()>& apart) {
  NcclLaunch launch;
  std::optional<nccl_calls::Packing> packing;
  try {
    packing = packing_->plan(nbytes, *agreement_, Deadline::after(options_.timeout));
  } catch (const Error&) {  // peers go on to another operation, or have gone
    if (!options_.compare_first) channel_->abandon(std::current_exception());
    throw;
  }
  if (!packing) {
    launch.calls = apart();
    return launch;
  }
  launch.memory.push_back(packing->bucket);
  launch.then = packed(std::move(*packing));
  launch.calls = std::move(launch.then.front());
  launch.then.erase(launch.then.begin());
  return launch;
}

Communicator::WorkPtr DeviceCommunicator::all_reduce_many(std::span<const InOut> given, const Reduction& reduction) {
  std::vector<InOut> buffers(given.begin(), given.end());
  std::vector<Buffer> outs;
  std::vector<StreamHandle> after;
  const auto form = given.empty() ? std::nullopt : nccl_form(given[0].in.dtype, reduction);
  if (channel_ == nullptr || !form) throw InvalidArgumentError("all_reduce_many: not for NCCL");
  const ConstBuffer first = given[0].in;
  for (auto& [in, out] : buffers) {
    check_here("allreduce", in);
    check_here("allreduce", out);
    checks::same_dtype("allreduce", in, out);
    checks::same_dtype("allreduce", first, out);
    checks::has_count("allreduce", "out", out, in.count);
    outs.push_back(out);
    after.insert(after.end(), {in.stream, out.stream});
  }
  NcclLaunch launch = packed_or_apart(
      sizes_of(outs),
      [&](nccl_calls::Packing packing) {
        return nccl_calls::packed_all_reduce(channel_->nccl(), *form, reduction, buffers, std::move(packing));
      },
      [&] { return nccl_calls::all_reduce(channel_->nccl(), *form, reduction, buffers); });
  launch.what = str("allreduce of ", given.size(), " arrays of ", samestep::name(first.dtype), " on the device");
  launch.after = std::move(after);
  launch.agreement = agreement_->all_reduce(empty(first), nothing(first), reduction, shape_of_all(outs));
  return on_device(std::move(launch), nbytes_of(outs));
}

Communicator::WorkPtr DeviceCommunicator::broadcast_many(std::span<const Buffer> given, int root) {
  checks::root_in_group("bcast", root, size());
  if (channel_ == nullptr || given.empty()) throw InvalidArgumentError("broadcast_many: not for NCCL");
  std::vector<Buffer> buffers(given.begin(), given.end());
  std::vector<StreamHandle> after;
  for (Buffer& buffer : buffers) {
    check_here("bcast", buffer);
    after.push_back(buffer.stream);
  }
  NcclLaunch launch = packed_or_apart(
      sizes_of(given),
      [&](nccl_calls::Packing packing) {
        return nccl_calls::packed_broadcast(channel_->nccl(), buffers, root, rank() == root, std::move(packing));
      },
      [&] { return nccl_calls::broadcast(channel_->nccl(), buffers, root); });
  launch.what = str("bcast of ", given.size(), " arrays on the device");
  launch.after = std::move(after);
  launch.agreement = agreement_->broadcast(nothing(given[0]), root, shape_of_all(given));
  return on_device(std::move(launch), nbytes_of(given));
}

}  // namespace samestep
