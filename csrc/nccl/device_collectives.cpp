#include <array>

#include "communicator/checks.h"
#include "nccl/device_communicator.h"
#include "nccl/device_detail.h"
#include "nccl/nccl_calls.h"
#include "nccl/nccl_form.h"

namespace samestep {

using namespace device_detail;

Communicator::WorkPtr DeviceCommunicator::all_reduce(ConstBuffer in, Buffer out, const Reduction& reduction,
                                                     const Shape& shape) {
  if (on_host(in) && on_host(out)) return host_->all_reduce(in, out, reduction, shape);
  check_here("allreduce", in);
  check_here("allreduce", out);
  checks::same_dtype("allreduce", in, out);
  checks::has_count("allreduce", "out", out, in.count);
  require_reducible(in.dtype, reduction);
  const auto form = nccl_form(in.dtype, reduction);
  if (channel_ == nullptr || !form) {
    return staged_pieces(in, out, shape,
                         [host = through_host_, reduction](ConstBuffer from, Buffer to, const Shape& s) {
                           return host->all_reduce(from, to, reduction, s);
                         });
  }
  WorkPtr agreement = agreement_->all_reduce(empty(in), nothing(out), reduction, shape);
  return on_device({describe("allreduce", in),
                    {in.stream, out.stream},
                    nccl_calls::all_reduce(channel_->nccl(), *form, reduction, {{in, out}}),
                    std::move(agreement),
                    {}},
                   in.nbytes());
}

Communicator::WorkPtr DeviceCommunicator::reduce(ConstBuffer in, Buffer out, const Reduction& reduction, int root,
                                                 const Shape& shape) {
  if (on_host(in) && on_host(out)) return host_->reduce(in, out, reduction, root, shape);
  checks::root_in_group("reduce", root, size());
  check_here("reduce", in);
  if (rank() == root) {
    check_here("reduce", out);
    checks::same_dtype("reduce", in, out);
    checks::has_count("reduce", "out", out, in.count);
  } else {
    out = {};
  }
  require_reducible(in.dtype, reduction);
  const auto form = nccl_form(in.dtype, reduction);
  if (channel_ == nullptr || !form) {
    return staged_pieces(in, out, shape,
                         [host = through_host_, reduction, root](ConstBuffer from, Buffer to, const Shape& s) {
                           return host->reduce(from, to, reduction, root, s);
                         });
  }
  WorkPtr agreement = agreement_->reduce(empty(in), nothing(in), reduction, root, shape);
  return on_device({describe("reduce", in),
                    {in.stream, out.stream},
                    nccl_calls::reduce(channel_->nccl(), *form, reduction, in, out, root),
                    std::move(agreement),
                    {}},
                   in.nbytes());
}

Communicator::WorkPtr DeviceCommunicator::broadcast(Buffer buffer, int root, const Shape& shape) {
  if (on_host(buffer)) return host_->broadcast(buffer, root, shape);
  checks::root_in_group("bcast", root, size());
  check_here("bcast", buffer);
  if (channel_ == nullptr) {
    const bool at_root = rank() == root;
    const ConstBuffer in =
        at_root ? ConstBuffer(buffer) : ConstBuffer{nullptr, buffer.count, buffer.dtype, buffer.device, buffer.stream};
    const Buffer out = at_root ? Buffer{nullptr, 0, buffer.dtype, buffer.device, buffer.stream} : buffer;
    const auto start = [host = through_host_, root](ConstBuffer from, Buffer, const Shape& s) {
      return host->broadcast({const_cast<void*>(from.data), from.count, from.dtype}, root, s);
    };
    return staged_pieces(in, out, shape, start, /*only_moves=*/true);
  }
  WorkPtr agreement = agreement_->broadcast(nothing(buffer), root, shape);
  return on_device({describe("bcast", buffer),
                    {buffer.stream},
                    nccl_calls::broadcast(channel_->nccl(), std::vector{buffer}, root),
                    std::move(agreement),
                    {}},
                   buffer.nbytes());
}

Communicator::WorkPtr DeviceCommunicator::all_gather(ConstBuffer in, Buffer out, const Shape& shape) {
  if (on_host(in) && on_host(out)) return host_->all_gather(in, out, shape);
  check_here("allgather", in);
  check_here("allgather", out);
  checks::same_dtype("allgather", in, out);
  checks::has_count("allgather", "out", out, in.count * static_cast<std::uint64_t>(size()));
  if (channel_ == nullptr) {
    return moved(
        in, out, std::array<std::uint64_t, 1>{in.count},
        [host = through_host_, shape](ConstBuffer from, Buffer to) { return host->all_gather(from, to, shape); });
  }
  WorkPtr agreement = agreement_->all_gather(empty(in), nothing(out), shape);
  return on_device({describe("allgather", in),
                    {in.stream, out.stream},
                    nccl_calls::all_gather(channel_->nccl(), in, out),
                    std::move(agreement),
                    {}},
                   out.nbytes());
}

Communicator::WorkPtr DeviceCommunicator::reduce_scatter(ConstBuffer in, Buffer out, const Reduction& reduction,
                                                         const Shape& shape) {
  if (on_host(in) && on_host(out)) return host_->reduce_scatter(in, out, reduction, shape);
  check_here("reduce_scatter", in);
  check_here("reduce_scatter", out);
  checks::same_dtype("reduce_scatter", in, out);
  checks::has_count("reduce_scatter", "the input", in, out.count * static_cast<std::uint64_t>(size()));
  require_reducible(in.dtype, reduction);
  const auto form = nccl_form(in.dtype, reduction);
  if (channel_ == nullptr || !form) {
    return staged_whole(in, out, [host = through_host_, reduction, shape](ConstBuffer from, Buffer to) {
      return host->reduce_scatter(from, to, reduction, shape);
    });
  }
  WorkPtr agreement = agreement_->reduce_scatter(empty(in), nothing(out), reduction, shape);
  return on_device({describe("reduce_scatter", in),
                    {in.stream, out.stream},
                    nccl_calls::reduce_scatter(channel_->nccl(), *form, reduction, in, out),
                    std::move(agreement),
                    {}},
                   in.nbytes());
}

Communicator::WorkPtr DeviceCommunicator::now(const Call& call) {
  if (on_host(call.in) && on_host(call.out)) return host_->now(call);
  return begin(call);
}

}  // namespace samestep
