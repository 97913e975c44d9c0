#include "exchange/halving.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "exchange/tags.h"
#include "kernels/reduce.h"

namespace samestep {
namespace {

constexpr std::size_t kOpenWindows = 4;

}  // namespace

std::size_t Halving::window_nbytes(int n_ranks, std::size_t piece) {
  // The longest message, half of it, goes unasked over TCP, and what is under way stays in the cache.
  constexpr std::size_t kWindow = 1 << 20;
  return piece == 0 ? kWindow : piece * static_cast<std::size_t>(n_ranks);
}

Halving::Halving(std::shared_ptr<Engine> shared_engine, const Signature& signature, ConstBuffer in, Buffer out,
                 const Reduction& reduction, bool halves)
    : Collective(std::move(shared_engine), signature),
      in_(in),
      out_(out),
      reduction_(reduction),
      halves_(halves),
      length_(out.count) {
  const std::size_t nbytes = window_nbytes(engine().size(), engine().options().window_piece);
  const std::size_t most = std::max<std::size_t>(1, nbytes / itemsize(out.dtype));
  if (halves && out.count != 0) {
    const std::size_t windows = (out.count + most - 1) / most;
    length_ = (out.count + windows - 1) / windows;
  }
}

void Halving::announce(std::uint64_t digest) { engine().meeting().announce(sequence_, digest, {}); }

void Halving::start_work() {
  if (reduction_.op != ReduceOp::premul) return;
  const kernels::Input mine{in_.data, reduction_.factor};
  kernels::reduce(out_.dtype, reduction_.op, {&mine, 1}, out_.data, out_.count);
  in_ = out_;
  reduction_.op = ReduceOp::sum;
}

void Halving::open_next() {
  const std::size_t first = next_, size = itemsize(out_.dtype);
  next_ = std::min(out_.count, first + length_);
  HalvingPlan plan(engine().size(), engine().rank(), {0, next_ - first}, halves_);
  HalvingRun::Terms terms;
  terms.dtype = out_.dtype;
  terms.op = reduction_.op;
  terms.n_ranks = static_cast<std::size_t>(engine().size());
  terms.first_tag = tags::of_operation(sequence_, 0);
  terms.piece = engine().options().window_piece;
  Scratch::Block room;
  if (plan.room() != 0) room = engine().scratch().take(plan.room() * size);
  std::byte* const at = room.data.get();
  const auto* const in = static_cast<const std::byte*>(in_.data) + first * size;
  auto* const out = static_cast<std::byte*>(out_.data) + first * size;
  open_.push_back({std::move(room), HalvingRun(engine(), std::move(plan), terms, in, out, at)});
}

bool Halving::work() {
  while (true) {
    while (next_ < out_.count && open_.size() < kOpenWindows) open_next();
    std::size_t limit = SIZE_MAX;
    for (Window& window : open_) {
      window.run.advance(engine(), limit);
      limit = window.run.begun();
    }
    if (open_.empty()) return true;
    if (!open_.front().run.advance(engine(), SIZE_MAX)) return false;
    if (open_.front().room.data != nullptr) engine().scratch().give_back(std::move(open_.front().room));
    open_.pop_front();
  }
}

std::vector<int> Halving::awaited() { return open_.empty() ? std::vector<int>{} : open_.front().run.awaited(engine()); }

void Halving::give_up() {
  Collective::give_up();
  for (Window& window : open_) window.run.give_up(engine());
}

}  // namespace samestep
