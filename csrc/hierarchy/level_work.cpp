#include "hierarchy/level_work.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "exchange/tags.h"
#include "kernels/reduce.h"
#include "kernels/stream.h"
#include "node/node_group.h"
#include "node/shared_heap.h"

namespace samestep {
namespace {

constexpr int kContribution = 0, kResult = 1;  // phases of an operation's tags
constexpr std::size_t kStep = 32 << 10;        // bytes that go through all of a reduction while they are in the cache

std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

/// Bytes of a chunk: long enough to pay for a message, and short enough that those under way stay in the cache.
std::size_t piece_nbytes(const Engine& engine, const Seats& seats) {
  if (engine.options().window_piece != 0) return engine.options().window_piece;
  constexpr std::size_t kMost = 48 << 10, kLeast = 16 << 10, kTogether = 1 << 20;
  return std::clamp(kTogether / static_cast<std::size_t>(seats.n_hosts()), kLeast, kMost);
}

LevelPlan plan_for(const Engine& engine, const LevelGroup& group, const Signature& signature, ConstBuffer in,
                   Buffer out) {
  const std::size_t piece = std::max<std::size_t>(1, piece_nbytes(engine, group.seats) / itemsize(in.dtype));
  const std::size_t count = signature.verb == Verb::reduce_scatter ? out.count : in.count;
  return LevelPlan(group.seats, signature.verb, signature.root, count, piece);
}

ReduceOp within_host(ReduceOp op) { return op == ReduceOp::avg ? ReduceOp::sum : op; }
ReduceOp between_hosts(ReduceOp op) { return op == ReduceOp::premul ? ReduceOp::sum : op; }

}  // namespace

LevelWork::LevelWork(std::shared_ptr<Engine> shared_engine, const Signature& signature,
                     std::shared_ptr<LevelGroup> group, ConstBuffer in, Buffer out, const Reduction& reduction)
    : LevelWork(shared_engine, signature, group, in, out, reduction,
                plan_for(*shared_engine, *group, signature, in, out)) {}

LevelWork::LevelWork(std::shared_ptr<Engine> shared_engine, const Signature& signature,
                     std::shared_ptr<LevelGroup> group, ConstBuffer in, Buffer out, const Reduction& reduction,
                     LevelPlan plan)
    : Collective(std::move(shared_engine), signature),
      group_(std::move(group)),
      marks_(group_->marks, group_->neighbours().size(),
             static_cast<std::size_t>(group_->seats.place_of(group_->rank))),
      neighbours_(group_),
      in_(in),
      out_(out),
      reduction_(reduction),
      itemsize_(itemsize(in.dtype)),
      plan_(std::move(plan)),
      most_open_(3 * static_cast<std::size_t>(group_->seats.n_hosts())),
      block_((plan_.longest() * itemsize_ + 63) / 64 * 64) {
  stage_if_hidden();
}

void LevelWork::stage_if_hidden() {
  const LevelGroup& group = *group_;
  if (group.host == nullptr || group.host->reaches_memory()) return;
  const std::shared_ptr<SharedHeap> heap = group.host->heap();
  const auto stage = [&](std::size_t nbytes) -> std::shared_ptr<std::byte> {
    std::shared_ptr<std::byte> block = allocate_shared(heap, nbytes);
    if (block == nullptr) {
      throw UnavailableError(str("no ", nbytes, " bytes of shared memory to reach the other ranks of this host"));
    }
    return block;
  };
  const auto hidden = [&](const void* data, std::size_t nbytes) {
    return nbytes != 0 && (group.host->place_of(data, nbytes) & Host::kShared) == 0;
  };
  const bool gives = signature().root < 0 || signature().verb == Verb::reduce || signature().root == group.rank;
  if (gives && hidden(in_.data, in_.nbytes())) {
    staged_in_ = stage(in_.nbytes());
    kernels::copy(staged_in_.get(), in_.data, in_.nbytes());
    in_.data = staged_in_.get();
  }
  if (wants(plan_.chunks() == 0 ? LevelChunk{} : plan_.chunk(0), group.rank) && hidden(out_.data, out_.nbytes())) {
    staged_out_ = stage(out_.nbytes());
    wanted_at_ = std::exchange(out_.data, staged_out_.get());
  }
}

void LevelWork::announce(std::uint64_t digest) {
  announced_ = true;
  const Posted posted{reduction_.factor, Neighbours::places_of(*group_, in_, out_)};
  engine().meeting().announce(sequence_, digest, {reinterpret_cast<const std::byte*>(&posted), sizeof posted});
}

void LevelWork::start_work() {
  const int me = engine().rank();
  std::vector<Neighbours::Places> places(static_cast<std::size_t>(engine().size()));
  factors_.assign(places.size(), reduction_.factor);
  for (const int rank : group_->neighbours()) {
    if (rank == me) continue;
    Posted posted;
    const Meeting::Bytes data = engine().meeting().data(sequence_, rank);
    if (data.size() != sizeof posted) throw Error("the ranks of this host run different versions of samestep");
    std::memcpy(&posted, data.data(), sizeof posted);
    places[static_cast<std::size_t>(rank)] = posted.places;
    factors_[static_cast<std::size_t>(rank)] = posted.factor;
  }
  neighbours_.meet(in_, out_, std::move(places));
  for (std::size_t number = 0; number < plan_.chunks(); ++number) {
    if (plan_.handler(number, group_->my_host()) == me) mine_.push_back(number);
  }
  take_scratch();
  ends_in_.resize(group_->neighbours().size());
  ends_.resize(static_cast<std::size_t>(engine().size()));
  for (const int rank : group_->neighbours()) {
    if (rank == me || !plan_.has_work(rank)) continue;
    ends_in_[static_cast<std::size_t>(group_->seats.place_of(rank))].receive(
        engine().messenger(), &ends_[static_cast<std::size_t>(rank)], 1, rank,
        tags::of_operation(sequence_, kContribution));
  }
}

void LevelWork::take_scratch() {
  most_open_ = std::min(most_open_, mine_.size());
  const auto n_hosts = static_cast<std::size_t>(group_->seats.n_hosts());
  if (most_open_ != 0) scratch_ = engine().scratch().take(most_open_ * n_hosts * block_);
}

bool LevelWork::wants(const LevelChunk& chunk, int rank) const {
  if (signature().verb == Verb::broadcast) return rank != signature().root;
  return chunk.wanted_by == kEverybody || chunk.wanted_by == rank;
}

bool LevelWork::work() {
  // Buffers of a rank that has given up must not be touched; its farewell ends this operation soon.
  if (stuck_ || !marks_.all_here(sequence_)) return false;
  try {
    return work_on_chunks() && tell_neighbours();
  } catch (const Unreachable&) {
    stuck_ = true;
    return false;
  }
}

bool LevelWork::work_on_chunks() {
  bool moved = true;
  while (moved) {
    while (next_ < mine_.size() && open_.size() < most_open_) open_next();
    post_results();
    // In order, since tags do not tell chunks apart.
    bool earlier_finished = true, earlier_stored = true;
    for (Open& open : open_) {
      bool& earlier = is_mine(open) ? earlier_finished : earlier_stored;
      if (!open.done && earlier) open.done = is_mine(open) ? finish(open) : store(open);
      earlier = earlier && open.done;
      if (!earlier_finished && !earlier_stored) break;
    }
    moved = false;
    while (!open_.empty() && open_.front().done && open_.front().sent.test(engine().messenger())) {
      open_.pop_front();
      moved = next_ < mine_.size();
    }
  }
  return open_.empty() && next_ == mine_.size();
}

void LevelWork::open_next() {
  Open& open = open_.emplace_back();
  open.number = mine_[next_];
  open.chunk = plan_.chunk(open.number);
  const auto n_hosts = static_cast<std::size_t>(group_->seats.n_hosts());
  open.room = scratch_.data.get() + next_ % most_open_ * n_hosts * block_;
  ++next_;
  if (!plan_.reduces()) return;
  Messenger& messenger = engine().messenger();
  const int tag = tags::of_operation(sequence_, kContribution);
  if (is_mine(open)) {
    open.contributions_in.resize(n_hosts);
    for (int host = 0; host < group_->seats.n_hosts(); ++host) {
      if (host == group_->my_host()) continue;
      open.contributions_in[static_cast<std::size_t>(host)].receive(messenger, block(open, host), bytes_of(open.chunk),
                                                                    plan_.handler(open.number, host), tag);
    }
    return;
  }
  const std::vector<const std::byte*> inputs = inputs_here(open.chunk);
  std::byte* const into = block(open, group_->my_host());
  const std::byte* partial = reduce_here(0, open.chunk.count, inputs, into);
  open.sent.send(messenger, partial, bytes_of(open.chunk), plan_.handler(open.number, open.chunk.finisher), tag);
  engine().count_message(bytes_of(open.chunk));
}

std::vector<const std::byte*> LevelWork::inputs_here(const LevelChunk& chunk) {
  std::vector<const std::byte*> inputs;
  const std::size_t offset = chunk.in_offset * itemsize_, nbytes = bytes_of(chunk);
  const auto ranks = group_->neighbours();
  const std::size_t stride = (nbytes + 63) / 64 * 64;
  if (group_->bounce.size() < ranks.size() * stride) group_->bounce.resize(ranks.size() * stride);
  for (const int rank : ranks) {
    if (chunk.source != kEverybody && chunk.source != rank) continue;
    inputs.push_back(neighbours_.read(rank, offset, nbytes, group_->bounce.data() + inputs.size() * stride));
  }
  return inputs;
}

const std::byte* LevelWork::reduce_here(std::size_t first, std::size_t count, std::span<const std::byte* const> inputs,
                                        std::byte* into) const {
  if (inputs.size() == 1 && reduction_.op != ReduceOp::premul) return inputs[0] + first * itemsize_;
  std::vector<kernels::Input> terms(inputs.size());
  const auto ranks = group_->neighbours();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    terms[i] = {inputs[i] + first * itemsize_, factors_[static_cast<std::size_t>(ranks[i])]};
  }
  kernels::reduce(in_.dtype, within_host(reduction_.op), terms, into, count);
  return into;
}

