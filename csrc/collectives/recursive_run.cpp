#include "collectives/recursive_run.h"

#include <array>
#include <utility>

#include "kernels/reduce.h"

namespace samestep {

bool RecursiveRun::supports(DType dtype, ReduceOp op) {
  // Half types are summed in float32 and rounded once, which partial sums in the half type would not be.
  const bool adds = op == ReduceOp::sum || op == ReduceOp::prod || divides(op) || multiplies(op);
  if (dtype == DType::float16 || dtype == DType::bfloat16) return !adds;
  return !divides(op) || !is_integer(dtype);
}

RecursiveRun::RecursiveRun(ProgressEngine& engine, RecursivePlan plan, const Params& params, const std::byte* in,
                           std::byte* out, std::byte* room)
    : plan_(std::move(plan)),
      params_(params),
      in_(in),
      out_(out),
      arrivals_(plan_.steps().size()),
      receives_(plan_.steps().size()) {
  // Partial results arrive in scratch memory, so a partner that is ahead can send them before this rank gets there.
  for (std::size_t i = 0; i < plan_.steps().size(); ++i) {
    const RecursiveStep& step = plan_.steps()[i];
    if (step.use == RecursiveStep::Use::result || step.in.empty()) continue;
    const std::size_t nbytes = step.in[0].range.count() * itemsize(params_.dtype);
    arrivals_[i] = room;
    receives_[i].receive(engine.transport(), room, nbytes, rank_of(step.in[0].peer), params_.first_tag, max_elements());
    room += nbytes;
  }
}

bool RecursiveRun::advance(ProgressEngine& engine, std::size_t limit) {
  Transport& transport = engine.transport();
  while (at_ < plan_.steps().size()) {
    if (!posted_) {
      if (at_ >= limit) return false;
      begin(engine);
    }
    // The elements being sent may lie where this step's or later results are stored.
    if (!sends_.test(transport) || !receives_[at_].test(transport)) return false;
    if (step().use != RecursiveStep::Use::result && !step().in.empty()) combine();
    ++at_;
    posted_ = false;
  }
  return true;
}

void RecursiveRun::begin(ProgressEngine& engine) {
  posted_ = true;
  const bool results = step().use == RecursiveStep::Use::result;
  // Results have a tag of their own: receives of partial sums are posted ahead, also those of later segments, and a
  // result must not match one of them. The place of a result may hold elements that are still needed, so its receive is
  // posted only now.
  const int tag = params_.first_tag + (results ? 1 : 0);
  const auto nbytes = [&](Range range) { return range.count() * itemsize(params_.dtype); };
  for (const RecursiveStep::Transfer& from : step().in) {
    if (!results) break;  // the constructor has posted the receives of partial results
    receives_[at_].receive(engine.transport(), result(from.range), nbytes(from.range), rank_of(from.peer), tag,
                           max_elements());
  }
  for (const RecursiveStep::Transfer& to : step().out) {
    const std::byte* const from = results ? result(to.range) : held(to.range);
    sends_.send(engine.transport(), from, nbytes(to.range), rank_of(to.peer), tag, max_elements());
    engine.count_message(nbytes(to.range));
  }
}

void RecursiveRun::combine() {
  // The first sum is stored to `out`, and the input is never written, unless the caller works in place.
  const Range range = step().in[0].range;
  const kernels::Input mine{held(range)}, theirs{arrivals_[at_]};
  const bool before = step().use == RecursiveStep::Use::left;
  const std::array<kernels::Input, 2> inputs = {before ? theirs : mine, before ? mine : theirs};
  // A mean is a sum until the last step, whose kernel divides.
  const ReduceOp op = divides(params_.op) && !step().finishes ? ReduceOp::sum : params_.op;
  void* const out = result(range);
  kernels::reduce_into(params_.dtype, op, inputs, {&out, 1}, range.count(), params_.divisor);
  has_combined_ = true;
}

std::vector<int> RecursiveRun::pending_peers(ProgressEngine& engine) {
  std::vector<int> peers;
  if (at_ < plan_.steps().size() && !receives_[at_].test(engine.transport())) {
    for (const RecursiveStep::Transfer& from : step().in) peers.push_back(rank_of(from.peer));
  }
  return peers;
}

void RecursiveRun::abort(ProgressEngine& engine) {
  for (RequestSet& receive : receives_) receive.abandon(engine.transport());
}

}  // namespace samestep
