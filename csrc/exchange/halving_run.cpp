#include "exchange/halving_run.h"

#include <array>
#include <utility>

#include "kernels/reduce.h"

namespace samestep {

bool HalvingRun::carries(DType dtype, ReduceOp op) {
  const bool adds = op == ReduceOp::sum || op == ReduceOp::prod || op == ReduceOp::avg || op == ReduceOp::premul;
  if (dtype == DType::float16 || dtype == DType::bfloat16) return !adds;
  return op != ReduceOp::avg || !is_integer(dtype);
}

HalvingRun::HalvingRun(Engine& engine, HalvingPlan plan, const Terms& terms, const std::byte* in, std::byte* out,
                       std::byte* room)
    : plan_(std::move(plan)),
      terms_(terms),
      in_(in),
      out_(out),
      arrivals_(plan_.steps().size()),
      receives_(plan_.steps().size()) {
  for (std::size_t i = 0; i < plan_.steps().size(); ++i) {
    const HalvingStep& step = plan_.steps()[i];
    if (step.use == HalvingStep::Use::result || step.in.empty()) continue;
    const std::size_t nbytes = step.in[0].range.count() * itemsize(terms_.dtype);
    arrivals_[i] = room;
    receives_[i].receive(engine.messenger(), room, nbytes, rank_of(step.in[0].peer), terms_.first_tag, most());
    room += nbytes;
  }
}

bool HalvingRun::advance(Engine& engine, std::size_t limit) {
  Messenger& messenger = engine.messenger();
  while (at_ < plan_.steps().size()) {
    if (!posted_) {
      if (at_ >= limit) return false;
      begin(engine);
    }
    // What is sent may lie where the next results go, or where this step's sums do.
    if (!sends_.test(messenger) || !receives_[at_].test(messenger)) return false;
    if (step().use != HalvingStep::Use::result && !step().in.empty()) add_up();
    ++at_;
    posted_ = false;
  }
  return true;
}

void HalvingRun::begin(Engine& engine) {
  posted_ = true;
  const bool results = step().use == HalvingStep::Use::result;
  const int tag = terms_.first_tag + (results ? 1 : 0);
  const auto nbytes = [&](Range range) { return range.count() * itemsize(terms_.dtype); };
  for (const HalvingStep::Transfer& from : step().in) {
    if (!results) break;
    receives_[at_].receive(engine.messenger(), result(from.range), nbytes(from.range), rank_of(from.peer), tag, most());
  }
  for (const HalvingStep::Transfer& to : step().out) {
    const std::byte* const from = results ? result(to.range) : held(to.range);
    sends_.send(engine.messenger(), from, nbytes(to.range), rank_of(to.peer), tag, most());
    engine.count_message(nbytes(to.range));
  }
}

void HalvingRun::add_up() {
  const Range range = step().in[0].range;
  const kernels::Input mine{held(range)}, theirs{arrivals_[at_]};
  const bool before = step().use == HalvingStep::Use::before;
  const std::array<kernels::Input, 2> inputs = {before ? theirs : mine, before ? mine : theirs};
  const bool divides = terms_.op == ReduceOp::avg && step().finishes;
  const ReduceOp op = terms_.op == ReduceOp::avg && !divides ? ReduceOp::sum : terms_.op;
  void* const out = result(range);
  kernels::reduce_into(terms_.dtype, op, inputs, {&out, 1}, range.count(), terms_.n_ranks);
  has_added_ = true;
}

std::vector<int> HalvingRun::awaited(Engine& engine) {
  std::vector<int> peers;
  if (at_ < plan_.steps().size() && !receives_[at_].test(engine.messenger())) {
    for (const HalvingStep::Transfer& from : step().in) peers.push_back(rank_of(from.peer));
  }
  return peers;
}

void HalvingRun::give_up(Engine& engine) {
  for (Requests& receive : receives_) receive.abandon(engine.messenger());
}

}  // namespace samestep
