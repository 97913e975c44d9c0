#include "device/nccl_calls.h"

#include <array>
#include <cstring>
#include <initializer_list>
#include <numeric>

#include "collectives/peer_transfer.h"
#include "core/error.h"
#include "kernels/half.h"
#include "nccl/nccl_reduction.h"

namespace samestep::nccl_calls {
namespace {

using Comm = NcclLibrary::Comm;
using Stream = NcclLibrary::Stream;

constexpr int kBytes = nccl_abi::kUint8;  // data that are only moved: NCCL lacks some of our dtypes

/// The calls of NCCL that `make_calls` makes are launched together, after all of them.
template <class MakeCalls>
void grouped(const NcclLibrary& nccl, MakeCalls make_calls) {
  nccl.group_start();
  try {
    make_calls();
  } catch (...) {
    nccl.group_end.code();  // its error would be a consequence
    throw;
  }
  nccl.group_end();
}

/// `factor` as an element of an NCCL type: NCCL reads it as one element of what it reduces.
std::array<std::byte, 8> element(double factor, int type) {
  std::array<std::byte, 8> bytes{};
  const auto store = [&bytes](const auto& value) { std::memcpy(bytes.data(), &value, sizeof value); };
  const auto single = static_cast<float>(factor);
  if (type == nccl_abi::kFloat64) {
    store(factor);
  } else if (type == nccl_abi::kFloat32) {
    store(single);
  } else if (type == nccl_abi::kFloat16) {
    store(kernels::float_to_float16(single));
  } else {
    store(kernels::float_to_bfloat16(single));
  }
  return bytes;
}

/// The operator of a reduction; one with a factor is destroyed with this object.
class Operator {
 public:
  Operator(const NcclLibrary& nccl, const NcclReduction& form, double factor, Comm comm)
      : nccl_(nccl), comm_(comm), made_(form.scaled), op_(form.op) {
    if (made_) {
      nccl.make_scaled_sum(&op_, element(factor, form.type).data(), form.type, nccl_abi::kScalarOnHost, comm);
    }
  }
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;
  ~Operator() {
    if (made_) nccl_.destroy_op(op_, comm_);
  }
  int get() const { return op_; }

 private:
  const NcclLibrary& nccl_;
  Comm comm_;
  bool made_;
  int op_;
};

/// Enqueues `count` elements of NCCL's in one piece, or in two if one rank alone multiplies by a factor. NCCL's kernel
/// for that has a block for each 16 KiB, at most 32. Each takes count / blocks elements, rounded down and then up to 16
/// bytes. If that is a multiple of 16 bytes with a remainder, the last elements stay as they were (NCCL 2.28.9,
/// src/device/onerank.cu). The first piece has no remainder, and the second has one block.
template <class Enqueue>
void in_pieces(const NcclReduction& form, const void* in, void* out, std::size_t count, const Enqueue& enqueue) {
  constexpr std::size_t kBlock = std::size_t{16} << 10, kMostBlocks = 32, kPack = 16;
  std::size_t first = 0;
  if (form.alone && form.scaled) {
    const std::size_t nbytes = count * form.item;
    const std::size_t multiple = nbytes < kMostBlocks * kBlock ? kBlock : kMostBlocks * kPack;
    first = nbytes / multiple * multiple / form.item;
  }
  if (first != 0) enqueue(in, out, first);
  if (first == count && count != 0) return;
  const std::size_t done = first * form.item;
  enqueue(static_cast<const std::byte*>(in) + done, static_cast<std::byte*>(out) + done, count - first);
}

enum class Kind : std::uint8_t { broadcasts = 1, all_gather, messages, reductions };  // those of each type follow

/// `NcclCalls::connections` of these numbers.
std::uint64_t digest_of(std::initializer_list<std::uint64_t> numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), std::uint64_t{0}, mix);
}

/// A reduction of each of `buffers`. `call`: that of NCCL.
template <class Call>
NcclCalls reductions(const NcclLibrary& nccl, const CollectiveArgs& args, int size, std::vector<InOut> buffers,
                     Call call) {
  const NcclReduction form = to_nccl_reduction(buffers[0].in.dtype, args.reduction, size).value();
  const auto count_of = [form, scatters = args.type == CollectiveType::reduce_scatter](const InOut& buffer) {
    return (scatters ? buffer.out.count : buffer.in.count) * form.per_element;
  };
  // NCCL selects the algorithm by the type, the operator, of which a sum with a factor is one, and the lengths, all as
  // NCCL is called with them: of complex numbers that is twice their number.
  const auto kind = static_cast<std::uint64_t>(Kind::reductions) + static_cast<std::uint64_t>(args.type);
  std::uint64_t digest = digest_of({kind, static_cast<std::uint64_t>(form.type), static_cast<std::uint64_t>(form.op),
                                    form.scaled ? std::uint64_t{1} : 0});
  for (const InOut& buffer : buffers) digest = mix(digest, count_of(buffer));
  auto enqueue = [&nccl, form, factor = args.reduction.factor, buffers = std::move(buffers), count_of, call](
                     Comm comm, Stream stream) {
    const Operator op(nccl, form, factor, comm);
    const auto one = [&](const void* from, void* to, std::size_t count) {
      call(from, to, count, form.type, op.get(), comm, stream);
    };
    grouped(nccl, [&] {
      for (const InOut& each : buffers) in_pieces(form, each.in.data, each.out.data, count_of(each), one);
    });
  };
  return {std::move(enqueue), digest};
}

