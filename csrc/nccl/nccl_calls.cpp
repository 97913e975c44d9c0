#include "nccl/nccl_calls.h"

#include <array>
#include <cstring>

#include "core/error.h"
#include "kernels/half.h"

namespace samestep::nccl_calls {
namespace {

using Comm = NcclLibrary::Comm;
using Stream = NcclLibrary::Stream;

constexpr int kBytes = nccl_abi::kUint8;

/// An NCCL group: the calls between construction and `end` are launched together. May be nested; the outermost group
/// launches.
class Group {
 public:
  explicit Group(const NcclLibrary& nccl) : nccl_(nccl) { nccl_.group_start(); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  void end() {
    ended_ = true;
    nccl_.group_end();
  }
  ~Group() {
    if (ended_) return;
    try {
      nccl_.group_end();
    } catch (const Error&) {  // another exception is being thrown
    }
  }

 private:
  const NcclLibrary& nccl_;
  bool ended_ = false;
};

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

enum class Kind : std::uint64_t { all_reduce = 1, reduce, reduce_scatter, broadcast, all_gather, messages };

/// NCCL selects the algorithm by the type, the operator, of which a sum with a factor is one, and the lengths, all as
/// NCCL is called with them: of complex numbers that is twice their number. `counts`: in our elements.
template <class Counts>
std::uint64_t connections_of(Kind kind, const NcclReduction& form, const Counts& counts) {
  Digest digest;
  digest.add(static_cast<std::uint64_t>(kind));
  digest.add(static_cast<std::uint64_t>(form.type));
  digest.add(static_cast<std::uint64_t>(form.op));
  digest.add(form.scaled ? 1 : 0);
  for (const std::uint64_t count : counts) digest.add(count * form.per_element);
  return digest.value();
}

}  // namespace

std::uint64_t connections_of_broadcasts() { return static_cast<std::uint64_t>(Kind::broadcast); }

Calls all_reduce(const NcclLibrary& nccl, const NcclReduction& form, const Reduction& reduction,
                 std::vector<InOut> buffers) {
  std::vector<std::uint64_t> counts;
  for (const InOut& buffer : buffers) counts.push_back(buffer.in.count);
  auto enqueue = [&nccl, form, factor = reduction.factor, buffers = std::move(buffers)](Comm comm, Stream stream) {
    const Operator op(nccl, form, factor, comm);
    Group group(nccl);
    for (const auto& [in, out] : buffers) {
      const auto one = [&](const void* from, void* to, std::size_t count) {
        nccl.all_reduce(from, to, count, form.type, op.get(), comm, stream);
      };
      in_pieces(form, in.data, out.data, in.count * form.per_element, one);
    }
    group.end();
  };
  return {std::move(enqueue), connections_of(Kind::all_reduce, form, counts)};
}

Calls reduce(const NcclLibrary& nccl, const NcclReduction& form, const Reduction& reduction, ConstBuffer in, Buffer out,
             int root) {
  const auto enqueue = [&nccl, form, factor = reduction.factor, in, out, root](Comm comm, Stream stream) {
    const Operator op(nccl, form, factor, comm);
    in_pieces(form, in.data, out.data, in.count * form.per_element, [&](const void* from, void* to, std::size_t count) {
      nccl.reduce(from, to, count, form.type, op.get(), root, comm, stream);
    });
  };
  return {enqueue, connections_of(Kind::reduce, form, std::array{std::uint64_t{in.count}})};
}

Calls reduce_scatter(const NcclLibrary& nccl, const NcclReduction& form, const Reduction& reduction, ConstBuffer in,
                     Buffer out) {
  const auto enqueue = [&nccl, form, factor = reduction.factor, in, out](Comm comm, Stream stream) {
    const Operator op(nccl, form, factor, comm);
    in_pieces(form, in.data, out.data, out.count * form.per_element,
              [&](const void* from, void* to, std::size_t count) {
                nccl.reduce_scatter(from, to, count, form.type, op.get(), comm, stream);
              });
  };
  return {enqueue, connections_of(Kind::reduce_scatter, form, std::array{std::uint64_t{out.count}})};
}

Calls broadcast(const NcclLibrary& nccl, std::vector<InOut> buffers, int root) {
  auto enqueue = [&nccl, buffers = std::move(buffers), root](Comm comm, Stream stream) {
    Group group(nccl);
    for (const auto& [in, buffer] : buffers) {
      // Elements that are only moved are bytes to NCCL, which lacks some of our dtypes.
      nccl.broadcast(buffer.data, buffer.data, buffer.nbytes(), kBytes, root, comm, stream);
    }
    group.end();
  };
  return {std::move(enqueue), connections_of_broadcasts()};
}

Calls all_gather(const NcclLibrary& nccl, ConstBuffer in, Buffer out) {
  const auto enqueue = [&nccl, in, out](Comm comm, Stream stream) {
    nccl.all_gather(in.data, out.data, in.nbytes(), kBytes, comm, stream);
  };
  return {enqueue, connections_of(Kind::all_gather, {kBytes, 1, 0, false}, std::array{std::uint64_t{in.nbytes()}})};
}

Calls all_gather_v(const NcclLibrary& nccl, int rank, ConstBuffer in, Buffer out, std::vector<std::uint64_t> counts) {
  auto enqueue = [&nccl, rank, in, out, counts = std::move(counts)](Comm comm, Stream stream) {
    Group group(nccl);
    auto* to = static_cast<std::byte*>(out.data);
    for (int root = 0; root < static_cast<int>(counts.size()); ++root) {
      const std::size_t nbytes = counts[static_cast<std::size_t>(root)] * itemsize(out.dtype);
      // All ranks have the same counts, so all of them leave out the same broadcasts.
      if (nbytes != 0) nccl.broadcast(root == rank ? in.data : to, to, nbytes, kBytes, root, comm, stream);
      to += nbytes;
    }
    group.end();
  };
  return {std::move(enqueue), connections_of_broadcasts()};
}

Calls messages(const NcclLibrary& nccl, int rank, ConstBuffer in, std::vector<std::uint64_t> sent, Buffer out,
               std::vector<std::uint64_t> received) {
  Digest peers;  // the ranks they connect do not depend on their lengths
  peers.add(static_cast<std::uint64_t>(Kind::messages));
  for (std::size_t peer = 0; peer < sent.size(); ++peer) {
    peers.add((sent[peer] != 0 ? 1U : 0U) + (received[peer] != 0 ? 2U : 0U));
  }
  auto enqueue = [&nccl, rank, in, sent = std::move(sent), out, received = std::move(received)](Comm comm,
                                                                                                Stream stream) {
    Group group(nccl);
    const auto* from = static_cast<const std::byte*>(in.data);
    auto* to = static_cast<std::byte*>(out.data);
    for (int peer = 0; peer < static_cast<int>(sent.size()); ++peer) {
      const auto at = static_cast<std::size_t>(peer);
      const std::size_t out_nbytes = sent[at] * itemsize(in.dtype), in_nbytes = received[at] * itemsize(out.dtype);
      const bool in_place = peer == rank && from == to;
      if (out_nbytes != 0 && !in_place) nccl.send(from, out_nbytes, kBytes, peer, comm, stream);
      if (in_nbytes != 0 && !in_place) nccl.recv(to, in_nbytes, kBytes, peer, comm, stream);
      from += out_nbytes;
      to += in_nbytes;
    }
    group.end();
  };
  return {std::move(enqueue), peers.value()};
}

}  // namespace samestep::nccl_calls
