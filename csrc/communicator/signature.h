#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/reduce_op.h"

namespace samestep {

enum class Verb : std::uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  all_gather_v,
  gather,
  gather_v,
  scatter,
  scatter_v,
  reduce_scatter,
  all_to_all,
  all_to_all_v,
  barrier,
  make_group,
  close,
};

/// The name a user knows the verb by, e.g. "allreduce".
std::string_view name(Verb verb);

/// The extents of an array, as far as ranks must agree on them. More than `kMaxDims` dimensions
/// are folded into the last one, so that the count stays right.
struct Shape {
  static constexpr int kMaxDims = 6;
  std::array<std::uint64_t, kMaxDims> extents{};
  std::uint8_t n_dims = 0;

  static Shape flat(std::uint64_t count) {
    Shape shape;
    shape.extents[0] = count;
    shape.n_dims = 1;
    return shape;
  }
  bool operator==(const Shape&) const = default;
};

/// What the ranks of a group must agree on for one operation. Engines compare digests with every
/// operation, which costs them nothing extra, and exchange descriptions only after a difference.
struct Signature {
  Verb verb = Verb::barrier;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;  ///< `sum` for verbs that do not reduce
  std::int32_t root = -1;       ///< -1 for verbs without one
  Shape shape = {};             ///< all zero where counts may differ between ranks

  /// 64 bits that differ for any two signatures one meets in practice (a mixing hash).
  std::uint64_t digest() const;

  /// For error texts, e.g. "allreduce of float32[2, 3] with op sum".
  std::string describe() const;
};

/// Of the signature of these parts.
std::uint64_t digest(Verb verb, DType dtype, ReduceOp op, std::int32_t root, const Shape& shape);

/// The text every rank raises after a difference, e.g. "allreduce (operation 12 of group 'world'): the
/// ranks do not agree. ranks 0, 2: allreduce of float32[2, 3] with op sum; rank 1: ...". Pure: equal
/// inputs give equal texts on all ranks.
std::string mismatch_text(const std::string& group, std::uint64_t sequence,
                          const std::vector<std::string>& description_of_rank);

}  // namespace samestep