struct Broadcast {
  const void* from;  // at root
  void* to;
  std::size_t nbytes;
  int root;
};

/// All ranks have the same ones, so all of them leave out the same empty ones. NCCL has the ring only for them.
NcclCalls broadcasts(const NcclLibrary& nccl, std::vector<Broadcast> all) {
  auto enqueue = [&nccl, all = std::move(all)](Comm comm, Stream stream) {
    grouped(nccl, [&] {
      for (const auto& [from, to, nbytes, root] : all) {
        if (nbytes != 0) nccl.broadcast(from, to, nbytes, kBytes, root, comm, stream);
      }
    });
  };
  return {std::move(enqueue), static_cast<std::uint64_t>(Kind::broadcasts)};
}

/// One broadcast from each rank.
NcclCalls all_gather_v(const NcclLibrary& nccl, const CollectiveArgs& args, int rank) {
  std::vector<Broadcast> all;
  auto* to = static_cast<std::byte*>(args.out.data);
  for (const std::uint64_t count : args.counts) {
    const int root = static_cast<int>(all.size());
    const std::size_t nbytes = count * itemsize(args.out.dtype);
    all.push_back({root == rank ? args.in.data : to, to, nbytes, root});
    to += nbytes;
  }
  return broadcasts(nccl, std::move(all));
}

NcclCalls all_gather(const NcclLibrary& nccl, const ConstBuffer& in, const Buffer& out) {
  const auto enqueue = [&nccl, in, out](Comm comm, Stream stream) {
    nccl.all_gather(in.data, out.data, in.nbytes(), kBytes, comm, stream);
  };
  return {enqueue, digest_of({static_cast<std::uint64_t>(Kind::all_gather), in.nbytes()})};
}

/// What NCCL lacks, made of its sends and receives. What a rank sends itself may be in its place already.
NcclCalls messages(const NcclLibrary& nccl, const CollectiveArgs& args, int rank, int size) {
  std::vector<PeerTransfer> transfers(static_cast<std::size_t>(size));
  plan_transfers(args, rank, transfers);
  // The ranks they connect do not depend on their lengths.
  std::uint64_t peers = digest_of({static_cast<std::uint64_t>(Kind::messages)});
  for (const PeerTransfer& to : transfers) {
    peers = mix(peers, (to.out_nbytes != 0 ? 1U : 0U) + (to.in_nbytes != 0 ? 2U : 0U));
  }
  auto enqueue = [&nccl, rank, transfers = std::move(transfers)](Comm comm, Stream stream) {
    grouped(nccl, [&] {
      int peer = 0;
      for (const auto& [out, out_nbytes, in, in_nbytes] : transfers) {
        const bool in_place = peer == rank && out == in;
        if (out_nbytes != 0 && !in_place) nccl.send(out, out_nbytes, kBytes, peer, comm, stream);
        if (in_nbytes != 0 && !in_place) nccl.recv(in, in_nbytes, kBytes, peer, comm, stream);
        ++peer;
      }
    });
  };
  return {std::move(enqueue), peers};
}

}  // namespace

NcclCalls of(const NcclLibrary& nccl, const CollectiveArgs& args, int rank, int size) {
  switch (args.type) {
    case CollectiveType::reduce:
      return reductions(
          nccl, args, size, {{args.in, args.out}},
          [&nccl, root = args.root](const void* from, void* to, std::size_t count, int type, int op, Comm comm,
                                    Stream stream) { nccl.reduce(from, to, count, type, op, root, comm, stream); });
    case CollectiveType::reduce_scatter:
      return reductions(nccl, args, size, {{args.in, args.out}}, std::cref(nccl.reduce_scatter));
    case CollectiveType::allreduce:
    case CollectiveType::bcast:
      return of_many(nccl, args, {{args.in, args.out}}, size);
    case CollectiveType::allgather:
      return all_gather(nccl, args.in, args.out);
    case CollectiveType::allgatherv:
      return all_gather_v(nccl, args, rank);
    default:
      return messages(nccl, args, rank, size);
  }
}

NcclCalls of_many(const NcclLibrary& nccl, const CollectiveArgs& args, std::vector<InOut> buffers, int size) {
  if (reduces(args.type)) return reductions(nccl, args, size, std::move(buffers), std::cref(nccl.all_reduce));
  std::vector<Broadcast> all;
  for (const InOut& each : buffers) all.push_back({each.out.data, each.out.data, each.out.nbytes(), args.root});
  return broadcasts(nccl, std::move(all));
}

}  // namespace samestep::nccl_calls
