#include "node/shm_exchange.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.h"
#include "core/format.h"
#include "kernels/stream.h"
#include "transport/tags.h"

namespace samestep {
namespace {

/// Bytes that all ranks access, if each accesses as many as this one. A block that is sent to several ranks counts
/// once.
std::size_t footprint_bytes(const std::vector<PeerTransfer>& transfers, int root) {
  std::size_t in = 0, out = 0;
  const std::byte* last = nullptr;
  for (const PeerTransfer& transfer : transfers) {
    in += transfer.in_nbytes;
    out += transfer.out == last ? 0 : transfer.out_nbytes;
    last = transfer.out;
  }
  // In a rooted collective root has as much as all others together.
  return root < 0 ? transfers.size() * (in + out) : 2 * std::max(in, out);
}

template <class T>
void append(std::vector<std::byte>& block, const T& value) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
  block.insert(block.end(), bytes, bytes + sizeof value);
}

}  // namespace

ShmExchange::ShmExchange(std::shared_ptr<ProgressEngine> shared_engine, const Signature& signature,
                         std::vector<PeerTransfer> transfers, std::shared_ptr<NodeGroup> group)
    : PairwiseExchange(std::move(shared_engine), signature, std::move(transfers)),
      group_(std::move(group)),
      is_vector_variant_(has_counts(signature.type)),
      can_stage_(StagedExchange::supports(signature.type, size())),
      footprint_bytes_(footprint_bytes(transfers_, signature.root)),
      single_copy_(*group_, footprint_bytes_) {
  for (int peer = 0; peer < size(); ++peer) {
    const PeerTransfer& transfer = transfers_[static_cast<std::size_t>(peer)];
    if (peer == rank() || !is_long(transfer)) continue;
    has_long_ = true;
    longest_ = std::max({longest_, transfer.out_nbytes, transfer.in_nbytes});
  }
}

bool ShmExchange::is_not_shared(const std::byte* data, std::size_t nbytes) {
  return (group_->peers->to_remote_address(data, nbytes) & LocalPeers::kSharedAddressBit) == 0;
}

std::vector<ShmExchange::Path> ShmExchange::candidate_paths() const {
  std::vector<Path> open;
  // By what is the same for all operations of this type, as PathTuner requires. A split pays only with a root, which is
  // idle while the others copy; otherwise every rank copies already.
  const bool via_cma = group_->peers->has_cma();
  if (via_cma) open.push_back(Path::single_copy);
  open.push_back(Path::copy_in_copy_out);
  if (via_cma && signature().root >= 0) open.push_back(Path::single_copy_split);
  if (StagedExchange::has_several_readers(signature().type, group_->region->size()))
    open.push_back(Path::copy_in_copy_out_nt);
  return open;
}

void ShmExchange::choose_path() {
  if (!can_stage_) return;
  bool any_private = false;
  for (int peer = 0; peer < size(); ++peer) {
    const PeerTransfer& transfer = transfers_[static_cast<std::size_t>(peer)];
    if (peer == rank() || !is_long(transfer)) continue;
    const bool goes_out = !is_inline(transfer.out_nbytes);
    any_private = any_private || (goes_out ? is_not_shared(transfer.out, transfer.out_nbytes)
                                           : is_not_shared(transfer.in, transfer.in_nbytes));
  }
  // Nothing to choose: blocks in shared memory are copied directly on every path.
  if (!any_private) return;
  if (rank() == 0) {
    const std::vector<Path> open = candidate_paths();
    start_.path = open.size() == 1 ? open.front() : group_->path_tuners[signature().type].choose(longest_, open);
  }
}

bool ShmExchange::needs_no_cma() {
  if (!can_stage_ || is_vector_variant_) return false;
  const bool is_expected = rank() != 0 || PathTuner::uses_stages(start_.path);
  return is_expected && group_->path_tuners[signature().type].needs_no_cma(longest_);
}

bool ShmExchange::hides_any() {
  const PeerTransfer *first = nullptr, *last = nullptr;  // usually the two ends of one array
  for (int peer = 0; peer < size(); ++peer) {
    const PeerTransfer& transfer = transfers_[static_cast<std::size_t>(peer)];
    if (peer == rank() || !is_long(transfer)) continue;
    if (first == nullptr) first = &transfer;
    last = &transfer;
  }
  std::array<std::span<const std::byte>, 4> buffers;
  std::size_t n = 0;
  const auto add = [&](const std::byte* data, std::size_t nbytes) {
    if (nbytes != 0 && is_not_shared(data, nbytes)) buffers[n++] = {data, nbytes};
  };
  for (const PeerTransfer* transfer : {first, last == first ? nullptr : last}) {
    if (transfer == nullptr) continue;
    add(transfer->out, transfer->out_nbytes);
    add(transfer->in, transfer->in_nbytes);
  }
  return n != 0 && (needs_no_cma() || group_->peers->hides(std::span(buffers).first(n)));
}

