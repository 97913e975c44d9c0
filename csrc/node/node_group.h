#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "kernels/reduce.h"
#include "node/path_tuner.h"
#include "shm/local_peers.h"
#include "shm/shm_header_exchange.h"
#include "shm/shm_region.h"
#include "shm/shm_transport.h"
#include "shm/write_fence.h"
#include "transport/group_numbers.h"

namespace samestep {

/// What the operations of a group of ranks of one host share.
struct NodeGroup {
  std::shared_ptr<ShmRegion> region;
  std::shared_ptr<LocalPeers> peers;
  std::shared_ptr<WriteFence> fence;
  std::vector<int> members;  ///< by rank of the group: the rank on the host
  int rank = 0;
  GroupNumbers numbers;                        ///< of the groups made from this one
  GroupNumbers beside{GroupNumbers::kBeside};  ///< of those opened beside it
  ShmHeaderExchange* header_exchange = nullptr;
  ShmTransport* transport = nullptr;

  /// The values of the region's shared counters, by slot, after all earlier operations. The same on all ranks.
  std::array<std::uint64_t, ShmRegion::kSlots> next_chunk{};
  std::array<std::uint64_t, ShmRegion::kSlots> finished{};
  std::map<CollectiveType, PathTuner> path_tuners;

  // Scratch memory of one step, kept for the next:
  std::vector<std::byte> bounce;       ///< elements read from other ranks by CMA
  std::vector<kernels::Input> inputs;  ///< of a chunk
  std::vector<void*> outs;             ///< of a chunk
  std::vector<int> written_peers;      ///< ranks to which a chunk's result is written by CMA

  int member(int of_group) const { return members[static_cast<std::size_t>(of_group)]; }
};

/// Thrown where a rank's memory can no longer be reached. The cause may be yet another rank, so the operation waits
/// until the engine knows which rank left first.
struct PeerMemoryLost {};

/// Sizes, in bytes, at which an allreduce changes its path; measured. The same on all ranks.
struct Thresholds {
  /// From here on ranks post the addresses of their buffers,
  static constexpr std::size_t kDescriptorMin = 8 << 10;
  /// and from here on buffers in shared memory are reduced in place.
  static constexpr std::size_t in_place_min(bool oversubscribed) { return oversubscribed ? 20 << 10 : kDescriptorMin; }
  /// Up to here every rank reads the elements of all others and reduces them itself.
  static constexpr std::size_t one_shot_max(int size) {
    return (64 << 10) / static_cast<std::size_t>(std::max(size, 4));
  }
  /// With more ranks each has too small a part of a stage; they use it only if CMA is not available.
  static constexpr int kMaxStagedRanks = 128;
  /// The part of a buffer that a rank reduces at a time.
  static constexpr std::size_t kChunkBytes = 128 << 10;
};

}  // namespace samestep
