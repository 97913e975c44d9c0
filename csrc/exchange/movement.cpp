#include "exchange/movement.h"

#include "core/error.h"
#include "core/format.h"
#include "exchange/tags.h"
#include "kernels/stream.h"

namespace samestep {

std::size_t Movement::short_nbytes(Engine& engine, Verb verb) {
  const Meeting& meeting = engine.meeting();
  if (verb == Verb::broadcast) return less_places(meeting.limit_of_one());
  // Whoever sends sends the same to all.
  const bool alike = meeting.limit_of_parts() == 0 && (verb == Verb::all_gather_v || verb == Verb::make_group);
  return less_places(verb == Verb::all_gather || alike ? meeting.limit() : meeting.limit_of_parts());
}

void Movement::announce(std::uint64_t digest) {
  const Route* first = nullptr;  // the same run for everybody is copied once
  bool all_alike = true;
  for (int peer = 0; peer < engine().size(); ++peer) {
    if (peer == engine().rank()) continue;
    const Route& route = routes_[static_cast<std::size_t>(peer)];
    if (first == nullptr) first = &route;
    all_alike = all_alike && route.out == first->out && route.out_nbytes == first->out_nbytes;
  }
  const auto data = [&](const Route& route) -> Meeting::Bytes {
    if (!is_short(route.out_nbytes)) return {};
    return {route.out, route.out_nbytes};
  };
  if (all_alike) {
    engine().meeting().announce(sequence_, digest, first ? data(*first) : Meeting::Bytes{});
    return;
  }
  std::vector<Meeting::Bytes> parts;
  for (const Route& route : routes_) parts.push_back(data(route));
  engine().meeting().announce_parts(sequence_, digest, parts);
}

void Movement::start_work() {
  const int tag = tags::of_operation(sequence_, 0);
  for (int step = 0; step < engine().size(); ++step) {
    const int peer = (engine().rank() + step) % engine().size();
    const auto i = static_cast<std::size_t>(peer);
    const Route& route = routes_[i];
    if (peer == engine().rank()) {
      if (route.in_nbytes != 0 && route.in != route.out) engine().copy_own(route.in, route.out, route.in_nbytes);
      continue;
    }
    if (!is_short(route.in_nbytes)) {
      receives_[i].receive(engine().messenger(), route.in, route.in_nbytes, peer, tag);
    } else if (const Meeting::Bytes data = engine().meeting().data(sequence_, peer); data.size() != route.in_nbytes) {
      throw_wrong_size(peer, data.size(), route.in_nbytes);
    } else if (!data.empty()) {
      kernels::copy(route.in, data.data(), data.size());
    }
    if (!is_short(route.out_nbytes)) {
      sends_.send(engine().messenger(), route.out, route.out_nbytes, peer, tag);
      engine().count_message(route.out_nbytes);
    }
  }
}

void Movement::throw_wrong_size(int peer, std::size_t sent, std::size_t expected) const {
  throw MismatchError(str(describe(), ": rank ", peer, " sends ", sent, " bytes where this rank expects ", expected));
}

bool Movement::work() {
  bool finished = sends_.test(engine().messenger());
  for (Requests& receive : receives_) finished = receive.test(engine().messenger()) && finished;
  return finished;
}

std::vector<int> Movement::awaited() {
  std::vector<int> peers;
  for (std::size_t i = 0; i < receives_.size(); ++i) {
    if (!receives_[i].test(engine().messenger())) peers.push_back(static_cast<int>(i));
  }
  return peers;
}

void Movement::give_up() {
  Collective::give_up();
  for (Requests& receive : receives_) receive.abandon(engine().messenger());
}

}  // namespace samestep
