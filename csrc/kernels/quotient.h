#pragma once

#include <cstddef>

#include "kernels/formats.h"

/// Division in place. Internal to `kernels/`.
namespace samestep::kernels::SAMESTEP_ISA {

/// NaN for an infinite value and for NaN, else +0.0: a sum of these shows whether all values are finite.
template <class V>
SAMESTEP_INLINE V not_finite(V value) {
  return value - value;
}

/// `divide_in_place` of kernels/divide.h for one type.
template <class T>
bool divide_all(std::byte* data, std::size_t count, T divisor) {
  using Pack = Vector<T>;
  constexpr std::size_t kPacks = 4;  // as many divisions at once
  constexpr std::size_t kStep = kPacks * kVectorBytes;
  const std::size_t nbytes = count * sizeof(T), whole = nbytes - nbytes % kStep;
  Pack found[kPacks] = {};
  for (std::size_t at = 0; at < whole; at += kStep) {
#pragma GCC unroll 4
    for (std::size_t n = 0; n < kPacks; ++n) {
      std::byte* const to = data + at + n * kVectorBytes;
      const Pack quotient = load<Pack>(to) / divisor;
      std::memcpy(to, &quotient, sizeof quotient);
      found[n] = found[n] + not_finite(quotient);
    }
  }
  T sum = 0;
  for (std::size_t at = whole; at < nbytes; at += sizeof(T)) {
    const T quotient = load<T>(data + at) / divisor;
    std::memcpy(data + at, &quotient, sizeof quotient);
    sum = sum + not_finite(quotient);
  }
  for (const Pack& pack : found) {
    for (std::size_t n = 0; n < kVectorBytes / sizeof(T); ++n) sum = sum + pack[n];
  }
  return sum == 0;
}

}  // namespace samestep::kernels::SAMESTEP_ISA
