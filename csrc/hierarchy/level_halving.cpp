#include "hierarchy/level_halving.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "exchange/halving.h"
#include "exchange/tags.h"

namespace samestep {
namespace {

constexpr std::size_t kOpenChunks = 4;
constexpr std::size_t kStep = 64 << 10;  // bytes of each rank that are added up while they are in the cache

LevelPlan plan_for(const Engine& engine, const LevelGroup& group, const Signature& signature, ConstBuffer in,
                   bool halves) {
  const std::size_t window = Halving::window_nbytes(group.seats.n_hosts(), engine.options().window_piece);
  const std::size_t piece = halves ? std::max<std::size_t>(1, window / itemsize(in.dtype)) : SIZE_MAX;
  return LevelPlan(group.seats, signature.verb, signature.root, in.count, piece, /*together=*/true);
}

}  // namespace

LevelHalving::LevelHalving(std::shared_ptr<Engine> shared_engine, const Signature& signature,
                           std::shared_ptr<LevelGroup> group, ConstBuffer in, Buffer out, const Reduction& reduction,
                           bool halves)
    : LevelWork(shared_engine, signature, group, in, out, reduction,
                plan_for(*shared_engine, *group, signature, in, halves)),
      halves_(halves) {}

const std::byte* LevelHalving::sum_here(const LevelChunk& chunk, std::byte* into) {
  if (group_->neighbours().size() == 1 && reduction_.op != ReduceOp::premul) {
    return static_cast<const std::byte*>(in_.data) + chunk.in_offset * itemsize_;
  }
  LevelChunk part = chunk;
  const std::size_t most = std::max<std::size_t>(kStep / itemsize_, 1);
  for (std::size_t first = 0; first < chunk.count; first += most) {
    part.in_offset = chunk.in_offset + first;
    part.count = std::min(most, chunk.count - first);
    reduce_here(0, part.count, inputs_here(part), into + first * itemsize_);
  }
  return into;
}

void LevelHalving::open_next() {
  const std::size_t number = mine_[next_++];
  const LevelChunk chunk = plan_.chunk(number);
  std::vector<int> handlers;
  for (int host = 0; host < group_->seats.n_hosts(); ++host) handlers.push_back(plan_.handler(number, host));
  HalvingPlan steps(group_->seats.n_hosts(), group_->my_host(), {0, chunk.count}, halves_);
  const std::size_t sum_nbytes = (bytes_of(chunk) + 63) / 64 * 64;
  Scratch::Block block = engine().scratch().take(sum_nbytes + steps.room() * itemsize_);
  std::byte* const room = block.data.get();
  const std::byte* const sum = sum_here(chunk, room);
  HalvingRun::Terms terms;
  terms.dtype = in_.dtype;
  terms.op = reduction_.op == ReduceOp::premul ? ReduceOp::sum : reduction_.op;
  terms.n_ranks = static_cast<std::size_t>(engine().size());
  terms.ranks = handlers;
  terms.first_tag = tags::of_operation(sequence_, 0);
  terms.piece = engine().options().window_piece;
  std::byte* const out = static_cast<std::byte*>(out_.data) + chunk.out_offset * itemsize_;
  HalvingRun run(engine(), std::move(steps), terms, sum, out, room + sum_nbytes);
  open_.push_back({chunk, std::move(handlers), std::move(block), std::move(run)});
}

bool LevelHalving::work_on_chunks() {
  while (true) {
    while (next_ < mine_.size() && open_.size() < kOpenChunks) open_next();
    std::size_t limit = SIZE_MAX;
    for (Open& open : open_) {
      open.run.advance(engine(), limit);
      limit = open.run.begun();
    }
    if (open_.empty()) return true;
    Open& first = open_.front();
    if (!first.run.advance(engine(), SIZE_MAX)) return false;
    const std::byte* const result = static_cast<const std::byte*>(out_.data) + first.chunk.out_offset * itemsize_;
    write_to_neighbours(first.chunk, result, /*to_shared_too=*/true);
    engine().scratch().give_back(std::move(first.block));
    open_.pop_front();
  }
}

std::vector<int> LevelHalving::late_with_chunks() {
  return open_.empty() ? std::vector<int>{} : open_.front().run.awaited(engine());
}

void LevelHalving::give_up() {
  LevelWork::give_up();
  for (Open& open : open_) open.run.give_up(engine());
}

}  // namespace samestep