bool LevelWork::finish(Open& open) {
  Messenger& messenger = engine().messenger();
  for (Requests& contribution : open.contributions_in) {
    if (!contribution.test(messenger)) return false;
  }
  const std::size_t out_offset = open.chunk.out_offset * itemsize_;
  const bool kept = i_want(open.chunk);
  std::byte* home = kept ? bytes(out_.data) + out_offset : block(open, group_->my_host());
  if (!kept && !plan_.reduces()) home = bytes(const_cast<void*>(in_.data)) + open.chunk.in_offset * itemsize_;
  std::vector<void*> outs;
  if (kept) outs.push_back(home);
  for (const int rank : group_->neighbours()) {
    if (rank == group_->rank || !wants(open.chunk, rank)) continue;
    if (std::byte* const at = neighbours_.output(rank, out_offset)) outs.push_back(at);
  }
  if (outs.empty() && plan_.reduces()) outs.push_back(home);
  combine(open, outs);
  for (int host = 0; plan_.spreads() && host < group_->seats.n_hosts(); ++host) {
    if (host == group_->my_host()) continue;
    open.sent.send(messenger, home, bytes_of(open.chunk), plan_.handler(open.number, host),
                   tags::of_operation(sequence_, kResult));
    engine().count_message(bytes_of(open.chunk));
  }
  write_to_neighbours(open.chunk, outs.empty() ? home : bytes(outs[0]), /*to_shared_too=*/false);
  return true;
}

