#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "core/dtype.h"

namespace samestep::kernels {

/// The dtype in which elements of `dtype` are added: float32 for half types, 64 bits for integers, the real type of
/// complex numbers, which are pairs of it. Null for bool and float8.
std::optional<DType> sum_dtype(DType dtype);

/// Elements, and how much each of them counts. Null data: zeros that change no bit.
struct WeightedTerm {
  const void* data = nullptr;
  double weight = 1.0;
};

/// out[i] = sums[n-1][i] + (... + (sums[0][i] + (w_0 * terms[0][i] + w_1 * terms[1][i]))), for i < count.
///
/// `terms` are at most two, of `dtype`; `sums` and `out` are of `sum_dtype(dtype)`, and `count` is in elements of it.
/// Without any of them `out` becomes what changes no sum: -0.0, or 0. Each product and each sum is rounded by itself,
/// so the bits are those of as many separate calls. `out` may be one of `sums`; other ranges do not overlap. One pass
/// over memory: intermediate results stay in the first-level cache. Weights of integers are whole and below 2^63.
void add_weighted(DType dtype, std::span<const WeightedTerm> terms, std::span<const void* const> sums, void* out,
                  std::size_t count);

}  // namespace samestep::kernels
