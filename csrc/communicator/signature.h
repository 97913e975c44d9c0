#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace samestep {

/// One step of a digest. One-to-one in `h ^ word`: what differs in one word never shares a digest.
constexpr std::uint64_t mix(std::uint64_t h, std::uint64_t word) {
  h = (h ^ word) * 0x9e37'79b9'7f4a'7c15;  // 2^64 / golden ratio, odd
  return h ^ h >> 32;
}

enum class CollectiveType : std::uint8_t {
  allreduce,
  reduce,
  bcast,
  allgather,
  allgatherv,
  gather,
  gatherv,
  scatter,
  scatterv,
  reduce_scatter,
  alltoall,
  alltoallv,
  barrier,
  make_group,
  close,
};

constexpr bool reduces(CollectiveType type) {
  return type == CollectiveType::allreduce || type == CollectiveType::reduce || type == CollectiveType::reduce_scatter;
}
/// Whether it is a `v` variant, whose blocks may differ in length.
constexpr bool has_counts(CollectiveType type) {
  return type == CollectiveType::allgatherv || type == CollectiveType::gatherv || type == CollectiveType::scatterv ||
         type == CollectiveType::alltoallv;
}
constexpr bool has_root(CollectiveType type) {
  return type == CollectiveType::reduce || type == CollectiveType::bcast ||
         (type >= CollectiveType::gather && type <= CollectiveType::scatterv);
}

/// The names of operations in texts.
enum class Naming : std::uint8_t {
  samestep,  ///< "allreduce"
  torch,     ///< "all_reduce"
};

/// The public name of an operation, e.g. "allreduce".
std::string_view name(CollectiveType verb, Naming naming = Naming::samestep);

/// The extents of an array, as far as ranks must agree on them. Dimensions beyond `kMaxDims` are multiplied into the
/// last one, so that the number of elements stays right.
struct Shape {
  static constexpr int kMaxDims = 6;
  std::array<std::uint64_t, kMaxDims> extents{};
  std::uint8_t n_dims = 0;
  /// The axes in the order in which they lie, if elements are taken as they lie and that is not row-major: a leading 1,
  /// then a hexadecimal digit for each axis whose extent is not 1, the outermost first. Else 0, or `kListOfArrays`.
  std::uint64_t memory_order = 0;

  static Shape flat(std::uint64_t count) {
    Shape shape;
    shape.extents[0] = count;
    shape.n_dims = 1;
    return shape;
  }
  /// Of a call on a list of arrays. The extents are those of ListShape, in its order.
  static constexpr std::uint64_t kListOfArrays = ~std::uint64_t{0};
  bool operator==(const Shape&) const = default;
};

/// What ranks compare of a call on a list of arrays, instead of the shape of one array.
struct ListShape {
  std::uint64_t length = 0;  ///< arrays in the list
  std::uint64_t count = 0;   ///< elements in each
  std::uint64_t detail = 0;  ///< root's array; 0 without a root

  Shape shape() const { return {{length, count, detail}, 3, Shape::kListOfArrays}; }
};

/// What the ranks of a group must agree on for one operation. Every header holds the digest, so the comparison needs no
/// message of its own. Descriptions are exchanged only if digests differ.
struct Signature {
  CollectiveType type = CollectiveType::barrier;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;  ///< `sum` for operations that do not reduce
  std::int32_t root = -1;       ///< -1 for operations without one
  Shape shape = {};             ///< all zero if counts may differ between ranks

  /// A 64-bit hash. Different signatures have different digests in practice.
  std::uint64_t digest() const;

  /// For error texts, e.g. "allreduce of float32[2, 3] with op sum".
  std::string describe(Naming naming = Naming::samestep) const;
};

/// The digest of a signature with these fields.
std::uint64_t digest(CollectiveType verb, DType dtype, ReduceOp op, std::int32_t root, const Shape& shape);

/// What `mismatch_text` gets of this rank, as long as all ranks send: the user's call, if there is one, and the
/// operation. A long call is cut, since what differs may be in the second line alone.
using Description = std::array<char, 512>;
Description description(const std::string& call, const std::string& operation);

/// The text of the MismatchError of every rank, e.g. "allreduce (operation 12 of group 'world'): the ranks do not
/// agree. ranks 0, 2: allreduce of float32[2, 3] with op sum; rank 1: ...". Pure: equal inputs give equal texts on all
/// ranks. If a description has two lines, the first is the user's call and the second the operation inside it, which is
/// shown only if the first lines are equal.
std::string mismatch_text(const std::string& group, std::uint64_t sequence,
                          std::vector<std::string> description_of_rank);

}  // namespace samestep
