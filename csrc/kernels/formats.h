#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "kernels/half.h"

/// Formats: how elements lie in memory and what is combined. Elements are treated a *pack* at a time, one
/// register of memory. A format has
///   Element   what lies in memory, at any alignment
///   Value     what is combined, e.g. float for a half type
///   Values    the values of a pack, in any order: vectors of Value, or one Value where no vector can be had
///   Packed    the finished elements of a pack, in registers
///   kCount    elements of a pack
/// and the conversions between memory and Values. Internal to `kernels/`.
namespace samestep::kernels::SAMESTEP_ISA {

#if defined(__AVX512F__)
inline constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr std::size_t kVectorBytes = 32;
#else
inline constexpr std::size_t kVectorBytes = 16;
#endif

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;

template <class V, std::size_t N>
struct Parts {
  V part[N];
};

template <class Packed>
SAMESTEP_INLINE Packed load(const std::byte* from) {
  Packed packed;
  std::memcpy(&packed, from, sizeof packed);
  return packed;
}

/// Elements that are values, a register of them at a time.
template <class T, class Register>
struct Registers {
  using Element = T;
  using Value = T;
  using Values = Parts<Register, 1>;
  using Packed = Register;
  static constexpr std::size_t kCount = sizeof(Register) / sizeof(T);
  SAMESTEP_INLINE static Values read(const std::byte* from) { return {{load<Packed>(from)}}; }
  SAMESTEP_INLINE static Packed pack(Values values) { return values.part[0]; }
  SAMESTEP_INLINE static void write(Packed packed, std::byte* to) { std::memcpy(to, &packed, sizeof packed); }
};

template <class T>
using Plain = Registers<T, Vector<T>>;

/// For what has no vectors.
template <class T>
using Single = Registers<T, T>;

__extension__ using Int128 = __int128;
__extension__ using Uint128 = unsigned __int128;

/// So wide that no sum of 2^31 ranks overflows.
template <class T>
using WideSum = std::conditional_t<std::is_signed_v<T>, std::conditional_t<sizeof(T) == 8, Int128, std::int64_t>,
                                   std::conditional_t<sizeof(T) == 8, Uint128, std::uint64_t>>;

/// Integers, summed in a wider type.
template <class T, class Sum = WideSum<T>>
struct Wide {
  using Element = T;
  using Value = Sum;
  using Values = Parts<Value, 1>;
  using Packed = T;
  static constexpr std::size_t kCount = 1;
  SAMESTEP_INLINE static Values read(const std::byte* from) { return {{load<Packed>(from)}}; }
  SAMESTEP_INLINE static Packed pack(Values values) { return static_cast<Packed>(values.part[0]); }
  SAMESTEP_INLINE static void write(Packed packed, std::byte* to) { std::memcpy(to, &packed, sizeof packed); }
};

/// Integers and bools as false or true: no bit or all bits between, 0 or 1 in memory.
template <class T>
struct Truth : Plain<T> {
  using typename Plain<T>::Values;
  using typename Plain<T>::Packed;
  SAMESTEP_INLINE static Values read(const std::byte* from) {
    const Packed packed = load<Packed>(from);
    return {{__builtin_bit_cast(Packed, packed != Packed{})}};
  }
  SAMESTEP_INLINE static Packed pack(Values values) { return values.part[0] & (Packed{} + T{1}); }
};

// Two half-precision elements share a 32-bit word. Each is widened and rounded where it lies, so that none has to
// change its lane: part 0 of Values are the low elements, part 1 the high ones.
struct HalfFormat {
  using Element = std::uint16_t;
  using Value = float;
  using Values = Parts<Vector<float>, 2>;
  using Packed = Vector<std::uint32_t>;
  static constexpr std::size_t kCount = kVectorBytes / sizeof(Element);
  SAMESTEP_INLINE static void write(Packed packed, std::byte* to) { std::memcpy(to, &packed, sizeof packed); }
};

struct BFloat16 : HalfFormat {
  SAMESTEP_INLINE static Values read(const std::byte* from) {
    const Packed words = load<Packed>(from);
    return {{__builtin_bit_cast(Vector<float>, words << 16), __builtin_bit_cast(Vector<float>, words & 0xffff'0000U)}};
  }
  // Adding to a NaN with low bits could make another number of it, but there is none: arithmetic passes on
  // the NaN of an input, whose low bits are zero, or makes its own.
#if defined(__AVX512BW__)
  // Round both at once, in lanes of 16 bits: up if the low bits are above the middle, or on it next to odd.
  SAMESTEP_INLINE static Packed pack(Values values) {
    const auto even = __builtin_bit_cast(__m512i, values.part[0]);
    const auto odd = __builtin_bit_cast(__m512i, values.part[1]);
    constexpr __mmask32 kOdd = 0xaaaa'aaaa;
    const __m512i high = _mm512_mask_blend_epi16(kOdd, _mm512_bsrli_epi128(even, 2), odd);
    const __m512i low = _mm512_mask_blend_epi16(kOdd, even, _mm512_bslli_epi128(odd, 2));
    constexpr int kLowOrHighAndOne = 0xf8;
    const __m512i sticky = _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi16(1), kLowOrHighAndOne);
    const __mmask32 up = _mm512_cmpgt_epu16_mask(sticky, _mm512_set1_epi16(-0x8000));
    return __builtin_bit_cast(Packed, _mm512_mask_sub_epi16(high, up, high, _mm512_set1_epi16(-1)));
  }
#else
  SAMESTEP_INLINE static Packed pack(Values values) {
    return round(values.part[0]) >> 16 | (round(values.part[1]) & 0xffff'0000U);
  }

 private:
  SAMESTEP_INLINE static Packed round(Vector<float> value) {
    const Packed bits = __builtin_bit_cast(Packed, value);
    return bits + 0x7fffU + (bits >> 16 & 1U);
  }
#endif
};

#if !defined(__F16C__)
struct Float16 : HalfFormat {
  SAMESTEP_INLINE static Values read(const std::byte* from) {
    const Packed words = load<Packed>(from);
    return {{widen(words), widen(words >> 16)}};
  }
  SAMESTEP_INLINE static Packed pack(Values values) { return round(values.part[0]) | round(values.part[1]) << 16; }

 private:
  SAMESTEP_INLINE static Vector<float> widen(Packed bits) {
    return detail::widen_float16<Vector<float>, Vector<std::int32_t>, Packed>(bits);
  }
  SAMESTEP_INLINE static Packed round(Vector<float> value) {
    return detail::round_float16<Vector<float>, Vector<std::int32_t>, Packed>(value);
  }
};
#else
// The processor's conversions round as ours, and keep denormals whatever its flush-to-zero mode.
// Part 0 of Values are the elements of the lower addresses.
struct Float16 : HalfFormat {
#if defined(__AVX512F__)
  // The forms without a mask make GCC 12 warn of its own header.
  using Half = __m256i;
  static constexpr __mmask16 kAll = 0xffff;
  SAMESTEP_INLINE static Vector<float> widen(Half bits) { return _mm512_maskz_cvtph_ps(kAll, bits); }
  SAMESTEP_INLINE static Half round(Vector<float> value) {
    return _mm512_maskz_cvtps_ph(kAll, value, _MM_FROUND_TO_NEAREST_INT);
  }
#else
  using Half = __m128i;
  SAMESTEP_INLINE static Vector<float> widen(Half bits) { return _mm256_cvtph_ps(bits); }
  SAMESTEP_INLINE static Half round(Vector<float> value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }
#endif
  struct Packed {
    Half low, high;
  };
  SAMESTEP_INLINE static Values read(const std::byte* from) {
    return {{widen(load<Half>(from)), widen(load<Half>(from + sizeof(Half)))}};
  }
  SAMESTEP_INLINE static Packed pack(Values values) { return {round(values.part[0]), round(values.part[1])}; }
  SAMESTEP_INLINE static void write(Packed packed, std::byte* to) {
    std::memcpy(to, &packed.low, sizeof(Half));
    std::memcpy(to + sizeof(Half), &packed.high, sizeof(Half));
  }
};
#endif

}  // namespace samestep::kernels::SAMESTEP_ISA