void LevelWork::combine(Open& open, std::span<void* const> outs) {
  const std::vector<const std::byte*> inputs = inputs_here(open.chunk);
  const std::size_t step = std::max<std::size_t>(kStep / itemsize_ / 64 * 64, 64);
  const auto n_hosts = static_cast<std::size_t>(group_->seats.n_hosts());
  if (group_->partial.size() < step * itemsize_) group_->partial.resize(step * itemsize_);
  std::vector<kernels::Input> terms(n_hosts);
  std::vector<void*> into(outs.begin(), outs.end());
  for (std::size_t first = 0; first < open.chunk.count; first += step) {
    const std::size_t count = std::min(step, open.chunk.count - first), skip = first * itemsize_;
    for (std::size_t i = 0; i < outs.size(); ++i) into[i] = bytes(outs[i]) + skip;
    if (!plan_.reduces()) {
      for (void* const out : into) {
        if (out != inputs[0] + skip) kernels::copy(out, inputs[0] + skip, count * itemsize_);
      }
      continue;
    }
    for (std::size_t host = 0; host < n_hosts; ++host) {
      const bool here = static_cast<int>(host) == group_->my_host();
      terms[host].data =
          here ? reduce_here(first, count, inputs, group_->partial.data()) : block(open, static_cast<int>(host)) + skip;
    }
    kernels::reduce_into(in_.dtype, between_hosts(reduction_.op), terms, into, count,
                         static_cast<std::size_t>(engine().size()));
  }
}

