#include "node/node_movement.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/format.h"
#include "exchange/tags.h"
#include "kernels/stream.h"

namespace samestep {
namespace {

constexpr int kChunksAtOnce = 8;  // then others may have their turn

bool is_ragged(Verb verb) {
  return verb == Verb::all_gather_v || verb == Verb::gather_v || verb == Verb::scatter_v || verb == Verb::all_to_all_v;
}

template <class T>
void append(std::vector<std::byte>& block, const T& value) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
  block.insert(block.end(), bytes, bytes + sizeof value);
}

}  // namespace

NodeMovement::NodeMovement(std::shared_ptr<Engine> shared_engine, const Signature& signature, std::vector<Route> routes,
                           std::shared_ptr<NodeGroup> group)
    : Movement(std::move(shared_engine), signature, std::move(routes)),
      group_(std::move(group)),
      ragged_(is_ragged(signature.verb)) {
  for (int peer = 0; peer < engine().size(); ++peer) {
    has_long_ = has_long_ || (peer != engine().rank() && is_long(routes_[static_cast<std::size_t>(peer)]));
  }
}

void NodeMovement::announce(std::uint64_t digest) {
  if (!has_long_ && !ragged_) return Movement::announce(digest);
  Host& host = *group_->host;
  const auto size = static_cast<std::size_t>(engine().size());
  std::vector<std::vector<std::byte>> blocks(size);
  std::vector<Meeting::Bytes> parts(size);
  for (std::size_t peer = 0; peer < size; ++peer) {
    const Route& route = routes_[peer];
    std::vector<std::byte>& block = blocks[peer];
    if (ragged_) append(block, Sizes{route.out_nbytes, route.in_nbytes});
    if (is_long(route)) {
      append(block, Places{host.place_of(route.out, route.out_nbytes), host.place_of(route.in, route.in_nbytes)});
    }
    if (is_short(route.out_nbytes)) block.insert(block.end(), route.out, route.out + route.out_nbytes);
    parts[peer] = block;
  }
  engine().meeting().announce_parts(sequence_, digest, parts);
}

template <class T>
T NodeMovement::take(int peer, Meeting::Bytes& data) {
  T value;
  if (data.size() < sizeof value) throw Error(str(describe(), ": rank ", peer, " runs another version of samestep"));
  std::memcpy(&value, data.data(), sizeof value);
  data = data.subspan(sizeof value);
  return value;
}

void NodeMovement::start_work() {
  for (int step = 0; step < engine().size(); ++step) {
    const int peer = (engine().rank() + step) % engine().size();
    meet_peer(peer, routes_[static_cast<std::size_t>(peer)]);
  }
}

void NodeMovement::meet_peer(int peer, const Route& route) {
  if (peer == engine().rank()) return;  // see copy_own
  Meeting::Bytes data = engine().meeting().data(sequence_, peer);
  if (ragged_) {
    const auto sizes = take<Sizes>(peer, data);
    if (sizes.out != route.in_nbytes || sizes.in != route.out_nbytes) {
      mismatch_ = str(describe(), ": rank ", peer, " sends ", sizes.out, " bytes where this rank expects ",
                      route.in_nbytes, ", and expects ", sizes.in, " where this rank sends ", route.out_nbytes);
      routes_[static_cast<std::size_t>(peer)] = {};  // neither waits for the other
      return;
    }
  }
  const Places theirs = is_long(route) ? take<Places>(peer, data) : Places{};
  if (is_short(route.in_nbytes)) {
    if (data.size() != route.in_nbytes) throw_wrong_size(peer, data.size(), route.in_nbytes);
    if (!data.empty()) std::memcpy(route.in, data.data(), data.size());
  } else {
    divide(peer, false, route.in, group_->host->place_of(route.in, route.in_nbytes), theirs.out, route.in_nbytes);
  }
  if (!is_short(route.out_nbytes)) {
    auto* const out = const_cast<std::byte*>(route.out);
    divide(peer, true, out, group_->host->place_of(out, route.out_nbytes), theirs.in, route.out_nbytes);
  }
}

