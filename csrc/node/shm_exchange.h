#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/pairwise_exchange.h"
#include "node/node_group.h"
#include "node/single_copy_exchange.h"
#include "node/staged_exchange.h"
#include "node/wrapping_timestamp.h"

namespace samestep {

/// A collective that only moves data between the ranks of a host. Short blocks travel with the headers. For a long
/// block both ends post their addresses, and then choose:
///   single copy: the receiver copies from one array into the other;
///   split:       in a rooted collective, root does a fair share of these copies;
///   staged:      see StagedExchange; only if neither end is in shared memory.
/// If neither end can access the other's memory and nothing can be staged, the block is sent as a message.
class ShmExchange final : public PairwiseExchange {
 public:
  ShmExchange(std::shared_ptr<ProgressEngine> engine, const Signature& signature, std::vector<PeerTransfer> transfers,
              std::shared_ptr<NodeGroup> group);

 protected:
  void post(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  bool holds_headers() const override { return has_long_; }
  std::vector<int> pending_peers() override;
  void abort() override;

 private:
  using Path = PathTuner::Path;

  /// Posted to each peer.
  struct Start {
    Path path;    // that of rank 0 is used
    bool hidden;  // CMA must not be used: see LocalPeers::hides, or this has not been checked
    WrappingTimestamp start_time;
    std::uint64_t out, in;  // bytes to send to the peer and to receive from it; in a `v` collective ranks may not agree
  };
  /// Posted to a peer for the long blocks between the two.
  struct Addresses {
    std::uint64_t out, in;  // see LocalPeers::to_remote_address; 0 if there is none
  };
  /// One end of a long block.
  struct End {
    int peer;
    bool outgoing;
    std::byte* local;
    std::uint64_t own_address, peer_address;
    std::size_t nbytes;
  };

  bool is_long(const PeerTransfer& transfer) {
    return !is_inline(transfer.out_nbytes) || !is_inline(transfer.in_nbytes);
  }
  bool is_not_shared(const std::byte* data, std::size_t nbytes);
  void choose_path();
  /// Whether CMA is not expected to be used; see PathTuner.
  bool needs_no_cma();
  /// Whether CMA cannot reach long blocks of this rank, or that has not been checked; see LocalPeers::hides.
  bool hides_any();
  /// Whether any rank has posted that.
  bool any_hidden();
  /// The possible paths of an operation whose blocks are not all in shared memory.
  std::vector<Path> candidate_paths() const;
  void match_peer(int peer, const PeerTransfer& transfer);
  /// Removes a value from the front of the data that a peer has posted.
  template <class T>
  T take(int peer, HeaderExchange::Bytes& data);
  /// Chooses the path of a long block, and starts it.
  void begin_transfer(const End& end);
  void copy_single(const End& end);
  StagedExchange& staged();
  /// Number of copies that this rank has made so far.
  std::uint64_t steps() const { return single_copy_.steps() + (staged_ ? staged_->steps() : 0); }
  /// Copies this rank's block to itself. Last, so that it does not evict from the cache what peers still copy.
  void copy_local();
  /// True; throws a mismatch that was found.
  bool end();
  bool peer_is_done(int peer);

  std::shared_ptr<NodeGroup> group_;
  bool has_long_ = false;
  std::size_t longest_ = 0;
  bool is_vector_variant_;
  bool can_stage_;
  std::size_t footprint_bytes_;  // bytes that all ranks together access, roughly
  Start start_{Path::single_copy_split, false, {}, 0, 0};
  Path chosen_ = Path::single_copy_split;  // by rank 0; another one may be used
  bool via_cma_ = false;                   // all ranks reach all blocks by CMA
  WrappingTimestamp last_start_;           // of all ranks, the latest
  std::string mismatch_;                   // with one peer; thrown when the other peers have their data
  SingleCopyExchange single_copy_;
  std::optional<StagedExchange> staged_;
  bool timed_ = false;
  bool own_copies_done_ = false;
  bool has_ended_ = false;
};

}  // namespace samestep
