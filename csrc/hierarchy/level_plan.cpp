#include "hierarchy/level_plan.h"

#include <algorithm>

namespace samestep {
namespace {

constexpr std::size_t kRounding = 64;  // elements: chunks begin on cache lines
constexpr std::size_t kLeast = 1024;   // elements of a chunk, below which messages cost more than they carry

std::size_t divide_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

}  // namespace

LevelPlan::LevelPlan(const Seats& seats, Verb verb, int root, std::size_t count, std::size_t piece, bool together)
    : seats_(&seats), verb_(verb), root_(root), count_(count) {
  if (count == 0) return;
  const auto n_hosts = static_cast<std::size_t>(seats.n_hosts()), lanes = static_cast<std::size_t>(seats.lanes());
  std::size_t n_ranks = 0;
  for (int host = 0; host < seats.n_hosts(); ++host) n_ranks += seats.ranks_on(host).size();
  const std::size_t turns = has_blocks() ? 1 : lanes * (verb == Verb::all_reduce && !together ? n_hosts : 1);
  const std::size_t fair = std::max(divide_up(count, turns), std::min(kLeast, piece));
  const std::size_t parts = divide_up(count, std::min(fair, piece));
  length_ = std::min(count, divide_up(divide_up(count, parts), kRounding) * kRounding);
  per_block_ = divide_up(count, length_);
  chunks_ = per_block_ * (has_blocks() ? n_ranks : 1);
}

LevelChunk LevelPlan::chunk(std::size_t number) const {
  LevelChunk chunk;
  const std::size_t first = number % per_block_ * length_;
  chunk.count = std::min(length_, count_ - first);
  chunk.in_offset = chunk.out_offset = first;
  const auto block = static_cast<int>(number / per_block_);
  switch (verb_) {
    case Verb::all_reduce:
      chunk.finisher = static_cast<int>(number / static_cast<std::size_t>(seats_->lanes()) %
                                        static_cast<std::size_t>(seats_->n_hosts()));
      break;
    case Verb::reduce:
      chunk.wanted_by = root_;
      chunk.finisher = seats_->host_of(root_);
      break;
    case Verb::reduce_scatter:
      chunk.in_offset += static_cast<std::size_t>(block) * count_;
      chunk.wanted_by = block;
      chunk.finisher = seats_->host_of(block);
      break;
    case Verb::all_gather:
      chunk.out_offset += static_cast<std::size_t>(block) * count_;
      chunk.source = block;
      chunk.finisher = seats_->host_of(block);
      break;
    default:  // broadcast
      chunk.source = root_;
      chunk.finisher = seats_->host_of(root_);
  }
  return chunk;
}

int LevelPlan::handler(std::size_t number, int host) const {
  const auto ranks = seats_->ranks_on(host);
  if (!has_blocks()) return ranks[number % static_cast<std::size_t>(seats_->lanes())];
  const auto owner = static_cast<int>(number / per_block_);
  if (seats_->host_of(owner) == host) return owner;
  return ranks[static_cast<std::size_t>(seats_->place_of(owner)) % ranks.size()];
}

bool LevelPlan::has_work(int rank) const {
  if (chunks_ == 0) return false;
  if (has_blocks()) return true;
  const auto place = static_cast<std::size_t>(seats_->place_of(rank));
  return place < static_cast<std::size_t>(seats_->lanes()) && place < chunks_;
}

}  // namespace samestep