bool ShmExchange::any_hidden() {
  // Every rank posts this to all, so that all come to the same answer.
  bool any = start_.hidden;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    HeaderExchange::Bytes data = headers().data(sequence_, peer);
    any = take<Start>(peer, data).hidden || any;
  }
  return any;
}

void ShmExchange::post(std::uint64_t digest) {
  if (!has_long_ && !is_vector_variant_) return PairwiseExchange::post(digest);
  start_.start_time = last_start_ = WrappingTimestamp::now();
  choose_path();
  start_.hidden = hides_any();
  LocalPeers& host = *group_->peers;
  const auto n_ranks = static_cast<std::size_t>(size());
  std::vector<std::vector<std::byte>> blocks(n_ranks);
  std::vector<HeaderExchange::Bytes> parts(n_ranks);
  for (std::size_t peer = 0; peer < n_ranks; ++peer) {
    const PeerTransfer& transfer = transfers_[peer];
    std::vector<std::byte>& block = blocks[peer];
    start_.out = transfer.out_nbytes;
    start_.in = transfer.in_nbytes;
    append(block, start_);
    if (is_long(transfer)) {
      append(block, Addresses{host.to_remote_address(transfer.out, transfer.out_nbytes),
                              host.to_remote_address(transfer.in, transfer.in_nbytes)});
    }
    if (is_inline(transfer.out_nbytes)) block.insert(block.end(), transfer.out, transfer.out + transfer.out_nbytes);
    parts[peer] = block;
  }
  headers().post_per_peer(sequence_, digest, parts);
}

template <class T>
T ShmExchange::take(int peer, HeaderExchange::Bytes& data) {
  T value;
  if (data.size() < sizeof value) throw Error(str(describe(), ": rank ", peer, " runs another version of samestep"));
  std::memcpy(&value, data.data(), sizeof value);
  data = data.subspan(sizeof value);
  return value;
}

void ShmExchange::start_work() {
  if (has_long_ || is_vector_variant_) {
    if (rank() != 0) {
      HeaderExchange::Bytes data = headers().data(sequence_, 0);
      start_.path = take<Start>(0, data).path;
    }
    const bool hidden = any_hidden();
    via_cma_ = group_->peers->has_cma() && !hidden;
    chosen_ = start_.path;
    if (hidden && !PathTuner::uses_stages(start_.path)) start_.path = Path::copy_in_copy_out;
  }
  for (int step = 0; step < size(); ++step) {
    const int peer = (rank() + step) % size();
    match_peer(peer, transfers_[static_cast<std::size_t>(peer)]);
  }
}

void ShmExchange::match_peer(int peer, const PeerTransfer& transfer) {
  if (peer == rank()) return;  // see copy_local
  HeaderExchange::Bytes data = headers().data(sequence_, peer);
  if (has_long_ || is_vector_variant_) {
    const auto start = take<Start>(peer, data);
    last_start_ = last_start_.later(start.start_time);
    if (start.out != transfer.in_nbytes || start.in != transfer.out_nbytes) {
      mismatch_ = str(describe(), ": rank ", peer, " sends ", start.out, " bytes where this rank expects ",
                      transfer.in_nbytes, ", and expects ", start.in, " where this rank sends ", transfer.out_nbytes);
      // Thrown at the end and not here: other peers may be copying from and to this rank's buffers.
      transfers_[static_cast<std::size_t>(peer)] = {};  // neither rank waits for the other
      return;
    }
  }
  const Addresses theirs = is_long(transfer) ? take<Addresses>(peer, data) : Addresses{};
  LocalPeers& host = *group_->peers;
  if (is_inline(transfer.in_nbytes)) {
    if (data.size() != transfer.in_nbytes) throw_wrong_size(peer, data.size(), transfer.in_nbytes);
    kernels::copy(transfer.in, data.data(), data.size());
  } else {
    const std::uint64_t address = host.to_remote_address(transfer.in, transfer.in_nbytes);
    begin_transfer({peer, false, transfer.in, address, theirs.out, transfer.in_nbytes});
  }
  if (!is_inline(transfer.out_nbytes)) {
    auto* const out = const_cast<std::byte*>(transfer.out);
    begin_transfer({peer, true, out, host.to_remote_address(out, transfer.out_nbytes), theirs.in, transfer.out_nbytes});
  }
}

StagedExchange& ShmExchange::staged() {
  if (!staged_) {
    staged_.emplace(*group_, sequence_, signature().type, longest_, start_.path == Path::copy_in_copy_out_nt);
  }
  return *staged_;
}