void NodeMovement::divide(int peer, bool outgoing, std::byte* mine, std::uint64_t my_place, std::uint64_t their_place,
                          std::size_t nbytes) {
  const bool kernel = group_->host->reaches_memory();
  const bool i_can = kernel || (their_place & Host::kShared) != 0;
  const bool they_can = kernel || (my_place & Host::kShared) != 0;
  if (!i_can && !they_can) {
    const int tag = tags::of_operation(sequence_, 0);
    if (outgoing) {
      sends_.send(engine().messenger(), mine, nbytes, peer, tag);
    } else {
      receives_[static_cast<std::size_t>(peer)].receive(engine().messenger(), mine, nbytes, peer, tag);
    }
    return;
  }
  // The receiver copies; where all comes from one rank or goes to one, that rank takes a fair share.
  const auto size = static_cast<std::size_t>(engine().size());
  const int root = signature().root;
  const bool receiver_is_i = !outgoing;
  if (i_can && !they_can) {
    copies_.push_back({peer, outgoing, mine, their_place, nbytes, 0, 1});
  } else if (i_can && root < 0) {
    if (receiver_is_i) copies_.push_back({peer, outgoing, mine, their_place, nbytes, 0, 1});
  } else if (i_can && root == engine().rank()) {
    copies_.push_back({peer, outgoing, mine, their_place, nbytes, size - 1, size});
  } else if (i_can) {
    for (std::size_t first = 0; first + 1 < size; ++first) {
      copies_.push_back({peer, outgoing, mine, their_place, nbytes, first, size});
    }
  }
}

void NodeMovement::copy_chunk(const Copy& copy, std::size_t chunk) {
  Host& host = *group_->host;
  const int member = group_->member(copy.peer);
  const std::size_t begin = chunk * copy.chunk_nbytes();
  const std::size_t nbytes = std::min(copy.chunk_nbytes(), copy.nbytes - begin);
  if (std::byte* const there = host.at(member, copy.theirs, copy.nbytes); there != nullptr) {
    std::byte* const to = copy.outgoing ? there + begin : copy.mine + begin;
    const std::byte* const from = copy.outgoing ? copy.mine + begin : there + begin;
    return kernels::copy_part(to, from, nbytes, copy.nbytes);
  }
  const bool moved = copy.outgoing ? host.push(member, copy.theirs + begin, copy.mine + begin, nbytes)
                                   : host.pull(member, copy.mine + begin, copy.theirs + begin, nbytes);
  if (!moved) throw Unreachable();
}

bool NodeMovement::work_on_copies() {
  if (stuck_) return false;
  for (int i = 0; i < kChunksAtOnce;) {
    if (at_ == copies_.size()) return true;
    const Copy& copy = copies_[at_];
    const std::size_t chunk = copy.first + chunk_ * copy.step;
    if (chunk * copy.chunk_nbytes() >= copy.nbytes) {
      ++at_;
      chunk_ = 0;
      continue;
    }
    try {
      copy_chunk(copy, chunk);
    } catch (const Unreachable&) {
      stuck_ = true;
      return false;
    }
    ++chunk_;
    ++i;
  }
  return false;
}

bool NodeMovement::peer_is_done(int peer) {
  if (peer == engine().rank() || !is_long(routes_[static_cast<std::size_t>(peer)])) return true;
  return group_->arena->is_at(sequence_, peer, 1);
}

bool NodeMovement::work() {
  if (!has_long_) {
    copy_own();
    return end();
  }
  // Buffers of a rank that has given up must not be touched; its farewell ends this operation soon.
  if (!group_->meeting->all_here(sequence_)) return false;
  if (!mine_are_done_) {
    if (!work_on_copies() || !Movement::work()) return false;
    mine_are_done_ = true;
    group_->arena->set_step(sequence_, engine().rank(), 1);
    copy_own();
  }
  for (int peer = 0; peer < engine().size(); ++peer) {
    if (!peer_is_done(peer)) return false;
  }
  return end();
}

void NodeMovement::copy_own() {
  const Route& route = routes_[static_cast<std::size_t>(engine().rank())];
  if (route.in != route.out) kernels::copy_part(route.in, route.out, route.in_nbytes, route.in_nbytes);
}

bool NodeMovement::end() {
  if (!mismatch_.empty()) throw MismatchError(mismatch_);
  return true;
}

std::vector<int> NodeMovement::awaited() {
  std::vector<int> late;
  for (int peer = 0; peer < engine().size(); ++peer) {
    if (!peer_is_done(peer)) late.push_back(peer);
  }
  return late;
}

}  // namespace samestep
