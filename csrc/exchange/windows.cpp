#include "exchange/windows.h"

#include <algorithm>
#include <cstring>

#include "exchange/tags.h"
#include "kernels/reduce.h"

namespace samestep {
namespace {

constexpr std::size_t kOpenWindows = 3;

}  // namespace

std::size_t Windows::piece_nbytes(int n_ranks) {
  constexpr std::size_t kMost = 256 << 10, kLeast = 16 << 10, kTogether = 2 << 20;
  return std::clamp(kTogether / static_cast<std::size_t>(n_ranks), kLeast, kMost);
}

Windows::Windows(std::shared_ptr<Engine> shared_engine, const Signature& signature, ConstBuffer in, Buffer out,
                 const Reduction& reduction)
    : Collective(std::move(shared_engine), signature),
      reduction_(reduction),
      dtype_(out.dtype),
      itemsize_(itemsize(out.dtype)),
      in_bytes_(static_cast<const std::byte*>(in.data)),
      out_bytes_(static_cast<std::byte*>(out.data)) {
  const int n_ranks = engine().size();
  const std::size_t wanted = engine().options().window_piece;
  const std::size_t piece = std::max<std::size_t>(1, (wanted != 0 ? wanted : piece_nbytes(n_ranks)) / itemsize_);
  plan_ = signature.verb == Verb::reduce_scatter ? WindowPlan::of_blocks(n_ranks, out.count, piece)
                                                 : WindowPlan::of_buffer(n_ranks, out.count, piece);
  if (signature.verb == Verb::broadcast) in_bytes_ = out_bytes_;
  next_result_.resize(static_cast<std::size_t>(n_ranks));
}

bool Windows::gets_results(int rank) const {
  switch (signature().verb) {
    case Verb::all_reduce:
      return true;
    case Verb::reduce:
      return rank == signature().root;
    case Verb::broadcast:
      return rank != signature().root;
    default:
      return false;
  }
}

void Windows::announce(std::uint64_t digest) {
  const auto* factor = reinterpret_cast<const std::byte*>(&reduction_.factor);
  engine().meeting().announce(sequence_, digest, {factor, sizeof reduction_.factor});
}

void Windows::start_work() {
  factors_.resize(static_cast<std::size_t>(engine().size()), reduction_.factor);
  for (int peer = 0; peer < engine().size(); ++peer) {
    if (peer == engine().rank()) continue;
    std::memcpy(&factors_[static_cast<std::size_t>(peer)], engine().meeting().data(sequence_, peer).data(),
                sizeof(double));
  }
}

bool Windows::work() {
  while (next_window_ < plan_.windows() && open_.size() < kOpenWindows) open(next_window_++);
  bool earlier_finished = true;  // results leave in order of windows, since tags do not tell windows apart
  for (Window& window : open_) {
    if (earlier_finished) earlier_finished = finish_owned(window);
    post_results(window);
  }
  while (!open_.empty() && drained(open_.front())) {
    engine().scratch().give_back(std::move(open_.front().block));
    open_.pop_front();
  }
  return open_.empty() && next_window_ == plan_.windows();
}

void Windows::open(std::size_t index) {
  const int rank = engine().rank();
  const auto n_ranks = static_cast<std::size_t>(engine().size());
  Window& window = open_.emplace_back();
  window.index = index;
  window.contributions_in.resize(n_ranks);
  window.contributions_out.resize(n_ranks);
  window.results_in.resize(n_ranks);
  window.result_posted.resize(n_ranks);
  const int tag = tags::of_operation(sequence_, 0);
  const Chunk mine = plan_.chunk(index, rank);
  const bool reduces = signature().verb != Verb::broadcast;
  if (reduces) window.block = engine().scratch().take(n_ranks * plan_.longest() * itemsize_);
  for (int step = 1; step < engine().size(); ++step) {
    const int peer = (rank + step) % engine().size();
    const auto i = static_cast<std::size_t>(peer);
    if (contributes(peer) && mine.count != 0) {
      std::byte* place = reduces ? window.block.data.get() + i * plan_.longest() * itemsize_ : out_at(mine);
      window.contributions_in[i].receive(engine().messenger(), place, mine.count * itemsize_, peer, tag);
    }
    const Chunk theirs = plan_.chunk(index, peer);
    if (contributes(rank) && theirs.count != 0) {
      window.contributions_out[i].send(engine().messenger(), in_at(theirs), theirs.count * itemsize_, peer, tag);
      engine().count_message(theirs.count * itemsize_);
    }
  }
}

bool Windows::finish_owned(Window& window) {
  if (window.owned_is_finished) return true;
  for (Requests& contribution : window.contributions_in) {
    if (!contribution.test(engine().messenger())) return false;
  }
  window.owned_is_finished = true;
  const int rank = engine().rank();
  const Chunk chunk = plan_.chunk(window.index, rank);
  if (chunk.count == 0) return true;
  std::byte* result = out_at(chunk);
  if (signature().verb != Verb::broadcast) {
    const bool own_place = signature().verb != Verb::reduce || rank == signature().root;
    if (!own_place) result = window.block.data.get() + static_cast<std::size_t>(rank) * plan_.longest() * itemsize_;
    reduce_owned(window, chunk, result);
  }
  for (int step = 1; step < engine().size(); ++step) {
    const int peer = (rank + step) % engine().size();
    if (!gets_results(peer)) continue;
    window.results_out.send(engine().messenger(), result, chunk.count * itemsize_, peer,
                            tags::of_operation(sequence_, 1));
    engine().count_message(chunk.count * itemsize_);
  }
  return true;
}

void Windows::reduce_owned(Window& window, const Chunk& chunk, std::byte* result) {
  std::vector<kernels::Input> inputs(static_cast<std::size_t>(engine().size()));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool mine = static_cast<int>(i) == engine().rank();
    inputs[i] = {mine ? in_at(chunk) : window.block.data.get() + i * plan_.longest() * itemsize_, factors_[i]};
  }
  kernels::reduce(dtype_, reduction_.op, inputs, result, chunk.count);
}

