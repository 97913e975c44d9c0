#pragma once

#include <functional>
#include <memory>

#include "communicator/communicator.h"
#include "nccl/nccl_library.h"

namespace samestep {

/// The address that the ranks of an NCCL clique meet at: rank 0 makes it and sends it to the others.
class NcclAddress {
 public:
  /// A deadline that may be put off while something waits for it.
  using Until = std::function<Deadline()>;

  /// Starts the exchange among the ranks of `group`.
  NcclAddress(const NcclLibrary& nccl, Communicator& group);
  NcclAddress(const NcclAddress&) = delete;
  NcclAddress& operator=(const NcclAddress&) = delete;
  ~NcclAddress();

  /// Waits for it. Throws the error of the exchange, TimeoutError, and Error with rank 0's text if NCCL gave none.
  /// About every millisecond it calls `look`, which may throw.
  nccl_abi::UniqueId wait(const Until& until, const std::function<void()>& look) const;

 private:
  struct Invitation;

  std::unique_ptr<Invitation> invitation_;
  Communicator::WorkPtr exchange_;
};

}  // namespace samestep
