#pragma once

#include <array>
#include <memory>

#include "engine/header_exchange.h"
#include "shm/shm_region.h"

namespace samestep {

/// A header exchange in shared memory: each rank stores its header into a slot, and all others read it. Up to 64 bytes
/// of data are in the slot itself, more in a block of the rank; peers read them in place.
class ShmHeaderExchange final : public HeaderExchange {
 public:
  ShmHeaderExchange(std::shared_ptr<ShmRegion> region, int rank);

  bool can_post(std::uint64_t sequence) override;
  void post(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) override;
  void post_per_peer(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes> parts, Bytes prefix) override;
  bool complete(std::uint64_t sequence) override;
  Header header(std::uint64_t sequence, int peer) const override;
  Bytes data(std::uint64_t sequence, int peer) const override;
  void release(std::uint64_t sequence) override;
  std::vector<int> missing(std::uint64_t sequence) override;
  void abandon() override {}
  void leave(std::uint64_t first_absent, const Departure& why) override;

  /// Whether all ranks still take part in this operation.
  bool all_present(std::uint64_t sequence) const;

  /// The CPU that this rank posts with its headers, so that a waiting rank on the same CPU yields to it; -1 if unknown.
  void set_cpu(int cpu) { cpu_ = static_cast<std::uint64_t>(cpu + 1); }
  /// Whether a rank that has not posted this operation may need the CPU of this rank.
  bool shares_cpu_with_missing(std::uint64_t sequence) const;

  /// Whether this rank has released all operations before this one.
  bool is_next(std::uint64_t sequence) const { return released_ == sequence; }

 private:
  void refresh_min_released();
  std::byte* take_block(std::uint64_t sequence, std::size_t nbytes);
  void publish_header(std::uint64_t sequence, std::uint64_t digest, std::size_t nbytes, ShmRegion::Payload where);

  std::shared_ptr<ShmRegion> region_;
  int rank_;
  int size_;
  std::uint64_t posted_ = 0;           // number of operations posted by this rank
  std::uint64_t released_ = 0;         // number of operations released by this rank
  std::uint64_t min_released_ = 0;     // lower bound of the operations released by every rank
  const std::uint64_t refresh_after_;  // age in operations at which a waiting rank refreshes that bound
  std::uint64_t n_blocks_ = 0;         // number of blocks used so far
  std::array<std::uint64_t, ShmRegion::kBlocks> block_users_{};  // the operation that used each block last, plus one
  std::uint64_t cpu_ = 0;                                        // plus one
  std::size_t expected_in_block_ = 0;  // bytes in a block that the next operation will probably post
  int next_peer_ = 1;                  // of operation `released_`: the peers rank+1 .. rank+next_peer_-1 have posted
};

}  // namespace samestep