void ShmExchange::begin_transfer(const End& end) {
  const bool shared = ((end.own_address | end.peer_address) & LocalPeers::kSharedAddressBit) != 0;
  if (can_stage_ && !shared) {
    group_->path_tuners[signature().type].record_choice(longest_, chosen_, start_.path);
    timed_ = rank() == 0;
  }
  if (shared || (via_cma_ && !PathTuner::uses_stages(start_.path))) return copy_single(end);
  if (can_stage_) {
    end.outgoing ? staged().send(end.peer, end.local) : staged().receive(end.peer, end.local);
    return;
  }
  const int tag = tags::of_operation(sequence_, 0);
  if (end.outgoing) {
    sends_.send(transport(), end.local, end.nbytes, end.peer, tag);
  } else {
    receives_[static_cast<std::size_t>(end.peer)].receive(transport(), end.local, end.nbytes, end.peer, tag);
  }
}

void ShmExchange::copy_single(const End& end) {
  // Without CMA a rank reaches only shared memory. If just one of the two arrays is shared, the rank of the other array
  // has to copy, whether it sends or receives.
  const bool i_can = via_cma_ || (end.peer_address & LocalPeers::kSharedAddressBit) != 0;
  const bool they_can = via_cma_ || (end.own_address & LocalPeers::kSharedAddressBit) != 0;
  if (!i_can) return;
  const SingleCopyExchange::Run run{end.peer, end.outgoing, end.local, end.peer_address, end.nbytes};
  if (!they_can) return single_copy_.copy(run);
  // The receiver copies. In a rooted collective root would be idle, so with `split` it does a fair share.
  const bool any_shared = ((end.own_address | end.peer_address) & LocalPeers::kSharedAddressBit) != 0;
  const auto n_ranks = static_cast<std::size_t>(size());
  const int root = signature().root;
  if (root < 0 || (start_.path != Path::single_copy_split && !any_shared)) {
    if (!end.outgoing) single_copy_.copy(run);
  } else if (root == rank()) {
    // Root copies one part in n of each of its n - 1 transfers, which together is as much as each other rank copies.
    single_copy_.copy_parts(run, n_ranks - 1, 1, n_ranks);
  } else {
    single_copy_.copy_parts(run, 0, n_ranks - 1, n_ranks);
  }
}

bool ShmExchange::peer_is_done(int peer) {
  if (peer == rank() || !is_long(transfers_[static_cast<std::size_t>(peer)])) return true;
  return group_->region->is_at(sequence_, peer, ShmRegion::kLastStep);
}

bool ShmExchange::work() {
  if (!has_long_) {
    copy_local();
    return end();
  }
  // The buffers of a rank that has left must not be accessed. The engine soon fails this operation.
  if (!group_->header_exchange->all_present(sequence_)) return false;
  if (!own_copies_done_) {
    const std::uint64_t before = steps();
    const bool done = single_copy_.work() && (!staged_ || staged_->work()) && PairwiseExchange::work();
    if (steps() != before) engine().note_progress();
    if (!done) return false;
    // The last step tells peers that this rank will not touch their buffers again.
    own_copies_done_ = true;
    // Before the local copy, for which no peer has to wait.
    group_->region->set_step(sequence_, rank(), ShmRegion::kLastStep);
    copy_local();
  }
  for (int peer = 0; peer < size(); ++peer) {
    // Peers may still read and write this rank's buffers, which belong to the caller afterwards.
    if (!peer_is_done(peer)) return false;
  }
  if (timed_) {
    group_->path_tuners[signature().type].record_time(longest_, start_.path,
                                                      WrappingTimestamp::now().since(last_start_));
  }
  return end();
}

void ShmExchange::copy_local() {
  const PeerTransfer& transfer = transfers_[static_cast<std::size_t>(rank())];
  if (transfer.in != transfer.out) kernels::copy_auto(transfer.in, transfer.out, transfer.in_nbytes, footprint_bytes_);
}

bool ShmExchange::end() {
  has_ended_ = true;
  if (!mismatch_.empty()) throw MismatchError(mismatch_);
  return true;
}

std::vector<int> ShmExchange::pending_peers() {
  std::vector<int> late;
  for (int peer = 0; peer < size(); ++peer) {
    if (!peer_is_done(peer)) late.push_back(peer);
  }
  return late;
}

void ShmExchange::abort() {
  PairwiseExchange::abort();
  if (is_mismatched() || has_ended_) return;
  for (int peer = 0; peer < size(); ++peer) {
    const PeerTransfer& transfer = transfers_[static_cast<std::size_t>(peer)];
    // The other end may copy into it until it notices.
    if (peer != rank() && is_long(transfer)) group_->fence->withdraw(transfer.in, transfer.in_nbytes);
  }
}

}  // namespace samestep
