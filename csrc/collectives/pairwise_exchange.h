#pragma once

#include <vector>

#include "collectives/peer_transfer.h"
#include "engine/operation.h"

namespace samestep {

/// A collective that only moves data: every pair of ranks exchanges at most one block of bytes in each direction. Short
/// blocks travel with the headers, long ones in messages of their own.
class PairwiseExchange : public Collective {
 public:
  /// `transfers`: by rank.
  PairwiseExchange(std::shared_ptr<ProgressEngine> engine, const Signature& signature,
                   std::vector<PeerTransfer> transfers)
      : Collective(std::move(engine), signature), transfers_(std::move(transfers)), receives_(transfers_.size()) {}

  /// Blocks of up to so many bytes travel with the headers.
  static std::size_t max_inline_bytes(ProgressEngine& engine, CollectiveType verb);

 protected:
  void post(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  std::vector<int> pending_peers() override;
  void abort() override;

  bool is_inline(std::size_t nbytes) { return nbytes <= max_inline_bytes(engine(), signature().type); }
  [[noreturn]] void throw_wrong_size(int peer, std::size_t sent, std::size_t expected) const;

  static constexpr std::size_t kDescriptorSpace = 64;  // bytes behind a header that ShmExchange uses for addresses
  static std::size_t without_descriptor_space(std::size_t nbytes) {
    return nbytes > kDescriptorSpace ? nbytes - kDescriptorSpace : 0;
  }

  std::vector<PeerTransfer> transfers_;
  std::vector<RequestSet> receives_;  // by rank
  RequestSet sends_;
};

}  // namespace samestep
