#include "device/nccl_path.h"

#include <algorithm>
#include <optional>

#include "collectives/peer_transfer.h"
#include "core/format.h"
#include "device/overlap.h"
#include "device/refusal.h"
#include "nccl/nccl_reduction.h"

namespace samestep {

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
      return nccl_calls::broadcast(nccl, {{args.out, args.out}}, args.root);
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
  one.compared = args.signature();
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
  WorkPtr work = comm_->launch(launch_of(args, where));
  count(std::max(args.in.nbytes(), args.out.nbytes()));
  return work;
}

Communicator::WorkPtr DeviceCommunicator::NcclPath::run(const CollectiveArgs& args, NcclLaunch::Where where) {
  WorkPtr work = comm_->run(launch_of(args, where));
  count(std::max(args.in.nbytes(), args.out.nbytes()));
  return work;
}

void DeviceCommunicator::NcclPath::refuse() {
  comm_->compare(refusal::args().signature());
  count(0);
}

Communicator::WorkPtr DeviceCommunicator::NcclPath::start_many(CollectiveArgs args, std::vector<InOut> buffers,
                                                               NcclLaunch::Where where) {
  NcclLaunch many{
      .type = args.type, .dtype = args.own().dtype, .count = buffers.size(), .is_list = true, .where = where};
  std::size_t nbytes = 0;
  std::uint64_t lengths = 0;
  for (const auto& [in, out] : buffers) {
    nbytes += out.nbytes();
    lengths = lengths * 31 + out.count + 1;  // the 1 lets empty buffers count, too
    many.after.insert(many.after.end(), {out.stream, in.stream});
  }
  // Ranks compare how many there are, and a digest of their lengths.
  args.shape = Shape::flat(buffers.size());
  args.shape.extents[args.shape.n_dims++] = lengths;
  many.compared = args.signature();
  const NcclLibrary& nccl = comm_->nccl();
  many.calls =
      args.type == CollectiveType::bcast
          ? nccl_calls::broadcast(nccl, std::move(buffers), args.root)
          : nccl_calls::all_reduce(nccl, form_of(args.out.dtype, args.reduction), args.reduction, std::move(buffers));
  WorkPtr work = comm_->launch(std::move(many));
  count(nbytes);
  return work;
}

}  // namespace samestep
