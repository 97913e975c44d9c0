#include "node/node_reduction.h"

#include <algorithm>

#include "kernels/stream.h"

namespace samestep {

NodeReduction::NodeReduction(std::shared_ptr<ProgressEngine> shared_engine, const CollectiveArgs& args,
                             std::shared_ptr<NodeGroup> group)
    : Collective(std::move(shared_engine), args.signature()),
      group_(std::move(group)),
      context_{&engine(), group_.get(), 0, args.type, args.root, args.in, args.out, args.reduction, {}} {}

void NodeReduction::post(std::uint64_t digest) {
  const Buffer* const out = context_.wanted_by(context_.rank()) ? &context_.out : nullptr;
  // Before the copy, which is a part of the operation's time.
  const WrappingTimestamp start_time = WrappingTimestamp::now();
  const bool ahead = prestages();
  if (ahead) staged_.emplace(context_).copy_in(0);
  ReductionDescriptor::post(engine(), *group_, sequence_, digest, context_.type, context_.in, out,
                            context_.reduction.factor, start_time, ahead);
}

/// Whether to copy into the stage before posting. It saves one round of waiting.
bool NodeReduction::prestages() {
  // A guess: rank 0 chooses the path later, and if it chooses another one the copy was in vain. So only where the last
  // operation of this size was staged. The stage is free if this rank has released all operations before.
  const std::size_t nbytes = context_.in.nbytes();
  return nbytes > Thresholds::one_shot_max(context_.size()) && nbytes <= ShmRegion::kStageBytes &&
         group_->path_tuners[context_.type].expects_stages(nbytes) && group_->header_exchange->is_next(sequence_) &&
         (group_->peers->to_remote_address(context_.in.data, nbytes) & LocalPeers::kSharedAddressBit) == 0;
}

void NodeReduction::gather() {
  for (int peer = 0; peer < context_.size(); ++peer) {
    const HeaderExchange::Bytes data = headers().data(sequence_, peer);
    context_.descriptors.push_back(ReductionDescriptor::parse(data));
    elements_.push_back(data.subspan(sizeof(ReductionDescriptor)));
  }
}

void NodeReduction::start_work() {
  context_.sequence = sequence_;
  gather();
  const bool any_sent = std::any_of(context_.descriptors.begin(), context_.descriptors.end(),
                                    [](const ReductionDescriptor& p) { return p.has_inline_elements; });
  const bool shared = !any_sent && context_.all_shared();
  const bool any_hidden = std::any_of(context_.descriptors.begin(), context_.descriptors.end(),
                                      [](const ReductionDescriptor& p) { return p.hidden; });
  // All inputs of this choice were posted by all ranks, so that all make the same one.
  const Path chosen = group_->peers->has_cma() ? context_.descriptors[0].path : Path::copy_in_copy_out;
  path_ = any_hidden ? Path::copy_in_copy_out : chosen;
  if (!shared && context_.in.nbytes() <= Thresholds::one_shot_max(context_.size())) {
    reduce_one_shot();
    context_.set_step(1);
  } else if (shared || path_ == Path::single_copy) {
    // Rank 0 has chosen another path than was guessed: the segment that was prestaged is not used.
    staged_.reset();
    single_copy_.emplace(context_);
  } else {
    if (!staged_) staged_.emplace(context_);
    staged_->begin();
  }
  if (shared || !(single_copy_ || staged_)) return;
  group_->path_tuners[context_.type].record_choice(context_.in.nbytes(), chosen, path_);
  // Rank 0 alone chooses paths, so it alone needs times.
  timed_ = context_.rank() == 0;
}

bool NodeReduction::work() {
  // The buffers of a rank that has left must not be accessed. The engine soon fails this operation.
  if (!group_->header_exchange->all_present(sequence_)) return false;
  if (!single_copy_ && !staged_) return finish_one_shot();
  const bool finished = single_copy_ ? single_copy_->work() : staged_->work();
  if (finished && timed_) {
    WrappingTimestamp last_start = context_.descriptors[0].start_time;
    for (const ReductionDescriptor& posted : context_.descriptors) {
      last_start = last_start.later(posted.start_time);
    }
    group_->path_tuners[context_.type].record_time(context_.in.nbytes(), path_,
                                                   WrappingTimestamp::now().since(last_start));
  }
  return finished;
}

void NodeReduction::reduce_one_shot() {
  const int me = context_.rank();
  if (!context_.wanted_by(me)) return;
  std::vector<kernels::Input> inputs(static_cast<std::size_t>(context_.size()));
  std::size_t skip = 0, count = context_.in.count;
  if (context_.type == CollectiveType::reduce_scatter) {
    count = context_.out.count;
    skip = static_cast<std::size_t>(me) * context_.out.nbytes();
  }
  bool copies_back = false;
  for (int rank = 0; rank < context_.size(); ++rank) {
    const auto i = static_cast<std::size_t>(rank);
    const ReductionDescriptor& posted = context_.descriptors[i];
    const std::byte* data = elements_[i].data();
    // Elements are reduced from where they are: behind the header, or in shared memory.
    if (rank == me) {
      data = static_cast<const std::byte*>(context_.in.data);
      // Others read this rank's buffer in place: it must not change before they have.
      copies_back = !posted.has_inline_elements;
    } else if (!posted.has_inline_elements) {
      data = group_->peers->map_peer_memory(group_->member(rank), posted.in, context_.in.nbytes());
    }
    inputs[i] = {data + skip, posted.factor};
  }
  void* into = context_.out.data;
  if (copies_back) {
    result_.resize(count * context_.itemsize());
    into = result_.data();
  }
  context_.reduce(inputs, {&into, 1}, count);
}

bool NodeReduction::finish_one_shot() {
  const bool any_in_place = std::any_of(context_.descriptors.begin(), context_.descriptors.end(),
                                        [](const ReductionDescriptor& p) { return !p.has_inline_elements; });
  // A rank that has reached step 1 has read all buffers, this rank's among them.
  if (any_in_place && !context_.all_at(1)) return false;
  kernels::copy(context_.out.data, result_.data(), result_.size());
  return true;
}

std::vector<int> NodeReduction::pending_peers() {
  std::vector<int> late;
  for (int rank = 0; rank < context_.size(); ++rank) {
    // pairs with ShmHeaderExchange::release
    if (rank != context_.rank() && group_->region->released(rank).load(std::memory_order_acquire) <= sequence_)
      late.push_back(rank);
  }
  return late;
}

void NodeReduction::abort() {
  Collective::abort();
  // Peers may store the result into it until they notice.
  if (!is_mismatched() && context_.wanted_by(context_.rank())) {
    group_->fence->withdraw(context_.out.data, context_.out.nbytes());
  }
}

}  // namespace samestep
