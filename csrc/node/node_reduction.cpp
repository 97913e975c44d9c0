#include "node/node_reduction.h"

#include <algorithm>
#include <array>
#include <span>

#include "kernels/stream.h"

namespace samestep {

NodeReduction::NodeReduction(std::shared_ptr<Engine> shared_engine, const Signature& signature,
                             std::shared_ptr<NodeGroup> group, ConstBuffer in, Buffer out, const Reduction& reduction)
    : Collective(std::move(shared_engine), signature),
      group_(std::move(group)),
      task_{&engine(), group_.get(), 0, signature.verb, signature.root, in, out, reduction, {}} {}

void NodeReduction::announce(std::uint64_t digest) {
  const Buffer* const out = task_.wanted_by(task_.rank()) ? &task_.out : nullptr;
  const Moment begun = Moment::now();
  const bool ahead = stages_ahead();
  if (ahead) staged_.emplace(task_).copy_in(0);
  PostedBuffers::announce(engine(), *group_, sequence_, digest, task_.verb, task_.in, out, task_.reduction.factor,
                          begun, ahead);
}

/// Is it worth copying before the ranks meet? They then need not wait for each other once more.
bool NodeReduction::stages_ahead() {
  const std::size_t nbytes = task_.in.nbytes();
  return nbytes > Crossings::together_to(task_.size()) && nbytes <= Arena::kStageBytes &&
         group_->ways[task_.verb].last(nbytes) == Way::staged && group_->meeting->is_next(sequence_) &&
         (group_->host->place_of(task_.in.data, nbytes) & Host::kShared) == 0;
}

bool NodeReduction::reduce_announced(Engine& engine, std::uint64_t sequence, ConstBuffer in, Buffer out, ReduceOp op) {
  constexpr std::size_t kMost = 16;
  std::array<kernels::Input, kMost> inputs;
  const auto size = static_cast<std::size_t>(engine.size());
  if (size > kMost) return false;
  for (std::size_t peer = 0; peer < size; ++peer) {
    const Meeting::Bytes data = engine.meeting().data(sequence, static_cast<int>(peer));
    const PostedBuffers posted = PostedBuffers::in_front_of(data);
    if (!posted.with_elements) return false;
    inputs[peer] = {static_cast<int>(peer) == engine.rank() ? in.data : data.data() + sizeof posted, posted.factor};
  }
  kernels::reduce(in.dtype, op, std::span(inputs).first(size), out.data, in.count);
  return true;
}

void NodeReduction::gather() {
  for (int peer = 0; peer < task_.size(); ++peer) {
    const Meeting::Bytes data = engine().meeting().data(sequence_, peer);
    task_.posted.push_back(PostedBuffers::in_front_of(data));
    elements_.push_back(data.subspan(sizeof(PostedBuffers)));
  }
}

void NodeReduction::start_work() {
  task_.sequence = sequence_;
  gather();
  const bool any_sent =
      std::any_of(task_.posted.begin(), task_.posted.end(), [](const PostedBuffers& p) { return p.with_elements; });
  const bool shared = !any_sent && task_.all_shared();
  way_ = group_->host->reaches_memory() ? task_.posted[0].way : Way::staged;
  if (!shared && task_.in.nbytes() <= Crossings::together_to(task_.size())) {
    reduce_together();
    task_.set_step(1);
  } else if (shared || way_ == Way::direct) {
    staged_.reset();
    direct_.emplace(task_);
  } else {
    if (!staged_) staged_.emplace(task_);
    staged_->begin();
  }
  if (shared || !(direct_ || staged_)) return;
  group_->ways[task_.verb].goes(task_.in.nbytes(), way_);
  timed_ = task_.rank() == 0;
}

bool NodeReduction::work() {
  // Buffers of a rank that has given up must not be touched; its farewell ends this operation soon.
  if (!group_->meeting->all_here(sequence_)) return false;
  if (!direct_ && !staged_) return finish_together();
  const bool finished = direct_ ? direct_->work() : staged_->work();
  if (finished && timed_) {
    Moment all_begun = task_.posted[0].begun;
    for (const PostedBuffers& posted : task_.posted) all_begun = all_begun.later(posted.begun);
    group_->ways[task_.verb].took(task_.in.nbytes(), way_, Moment::now().since(all_begun));
  }
  return finished;
}

void NodeReduction::reduce_together() {
  const int me = task_.rank();
  if (!task_.wanted_by(me)) return;
  std::vector<kernels::Input> inputs(static_cast<std::size_t>(task_.size()));
  std::size_t skip = 0, count = task_.in.count;
  if (task_.verb == Verb::reduce_scatter) {
    count = task_.out.count;
    skip = static_cast<std::size_t>(me) * task_.out.nbytes();
  }
  bool copies_back = false;
  for (int rank = 0; rank < task_.size(); ++rank) {
    const auto i = static_cast<std::size_t>(rank);
    const PostedBuffers& posted = task_.posted[i];
    const std::byte* data = elements_[i].data();
    if (rank == me) {
      data = static_cast<const std::byte*>(task_.in.data);
      // Others read this rank's buffer where it lies: it must not change before they have.
      copies_back = !posted.with_elements;
    } else if (!posted.with_elements) {
      data = group_->host->at(group_->member(rank), posted.in, task_.in.nbytes());
    }
    inputs[i] = {data + skip, posted.factor};
  }
  void* into = task_.out.data;
  if (copies_back) {
    result_.resize(count * task_.itemsize());
    into = result_.data();
  }
  kernels::reduce(task_.in.dtype, task_.reduction.op, inputs, into, count);
}

bool NodeReduction::finish_together() {
  const bool any_in_place =
      std::any_of(task_.posted.begin(), task_.posted.end(), [](const PostedBuffers& p) { return !p.with_elements; });
  if (any_in_place && !task_.all_at(1)) return false;
  kernels::copy(task_.out.data, result_.data(), result_.size());
  return true;
}

std::vector<int> NodeReduction::awaited() {
  std::vector<int> late;
  for (int rank = 0; rank < task_.size(); ++rank) {
    if (rank != task_.rank() && group_->arena->released(rank).load(std::memory_order_acquire) <= sequence_)
      late.push_back(rank);
  }
  return late;
}

}  // namespace samestep
