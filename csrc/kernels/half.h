#pragma once

#include <cstdint>

namespace samestep::kernels {

// The 16-bit floating-point types, widened to float32 and rounded back: exactly, to nearest even, NaN
// stays NaN, infinities and denormals are kept. Each is written once for `Float` = float and for vectors
// of float; `Int` and `UInt` are the signed and unsigned 32-bit integers of as many lanes. The 16 bits are
// the low ones of a word. Branch-free, and the same bits with and without the processor's flush-to-zero
// mode: no step meets a float32 denormal that matters.
//
// Always inlined, for the reason given in isa_body.h.
#define SAMESTEP_INLINE [[gnu::always_inline]] inline

namespace detail {
/// `condition ? yes : no`. A comparison of vectors is a mask already.
SAMESTEP_INLINE std::int32_t select(bool condition, std::int32_t yes, std::int32_t no) { return condition ? yes : no; }

template <class Int>
SAMESTEP_INLINE Int select(Int condition, Int yes, Int no) {
  return condition ? yes : no;
}

template <class Float, class Int, class UInt>
SAMESTEP_INLINE Float widen_float16(UInt bits) {
  constexpr std::int32_t kHalfExponent = 0x7c00 << 13;
  constexpr std::int32_t kRebias = (127 - 15) << 23;
  constexpr std::int32_t kSmallestNormal = (127 - 14) << 23;  // 2^-14
  const Int magnitude = __builtin_bit_cast(Int, (bits & 0x7fffU) << 13);
  const Int exponent = magnitude & kHalfExponent;
  const Int none = magnitude ^ magnitude;

  const Int normal = magnitude + kRebias;
  const Int special = normal + kRebias;
  // 2^-14 (1 + m / 1024) - 2^-14 is the denormal m 2^-24.
  const Int shifted = magnitude + kSmallestNormal;
  const Float unshifted = __builtin_bit_cast(Float, shifted) - 0x1p-14F;
  const Int denormal = __builtin_bit_cast(Int, unshifted);
  const Int finite = select(exponent == none, denormal, normal);
  const Int result = select(exponent == none + kHalfExponent, special, finite);
  return __builtin_bit_cast(Float, __builtin_bit_cast(UInt, result) | (bits & 0x8000U) << 16);
}

template <class Float, class Int, class UInt>
SAMESTEP_INLINE UInt round_float16(Float value) {
  constexpr std::int32_t kRebias = (127 - 15) << 23;
  constexpr std::int32_t kSmallestNormal = (127 - 14) << 23;  // 2^-14
  constexpr std::int32_t kOverflow = (127 + 16) << 23;        // 2^16
  constexpr std::int32_t kInfinity = 0x7f80'0000;
  constexpr std::int32_t kHalfInfinity = 0x7c00;
  constexpr std::int32_t kHalfQuiet = 0x7e00;
  constexpr std::int32_t kOneHalf = 0x3f00'0000;
  const UInt bits = __builtin_bit_cast(UInt, value);
  const Int magnitude = __builtin_bit_cast(Int, bits & 0x7fff'ffffU);
  const Int none = magnitude ^ magnitude;

  // Half of the dropped 13 bits, a tie to the even side; a carry moves into the exponent as it should.
  const Int normal = (magnitude - kRebias + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Adding 0.5, whose last place is 2^-24, lets the adder round to the last place of a denormal.
  const Int small = select(magnitude < none + kSmallestNormal, magnitude, none);
  const Float shifted = __builtin_bit_cast(Float, small) + 0.5F;
  const Int denormal = __builtin_bit_cast(Int, shifted) - kOneHalf;
  const Int nan = kHalfQuiet | (magnitude >> 13 & 0x3ff);

  const Int finite = select(magnitude < none + kSmallestNormal, denormal, normal);
  const Int number = select(magnitude < none + kOverflow, finite, none + kHalfInfinity);
  const Int result = select(magnitude > none + kInfinity, nan, number);
  return __builtin_bit_cast(UInt, result) | (bits & 0x8000'0000U) >> 16;
}
}  // namespace detail

SAMESTEP_INLINE float float16_to_float(std::uint16_t bits) {
  return detail::widen_float16<float, std::int32_t, std::uint32_t>(bits);
}

SAMESTEP_INLINE std::uint16_t float_to_float16(float value) {
  return static_cast<std::uint16_t>(detail::round_float16<float, std::int32_t, std::uint32_t>(value));
}

SAMESTEP_INLINE float bfloat16_to_float(std::uint16_t bits) {
  return __builtin_bit_cast(float, std::uint32_t{bits} << 16);
}

SAMESTEP_INLINE std::uint16_t float_to_bfloat16(float value) {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t rounded = bits + 0x7fffU + (bits >> 16 & 1U);
  const std::uint32_t nan = bits | 0x0040'0000U;
  return static_cast<std::uint16_t>((value != value ? nan : rounded) >> 16);
}

}  // namespace samestep::kernels
