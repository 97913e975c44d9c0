#include "node/node_movement.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/format.h"
#include "exchange/tags.h"
#include "kernels/stream.h"

namespace samestep {
namespace {

bool is_ragged(Verb verb) {
  return verb == Verb::all_gather_v || verb == Verb::gather_v || verb == Verb::scatter_v || verb == Verb::all_to_all_v;
}

bool is_staged(WayChoice::Way way) { return way == WayChoice::Way::staged || way == WayChoice::Way::past_caches; }

/// Bytes that all ranks read and write, if all do as much as this one; a run that goes to several ranks counts once.
std::size_t touched_by(const std::vector<Movement::Route>& routes, int root) {
  std::size_t in = 0, out = 0;
  const std::byte* last = nullptr;
  for (const Movement::Route& route : routes) {
    in += route.in_nbytes;
    out += route.out == last ? 0 : route.out_nbytes;
    last = route.out;
  }
  // Where one rank has it all, the others together have as much.
  return root < 0 ? routes.size() * (in + out) : 2 * std::max(in, out);
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
      ragged_(is_ragged(signature.verb)),
      can_stage_(StagedMovement::carries(signature.verb, engine().size())),
      touched_(touched_by(routes_, signature.root)),
      direct_(*group_, touched_) {
  for (int peer = 0; peer < engine().size(); ++peer) {
    const Route& route = routes_[static_cast<std::size_t>(peer)];
    if (peer == engine().rank() || !is_long(route)) continue;
    has_long_ = true;
    longest_ = std::max({longest_, route.out_nbytes, route.in_nbytes});
  }
}

bool NodeMovement::is_private(const std::byte* data, std::size_t nbytes) {
  return (group_->host->place_of(data, nbytes) & Host::kShared) == 0;
}

std::vector<NodeMovement::Way> NodeMovement::open_ways() const {
  std::vector<Way> open;
  const bool kernel = group_->host->reaches_memory();
  if (kernel) open.push_back(Way::direct);
  open.push_back(Way::staged);
  if (kernel && signature().root >= 0) open.push_back(Way::divided);
  if (StagedMovement::several_receive(signature().verb, group_->arena->size())) open.push_back(Way::past_caches);
  return open;
}

void NodeMovement::choose_way() {
  if (!can_stage_) return;
  bool any_private = false, any_goes_out = false;
  for (int peer = 0; peer < engine().size(); ++peer) {
    const Route& route = routes_[static_cast<std::size_t>(peer)];
    if (peer == engine().rank() || !is_long(route)) continue;
    const bool goes_out = !is_short(route.out_nbytes);
    any_goes_out = any_goes_out || goes_out;
    any_private =
        any_private || (goes_out ? is_private(route.out, route.out_nbytes) : is_private(route.in, route.in_nbytes));
  }
  if (!any_private) return;
  WayChoice& ways = group_->ways[signature().verb];
  if (engine().rank() == 0) {
    const std::vector<Way> open = open_ways();
    start_.way = open.size() == 1 ? open.front() : ways.next(longest_, open);
  }
  const Way likely = engine().rank() == 0 ? start_.way : ways.last(longest_);
  const bool stages = !group_->host->reaches_memory() || is_staged(likely);
  if (any_goes_out && stages && group_->meeting->is_next(sequence_)) stage_ahead(likely == Way::past_caches);
}

/// They then need not wait for each other once more.
void NodeMovement::stage_ahead(bool past_caches) {
  StagedMovement ahead(*group_, sequence_, signature().verb, longest_, past_caches);
  for (int peer = 0; peer < engine().size(); ++peer) {
    const Route& route = routes_[static_cast<std::size_t>(peer)];
    if (peer != engine().rank() && !is_short(route.out_nbytes)) ahead.send(peer, route.out);
  }
  ahead.copy_ahead();
  start_.first_is_staged = true;
}

void NodeMovement::announce(std::uint64_t digest) {
  if (!has_long_ && !ragged_) return Movement::announce(digest);
  start_.begun = all_begun_ = Moment::now();
  choose_way();
  Host& host = *group_->host;
  const auto size = static_cast<std::size_t>(engine().size());
  std::vector<std::vector<std::byte>> blocks(size);
  std::vector<Meeting::Bytes> parts(size);
  for (std::size_t peer = 0; peer < size; ++peer) {
    const Route& route = routes_[peer];
    std::vector<std::byte>& block = blocks[peer];
    ragged_ ? append(block, Sizes{route.out_nbytes, route.in_nbytes}) : append(block, start_);
    if (is_long(route)) {
      append(block, Places{host.place_of(route.out, route.out_nbytes), host.place_of(route.in, route.in_nbytes)});
    }
    if (is_short(route.out_nbytes)) block.insert(block.end(), route.out, route.out + route.out_nbytes);
    parts[peer] = block;
  }
  if (size == 2) {  // one peer: no table is needed
    engine().meeting().announce(sequence_, digest, parts[static_cast<std::size_t>(1 - engine().rank())]);
  } else {
    engine().meeting().announce_parts(sequence_, digest, parts);
  }
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
  if (has_long_ && !ragged_ && engine().rank() != 0) {
    Meeting::Bytes data = engine().meeting().data(sequence_, 0);
    start_.way = take<Start>(0, data).way;
  }
  for (int step = 0; step < engine().size(); ++step) {
    const int peer = (engine().rank() + step) % engine().size();
    meet_peer(peer, routes_[static_cast<std::size_t>(peer)]);
  }
}

void NodeMovement::meet_peer(int peer, const Route& route) {
  if (peer == engine().rank()) return;  // see copy_own
  Meeting::Bytes data = engine().meeting().data(sequence_, peer);
  Start start{};
  if (ragged_) {
    const auto sizes = take<Sizes>(peer, data);
    if (sizes.out != route.in_nbytes || sizes.in != route.out_nbytes) {
      mismatch_ = str(describe(), ": rank ", peer, " sends ", sizes.out, " bytes where this rank expects ",
                      route.in_nbytes, ", and expects ", sizes.in, " where this rank sends ", route.out_nbytes);
      routes_[static_cast<std::size_t>(peer)] = {};  // neither waits for the other
      return;
    }
  } else if (has_long_) {
    start = take<Start>(peer, data);
    all_begun_ = all_begun_.later(start.begun);
  }
  const Places theirs = is_long(route) ? take<Places>(peer, data) : Places{};
  Host& host = *group_->host;
  if (is_short(route.in_nbytes)) {
    if (data.size() != route.in_nbytes) throw_wrong_size(peer, data.size(), route.in_nbytes);
    kernels::copy(route.in, data.data(), data.size());
  } else {
    const std::uint64_t place = host.place_of(route.in, route.in_nbytes);
    begin_run({peer, false, route.in, place, theirs.out, route.in_nbytes, start.first_is_staged});
  }
  if (!is_short(route.out_nbytes)) {
    auto* const out = const_cast<std::byte*>(route.out);
    begin_run({peer, true, out, host.place_of(out, route.out_nbytes), theirs.in, route.out_nbytes, false});
  }
}

StagedMovement& NodeMovement::staged() {
  if (!staged_) {
    staged_.emplace(*group_, sequence_, signature().verb, longest_, start_.way == Way::past_caches);
    if (start_.first_is_staged) staged_->skip_first();
  }
  return *staged_;
}

void NodeMovement::begin_run(const End& end) {
  const bool kernel = group_->host->reaches_memory();
  const bool shared = ((end.my_place | end.their_place) & Host::kShared) != 0;
  if (can_stage_ && !shared) {
    group_->ways[signature().verb].goes(longest_, start_.way);
    timed_ = engine().rank() == 0;
  }
  if (shared || (kernel && !is_staged(start_.way))) return copy_directly(end);
  if (can_stage_) {
    end.outgoing ? staged().send(end.peer, end.mine) : staged().receive(end.peer, end.mine, end.first_is_staged);
    return;
  }
  const int tag = tags::of_operation(sequence_, 0);
  if (end.outgoing) {
    sends_.send(engine().messenger(), end.mine, end.nbytes, end.peer, tag);
  } else {
    receives_[static_cast<std::size_t>(end.peer)].receive(engine().messenger(), end.mine, end.nbytes, end.peer, tag);
  }
}

void NodeMovement::copy_directly(const End& end) {
  const bool kernel = group_->host->reaches_memory();
  const bool i_can = kernel || (end.their_place & Host::kShared) != 0;
  const bool they_can = kernel || (end.my_place & Host::kShared) != 0;
  if (!i_can) return;
  const DirectMovement::Run run{end.peer, end.outgoing, end.mine, end.their_place, end.nbytes};
  if (!they_can) return direct_.copy(run);
  // The receiver copies; where all comes from one rank or goes to one, that rank may take a fair share.
  const bool any_shared = ((end.my_place | end.their_place) & Host::kShared) != 0;
  const auto size = static_cast<std::size_t>(engine().size());
  const int root = signature().root;
  if (root < 0 || (start_.way != Way::divided && !any_shared)) {
    if (!end.outgoing) direct_.copy(run);
  } else if (root == engine().rank()) {
    direct_.copy_parts(run, size - 1, 1, size);
  } else {
    direct_.copy_parts(run, 0, size - 1, size);
  }
}

bool NodeMovement::peer_is_done(int peer) {
  if (peer == engine().rank() || !is_long(routes_[static_cast<std::size_t>(peer)])) return true;
  return group_->arena->is_at(sequence_, peer, Arena::kLastStep);
}

bool NodeMovement::work() {
  if (!has_long_) {
    copy_own();
    return end();
  }
  // Buffers of a rank that has given up must not be touched; its farewell ends this operation soon.
  if (!group_->meeting->all_here(sequence_)) return false;
  if (!mine_are_done_) {
    const std::uint64_t before = steps();
    const bool done = direct_.work() && (!staged_ || staged_->work()) && Movement::work();
    if (steps() != before) engine().moved();
    if (!done) return false;
    mine_are_done_ = true;
    group_->arena->set_step(sequence_, engine().rank(), Arena::kLastStep);
    copy_own();
  }
  for (int peer = 0; peer < engine().size(); ++peer) {
    if (!peer_is_done(peer)) return false;
  }
  if (timed_) {
    group_->ways[signature().verb].took(longest_, start_.way, Moment::now().since(all_begun_));
  }
  return end();
}

void NodeMovement::copy_own() {
  const Route& route = routes_[static_cast<std::size_t>(engine().rank())];
  if (route.in != route.out) kernels::copy_part(route.in, route.out, route.in_nbytes, touched_);
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
