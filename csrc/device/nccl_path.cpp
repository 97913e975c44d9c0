#include "device/nccl_path.h"

#include <algorithm>
#include <optional>

#include "collectives/peer_transfer.h"
#include "core/format.h"
#include "device/overlap.h"
#include "nccl/nccl_reduction.h"

namespace samestep {

/// Of a list of buffers, for ranks to compare: how many, and a digest of their lengths.
struct DeviceCommunicator::NcclPath::ManyBuffers {
  std::size_t n = 0, nbytes = 0;
  std::uint64_t lengths = 0;
  std::vector<StreamHandle> streams;

  void add(const ConstBuffer& buffer) {
    ++n;
    nbytes += buffer.nbytes();
    // The 1 lets empty buffers count, too.
    lengths = lengths * 31 + buffer.count + 1;
    streams.push_back(buffer.stream);
  }
  Shape shape() const {
    Shape shape = Shape::flat(n);
    shape.n_dims = 2;
    shape.extents[1] = lengths;
    return shape;
  }
};

DeviceCommunicator::NcclPath::NcclPath(std::shared_ptr<NcclComm> comm, int rank, int size)
    : comm_(std::move(comm)),
      copies_(std::make_shared<BufferPool>(comm_->options().gpu, comm_->options().device, BufferPool::Kind::of_device)),
      rank_(rank),
      size_(static_cast<std::size_t>(size)) {}

bool DeviceCommunicator::NcclPath::has(const CollectiveArgs& args) const {
  // What only moves data can always be made of NCCL's sends and receives.
  return !reduces(args.type) || has_nccl_reduction(args.own().dtype, args.reduction);
}

NcclReduction DeviceCommunicator::NcclPath::form_of(DType dtype, const Reduction& reduction) const {
  return to_nccl_reduction(dtype, reduction, static_cast<int>(size_)).value();
}

nccl_calls::Calls DeviceCommunicator::NcclPath::messages_of(const CollectiveArgs& args) const {
  std::vector<PeerTransfer> transfers(size_);
  plan_transfers(args, rank_, transfers);
  std::vector<std::uint64_t> sent, received;
  const std::size_t item = itemsize(args.own().dtype);
  for (const PeerTransfer& transfer : transfers) {
    sent.push_back(transfer.out_nbytes / item);
    received.push_back(transfer.in_nbytes / item);
  }
  return nccl_calls::messages(comm_->nccl(), rank_, args.in, std::move(sent), args.out, std::move(received));
}

nccl_calls::Calls DeviceCommunicator::NcclPath::calls_of(const CollectiveArgs& args) const {
  const NcclLibrary& nccl = comm_->nccl();
  const auto form = [&args, this] { return form_of(args.own().dtype, args.reduction); };
  switch (args.type) {
    case CollectiveType::allreduce:
      return nccl_calls::all_reduce(nccl, form(), args.reduction, {{args.in, args.out}});
    case CollectiveType::reduce:
      return nccl_calls::reduce(nccl, form(), args.reduction, args.in, args.out, args.root);
    case CollectiveType::reduce_scatter:
      return nccl_calls::reduce_scatter(nccl, form(), args.reduction, args.in, args.out);
    case CollectiveType::bcast:
      return nccl_calls::broadcast(nccl, {args.out}, args.root);
    case CollectiveType::allgather:
      return nccl_calls::all_gather(nccl, args.in, args.out);
    case CollectiveType::allgatherv:
      return nccl_calls::all_gather_v(nccl, rank_, args.in, args.out, {args.counts.begin(), args.counts.end()});
    default:
      return messages_of(args);
  }
}

NcclLaunch DeviceCommunicator::NcclPath::launch_of(const CollectiveArgs& given, NcclLaunch::Where where) {
  CollectiveArgs args = given;
  const ConstBuffer own = args.own();
  NcclLaunch one{.type = args.type, .dtype = own.dtype, .count = own.count, .where = where};
  for (const StreamHandle stream : {args.in.stream, args.out.stream}) {
    if (stream != kNoStream) one.after.push_back(stream);
  }
  if (compares(args)) one.compared = args.signature();
  count(std::max(args.in.nbytes(), args.out.nbytes()));
  if (!overwrites_input(args, rank_)) {
    one.calls = calls_of(args);
    return one;
  }
  const std::shared_ptr<std::byte> copy = copies_->take(args.in.nbytes());
  // Kept until the operation has ended: the device reads the copy long after this function has returned.
  one.memory.push_back(copy);
  args.in.data = copy.get();
  one.calls = calls_of(args);
  one.calls.enqueue = [gpu = comm_->options().gpu, to = copy.get(), in = given.in, enqueue = one.calls.enqueue](
                          NcclLibrary::Comm comm, NcclLibrary::Stream stream) {
    gpu->copy(to, in.data, in.nbytes(), stream);
    enqueue(comm, stream);
  };
  return one;
}

void DeviceCommunicator::NcclPath::count(std::size_t nbytes) {
  ++n_launched_;
  if (size_ > 1) n_launched_bytes_ += nbytes;
}

Communicator::WorkPtr DeviceCommunicator::NcclPath::start(const CollectiveArgs& args, NcclLaunch::Where where) {
  return comm_->launch(launch_of(args, where));
}

Communicator::WorkPtr DeviceCommunicator::NcclPath::run(const CollectiveArgs& args, NcclLaunch::Where where) {
  return comm_->run(launch_of(args, where));
}

Communicator::WorkPtr DeviceCommunicator::NcclPath::launch_many(const CollectiveArgs& args, const ManyBuffers& many,
                                                                nccl_calls::Calls calls, NcclLaunch::Where where) {
  count(many.nbytes);
  return comm_->launch({.type = args.type,
                        .dtype = args.own().dtype,
                        .count = many.n,
                        .is_list = true,
                        .after = many.streams,
                        .where = where,
                        .calls = std::move(calls),
                        .compared = args.signature()});
}

Communicator::WorkPtr DeviceCommunicator::NcclPath::allreduce_many(std::vector<InOut> buffers,
                                                                   const Reduction& reduction,
                                                                   NcclLaunch::Where where) {
  ManyBuffers many;
  for (const auto& [in, out] : buffers) {
    many.add(out);
    many.streams.push_back(in.stream);
  }
  const CollectiveArgs args{.type = CollectiveType::allreduce,
                            .in = buffers[0].in,
                            .out = buffers[0].out,
                            .reduction = reduction,
                            .shape = many.shape()};
  const NcclReduction form = form_of(args.out.dtype, reduction);
  return launch_many(args, many, nccl_calls::all_reduce(comm_->nccl(), form, reduction, std::move(buffers)), where);
}

Communicator::WorkPtr DeviceCommunicator::NcclPath::bcast_many(std::vector<Buffer> buffers, int root,
                                                               NcclLaunch::Where where) {
  ManyBuffers many;
  for (const Buffer& buffer : buffers) many.add(buffer);
  const CollectiveArgs args{.type = CollectiveType::bcast, .out = buffers[0], .root = root, .shape = many.shape()};
  return launch_many(args, many, nccl_calls::broadcast(comm_->nccl(), std::move(buffers), root), where);
}

}  // namespace samestep
