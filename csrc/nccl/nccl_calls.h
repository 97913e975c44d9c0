#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/buffer.h"
#include "core/reduce_op.h"
#include "nccl/nccl_library.h"
#include "nccl/nccl_reduction.h"

/// Collectives as NCCL calls in a stream. Arguments have been checked.
namespace samestep::nccl_calls {

/// `enqueue` makes the calls. Calls of equal `connections` need the same connections between ranks, which NCCL makes
/// when it first needs them.
struct Calls {
  std::function<void(NcclLibrary::Comm, NcclLibrary::Stream)> enqueue;
  std::uint64_t connections = 0;
};

/// Makes `Calls::connections` of several numbers.
class Digest {
 public:
  void add(std::uint64_t value) {
    value_ = (value_ ^ value) * 0x9e3779b97f4a7c15U;
    value_ ^= value_ >> 29;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0;
};

/// All buffers have one dtype and form one group.
Calls all_reduce(const NcclLibrary& nccl, const NcclReduction& form, const Reduction& reduction,
                 std::vector<InOut> buffers);
Calls reduce(const NcclLibrary& nccl, const NcclReduction& form, const Reduction& reduction, ConstBuffer in, Buffer out,
             int root);
Calls reduce_scatter(const NcclLibrary& nccl, const NcclReduction& form, const Reduction& reduction, ConstBuffer in,
                     Buffer out);
/// `Calls::connections` of broadcasts, for which NCCL has the ring only.
std::uint64_t connections_of_broadcasts();
// Data that are only moved are sent as bytes.
Calls broadcast(const NcclLibrary& nccl, std::vector<InOut> buffers, int root);  // `out` of each
Calls all_gather(const NcclLibrary& nccl, ConstBuffer in, Buffer out);
/// One broadcast from each rank.
Calls all_gather_v(const NcclLibrary& nccl, int rank, ConstBuffer in, Buffer out, std::vector<std::uint64_t> counts);
/// `sent[r]` elements of `in` to rank r, `received[r]` elements of `out` from it, in order of rank. What `rank` sends
/// itself may be in its place already.
Calls messages(const NcclLibrary& nccl, int rank, ConstBuffer in, std::vector<std::uint64_t> sent, Buffer out,
               std::vector<std::uint64_t> received);

}  // namespace samestep::nccl_calls
