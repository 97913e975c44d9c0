#include "nccl/packed_calls.h"

#include <functional>

namespace samestep::nccl_calls {
namespace {

using Comm = NcclLibrary::Comm;
using Stream = NcclLibrary::Stream;

/// What all calls of one operation share.
struct Shared {
  std::vector<InOut> buffers;
  Packing packing;
  bool packs, unpacks;

  void pack(const PackedRound& round, Stream stream) const {
    if (!packs) return;
    std::vector<PackedLeaf> leaves;
    for (const std::size_t i : round.leaves) {
      const ConstBuffer& in = buffers[i].in;
      leaves.push_back({const_cast<void*>(in.data), in.nbytes()});  // only read
    }
    packing.packer->pack(leaves, round.starts, packing.bucket.get(), stream);
  }
  void unpack(const PackedRound& round, Stream stream) const {
    if (!unpacks) return;
    std::vector<PackedLeaf> leaves;
    for (const std::size_t i : round.leaves) leaves.push_back({buffers[i].out.data, buffers[i].out.nbytes()});
    packing.packer->unpack(leaves, round.starts, packing.bucket.get(), stream);
  }
  std::vector<InOut> apart() const {
    std::vector<bool> in_bucket(buffers.size(), false);
    for (const PackedRound& round : packing.rounds) {
      for (const std::size_t i : round.leaves) in_bucket[i] = true;
    }
    std::vector<InOut> rest;
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      if (!in_bucket[i]) rest.push_back(buffers[i]);
    }
    return rest;
  }
};

/// `moved`: the calls of NCCL for some buffers. The bucket of a round is one of them, with the type `as`.
std::vector<Calls> in_rounds(std::shared_ptr<const Shared> shared, DType as,
                             const std::function<Calls(std::vector<InOut>)>& moved) {
  std::vector<Calls> steps;
  const std::vector<PackedRound>& rounds = shared->packing.rounds;
  for (std::size_t r = 0; r < rounds.size(); ++r) {
    std::vector<InOut> buffers;
    if (r == 0) buffers = shared->apart();
    const Buffer bucket{shared->packing.bucket.get(), rounds[r].nbytes / itemsize(as), as};
    buffers.push_back({bucket, bucket});
    steps.push_back([shared, r, calls = moved(std::move(buffers))](Comm comm, Stream stream) {
      if (r > 0) shared->unpack(shared->packing.rounds[r - 1], stream);
      shared->pack(shared->packing.rounds[r], stream);
      calls(comm, stream);
    });
  }
  steps.push_back([shared](Comm, Stream stream) { shared->unpack(shared->packing.rounds.back(), stream); });
  return steps;
}

}  // namespace

std::vector<Calls> packed_all_reduce(const NcclLibrary& nccl, const NcclForm& form, const Reduction& reduction,
                                     std::vector<InOut> buffers, Packing packing) {
  const DType dtype = buffers.front().out.dtype;
  auto shared = std::make_shared<const Shared>(Shared{std::move(buffers), std::move(packing), true, true});
  return in_rounds(std::move(shared), dtype,
                   [&](std::vector<InOut> some) { return all_reduce(nccl, form, reduction, std::move(some)); });
}

std::vector<Calls> packed_broadcast(const NcclLibrary& nccl, std::vector<Buffer> buffers, int root, bool sends,
                                    Packing packing) {
  std::vector<InOut> pairs;
  for (const Buffer& buffer : buffers) pairs.push_back({buffer, buffer});
  auto shared = std::make_shared<const Shared>(Shared{std::move(pairs), std::move(packing), sends, !sends});
  return in_rounds(std::move(shared), DType::uint8, [&](const std::vector<InOut>& some) {
    std::vector<Buffer> outs;
    for (const InOut& pair : some) outs.push_back(pair.out);
    return broadcast(nccl, std::move(outs), root);
  });
}

}  // namespace samestep::nccl_calls
