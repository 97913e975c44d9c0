#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "communicator/communicator.h"

namespace samestep {

/// Blocking collectives over many buffers in few messages: small buffers are packed into one message, large ones are
/// not copied. The caller has checked that number, counts and dtypes of the buffers agree on all ranks. All are
/// contiguous host memory, and no two overlap.
///
/// Thread-safe: calls from several threads run one at a time, since they pack into the same memory.
class FusedCollectives {
 public:
  static constexpr std::size_t kMinUnpackedBytes = 512 << 10;  ///< a copy of more bytes costs more than a message

  explicit FusedCollectives(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)), peer_memory_(communicator_->peer_memory()) {}

  /// Copies root's buffers to all ranks.
  void bcast(std::span<const Buffer> buffers, int root, const Deadline& deadline);

  /// Stores the reduction of each buffer of `in` over all ranks into the buffer of `out` with the same index. The two
  /// are the same memory, or overlap no other buffer.
  void allreduce(std::span<const ConstBuffer> in, std::span<const Buffer> out, const Reduction& reduction,
                 const Deadline& deadline);
  /// The same in place.
  void allreduce(std::span<const Buffer> buffers, const Reduction& reduction, const Deadline& deadline) {
    allreduce(std::vector<ConstBuffer>(buffers.begin(), buffers.end()), buffers, reduction, deadline);
  }

  /// Stores the reduction over all buffers of all ranks into each of them. They are alike, and of a type that holds
  /// partial results without loss. Ranks compare what those compare that combine their buffers otherwise.
  void allreduce_list(std::span<const Buffer> buffers, const Reduction& reduction, const Deadline& deadline);

  /// A blocking collective. A timeout ends the group, because the caller may free its buffers afterwards.
  void run(const CollectiveArgs& call, const Deadline& deadline);

 private:
  /// Between its construction and its end no other thread is in a call. Throws TimeoutError at the deadline.
  class Turn {
   public:
    Turn(FusedCollectives& owner, const Deadline& deadline);
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn();

   private:
    FusedCollectives& owner_;
  };

  static constexpr std::size_t kPipelineDepth = 6;  // segments of a double-buffered broadcast, each of:
  static constexpr std::size_t kMinPipelineBytes = 64 << 10, kMaxPipelineBytes = 512 << 10;
  static constexpr std::size_t kMaxPackedBytes = 1 << 20;  // in one message of small buffers

  /// Packs nothing: receivers read root's buffers, and root writes its share into theirs.
  void bcast_unpacked(std::span<const Buffer> buffers, int root, const Deadline& deadline);
  void bcast_in_place(std::span<const Buffer> buffers, int root, const Deadline& deadline);
  /// Root packs a segment while the other ranks read the previous one. Packs nothing if root's memory is not shared.
  void bcast_double_buffered(std::span<const Buffer> buffers, int root, const Deadline& deadline);
  void bcast_packed(std::span<const Buffer> buffers, int root, const Deadline& deadline);
  void allreduce_packed(std::span<const ConstBuffer> in, std::span<const Buffer> out, const Reduction& reduction,
                        const Deadline& deadline);
  [[noreturn]] void throw_peer_lost(int peer, const Deadline& deadline);
  std::byte* memory();
  /// Memory of this call, shared if possible.
  std::shared_ptr<std::byte> allocate(std::size_t nbytes);

  std::shared_ptr<Communicator> communicator_;
  PeerMemory* peer_memory_;            // of the communicator; may be null
  std::shared_ptr<std::byte> memory_;  // kMaxPackedBytes
  std::mutex mutex_;                   // of `is_taken_`; held for moments only
  std::condition_variable freed_;
  bool is_taken_ = false;  // a Turn exists
};

}  // namespace samestep
