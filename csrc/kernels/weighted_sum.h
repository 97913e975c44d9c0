#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "core/dtype.h"

namespace samestep::kernels {

/// The dtype in which elements of `dtype` are added: float32 for half types, int64 for integers, the real type of
/// complex numbers. Null for bool and float8.
std::optional<DType> sum_dtype(DType dtype);

/// How many elements of `sum_dtype` the sum of one element is. Complex numbers are pairs. A sum of weighted integers
/// is four digits to the base 2^32, the lowest first and the highest one signed: added without carries, up to 2^31 of
/// them overflow nowhere.
std::size_t sum_words(DType dtype);

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

/// Divides sums of integers: element 4i of `sums` becomes the quotient of the i-th, rounded down and modulo 2^64.
/// `count`: in elements of int64. `divisor`: whole, positive and at most 2^53.
void divide_integers(void* sums, std::size_t count, double divisor);

}  // namespace samestep::kernels