void LevelWork::post_results() {
  if (!plan_.spreads()) return;
  Messenger& messenger = engine().messenger();
  for (Open& open : open_) {
    if (is_mine(open) || open.result_posted) continue;
    // In place, the result lands where this rank's own elements may be being sent from.
    if (group_->neighbours().size() == 1 && !open.sent.test(messenger)) return;
    std::byte* const into =
        i_want(open.chunk) ? bytes(out_.data) + open.chunk.out_offset * itemsize_ : block(open, group_->my_host());
    open.result.receive(messenger, into, bytes_of(open.chunk), plan_.handler(open.number, open.chunk.finisher),
                        tags::of_operation(sequence_, kResult));
    open.result_posted = true;
  }
}

bool LevelWork::store(Open& open) {
  if (!plan_.spreads()) return true;
  if (!open.result_posted || !open.result.test(engine().messenger())) return false;
  write_to_neighbours(open.chunk, bytes(out_.data) + open.chunk.out_offset * itemsize_, /*to_shared_too=*/true);
  return true;
}

void LevelWork::write_to_neighbours(const LevelChunk& chunk, const std::byte* from, bool to_shared_too) const {
  const std::size_t offset = chunk.out_offset * itemsize_, nbytes = bytes_of(chunk);
  for (const int rank : group_->neighbours()) {
    if (rank == group_->rank || !wants(chunk, rank)) continue;
    std::byte* const at = neighbours_.output(rank, offset);
    if (at == nullptr) {
      neighbours_.write(rank, offset, from, nbytes);
    } else if (to_shared_too) {
      kernels::copy(at, from, nbytes);
    }
  }
}

bool LevelWork::tell_neighbours() {
  Messenger& messenger = engine().messenger();
  if (!told_) {
    told_ = true;
    if (scratch_.data != nullptr) engine().scratch().give_back(std::move(scratch_));
    for (const int rank : group_->neighbours()) {
      if (mine_.empty() || rank == engine().rank()) continue;
      ends_out_.send(messenger, &ends_[static_cast<std::size_t>(engine().rank())], 1, rank,
                     tags::of_operation(sequence_, kContribution));
      engine().count_message(1);
    }
  }
  bool ended = ends_out_.test(messenger);
  for (Requests& end : ends_in_) ended = ended && end.test(messenger);
  if (ended && staged_out_ != nullptr) kernels::copy(wanted_at_, out_.data, out_.nbytes());
  return ended;
}

std::vector<int> LevelWork::awaited() {
  Messenger& messenger = engine().messenger();
  std::vector<int> late = late_with_chunks();
  for (std::size_t place = 0; place < ends_in_.size(); ++place) {
    if (!ends_in_[place].test(messenger)) late.push_back(group_->neighbours()[place]);
  }
  std::sort(late.begin(), late.end());
  return late;
}

std::vector<int> LevelWork::late_with_chunks() {
  Messenger& messenger = engine().messenger();
  std::vector<int> late;
  if (!open_.empty()) {
    Open& open = open_.front();
    for (std::size_t host = 0; host < open.contributions_in.size(); ++host) {
      if (!open.contributions_in[host].test(messenger))
        late.push_back(plan_.handler(open.number, static_cast<int>(host)));
    }
    if (!is_mine(open) && !open.done) late.push_back(plan_.handler(open.number, open.chunk.finisher));
  }
  return late;
}

void LevelWork::give_up() {
  // The others may be at work: whoever has not seen why it ends must not touch this rank's buffers any more.
  if (announced_ && !is_disputed()) marks_.leave(sequence_);
  Collective::give_up();
  for (Open& open : open_) {
    for (Requests& contribution : open.contributions_in) contribution.abandon(engine().messenger());
    open.result.abandon(engine().messenger());
  }
  for (Requests& end : ends_in_) end.abandon(engine().messenger());
}

}  // namespace samestep
