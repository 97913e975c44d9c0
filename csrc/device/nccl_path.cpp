#include "device/nccl_path.h"

#include <algorithm>

#include "device/nccl_calls.h"
#include "device/overlap.h"
#include "device/refusal.h"
#include "nccl/nccl_reduction.h"

namespace samestep {

DeviceCommunicator::NcclPath::NcclPath(std::shared_ptr<NcclComm> comm, int rank, int size)
    : comm_(std::move(comm)),
      copies_(std::make_shared<BufferPool>(comm_->options().gpu, comm_->options().device, BufferPool::Kind::of_device)),
      rank_(rank),
      size_(size) {}

bool DeviceCommunicator::NcclPath::has(const CollectiveArgs& args) const {
  // What only moves data can always be made of NCCL's sends and receives.
  return !reduces(args.type) || to_nccl_reduction(args.own().dtype, args.reduction, size_).has_value();
}

NcclLaunch DeviceCommunicator::NcclPath::launch_of(const CollectiveArgs& given, NcclLaunch::Where where) {
  CollectiveArgs args = given;
  NcclLaunch one{.compared = args.signature(), .where = where};
  for (const StreamHandle stream : {args.in.stream, args.out.stream}) {
    if (stream != kNoStream) one.after.push_back(stream);
  }
  if (!overwrites_input(args, rank_)) {
    one.calls = nccl_calls::of(comm_->nccl(), args, rank_, size_);
    return one;
  }
  const std::shared_ptr<std::byte> copy = copies_->take(args.in.nbytes());
  // Kept until the operation has ended: the device reads the copy long after this function has returned.
  one.memory.push_back(copy);
  args.in.data = copy.get();
  one.calls = nccl_calls::of(comm_->nccl(), args, rank_, size_);
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
  NcclLaunch many{.compared = {}, .is_list = true, .where = where};
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
  many.calls = nccl_calls::of_many(comm_->nccl(), args, std::move(buffers), size_);
  WorkPtr work = comm_->launch(std::move(many));
  count(nbytes);
  return work;
}

}  // namespace samestep
