#include "collectives/pairwise_exchange.h"

#include "core/error.h"
#include "core/format.h"
#include "kernels/stream.h"
#include "transport/tags.h"

namespace samestep {

std::size_t PairwiseExchange::max_inline_bytes(ProgressEngine& engine, CollectiveType verb) {
  const HeaderExchange::Limits& limits = engine.header_exchange().limits();
  if (verb == CollectiveType::bcast) return without_descriptor_space(limits.single_source);
  // In these each rank sends the same to all peers.
  const bool same_to_all =
      limits.per_peer == 0 && (verb == CollectiveType::allgatherv || verb == CollectiveType::make_group);
  return without_descriptor_space(verb == CollectiveType::allgather || same_to_all ? limits.to_all : limits.per_peer);
}

void PairwiseExchange::post(std::uint64_t digest) {
  const PeerTransfer* first = nullptr;  // a block that is the same for all peers is copied once
  bool all_alike = true;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const PeerTransfer& transfer = transfers_[static_cast<std::size_t>(peer)];
    if (first == nullptr) first = &transfer;
    all_alike = all_alike && transfer.out == first->out && transfer.out_nbytes == first->out_nbytes;
  }
  const auto data = [&](const PeerTransfer& transfer) -> HeaderExchange::Bytes {
    if (!is_inline(transfer.out_nbytes)) return {};
    return {transfer.out, transfer.out_nbytes};
  };
  if (all_alike) {
    headers().post(sequence_, digest, first ? data(*first) : HeaderExchange::Bytes{});
    return;
  }
  std::vector<HeaderExchange::Bytes> parts;
  for (const PeerTransfer& transfer : transfers_) parts.push_back(data(transfer));
  headers().post_per_peer(sequence_, digest, parts);
}

void PairwiseExchange::start_work() {
  const int tag = tags::of_operation(sequence_, 0);
  for (int step = 0; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    const auto i = static_cast<std::size_t>(peer);
    const PeerTransfer& transfer = transfers_[i];
    if (peer == rank()) {
      if (transfer.in_nbytes != 0 && transfer.in != transfer.out)
        engine().copy_local(transfer.in, transfer.out, transfer.in_nbytes);
      continue;
    }
    // Each rank begins with the rank after it, so that not all of them send to the same one at once. Sizes of the `v`
    // forms are not in the signature, so a difference between two ranks shows only here.
    if (!is_inline(transfer.in_nbytes)) {
      receives_[i].receive(transport(), transfer.in, transfer.in_nbytes, peer, tag);
    } else if (const HeaderExchange::Bytes data = headers().data(sequence_, peer); data.size() != transfer.in_nbytes) {
      throw_wrong_size(peer, data.size(), transfer.in_nbytes);
    } else if (!data.empty()) {
      kernels::copy(transfer.in, data.data(), data.size());
    }
    if (!is_inline(transfer.out_nbytes)) {
      sends_.send(transport(), transfer.out, transfer.out_nbytes, peer, tag);
      engine().count_message(transfer.out_nbytes);
    }
  }
}

void PairwiseExchange::throw_wrong_size(int peer, std::size_t sent, std::size_t expected) const {
  throw MismatchError(str(describe(), ": rank ", peer, " sends ", sent, " bytes where this rank expects ", expected));
}

bool PairwiseExchange::work() {
  // The caller may change its input once this is done, so sends have to be complete, too.
  bool finished = sends_.test(transport());
  for (RequestSet& receive : receives_) finished = receive.test(transport()) && finished;
  return finished;
}

std::vector<int> PairwiseExchange::pending_peers() {
  std::vector<int> peers;
  for (std::size_t i = 0; i < receives_.size(); ++i) {
    if (!receives_[i].test(transport())) peers.push_back(static_cast<int>(i));
  }
  return peers;
}

void PairwiseExchange::abort() {
  Collective::abort();
  for (RequestSet& receive : receives_) receive.abandon(transport());
}

}  // namespace samestep