bool Windows::post_results(Window& window) {
  const int rank = engine().rank();
  if (!gets_results(rank)) return true;
  bool all_posted = true;
  for (int step = 1; step < engine().size(); ++step) {
    const int owner = (rank + step) % engine().size();
    const auto i = static_cast<std::size_t>(owner);
    if (window.result_posted[i]) continue;
    // In place, the result lands where this rank's own elements are being sent from.
    if (next_result_[i] != window.index || !window.contributions_out[i].test(engine().messenger())) {
      all_posted = false;
      continue;
    }
    const Chunk chunk = plan_.chunk(window.index, owner);
    if (chunk.count != 0) {
      window.results_in[i].receive(engine().messenger(), out_at(chunk), chunk.count * itemsize_, owner,
                                   tags::of_operation(sequence_, 1));
    }
    window.result_posted[i] = true;
    ++next_result_[i];
  }
  return all_posted;
}

bool Windows::drained(Window& window) {
  if (!window.owned_is_finished || !post_results(window)) return false;
  Messenger& messenger = engine().messenger();
  if (!window.results_out.test(messenger)) return false;
  for (std::size_t i = 0; i < window.results_in.size(); ++i) {
    if (!window.results_in[i].test(messenger) || !window.contributions_out[i].test(messenger)) return false;
  }
  return true;
}

std::vector<int> Windows::awaited() {
  std::vector<int> peers;
  if (open_.empty()) return peers;
  Window& window = open_.front();
  for (std::size_t i = 0; i < window.results_in.size(); ++i) {
    Messenger& messenger = engine().messenger();
    const bool contributed = window.contributions_in[i].test(messenger);
    const bool has_result = !gets_results(engine().rank()) || static_cast<int>(i) == engine().rank() ||
                            (window.result_posted[i] && window.results_in[i].test(messenger));
    if (!contributed || !has_result) peers.push_back(static_cast<int>(i));
  }
  return peers;
}

void Windows::give_up() {
  Collective::give_up();
  for (Window& window : open_) {
    for (Requests& requests : window.contributions_in) requests.abandon(engine().messenger());
    for (Requests& requests : window.results_in) requests.abandon(engine().messenger());
  }
}

}  // namespace samestep
