#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

// The arithmetic of the stand-in of NCCL: pairwise in order of rank, half types in float, so that results are exact and
// can be compared with what the host engines give. (A real NCCL adds in another order, may round half types after each
// addition, and multiplies by 1 / n before it adds.) As in NCCL, an average in a half type is the sum of products with
// 1 / n, all rounded to that type; a product with a factor and the sum that it is added to are rounded once; and of a
// NaN and a number, the number is both the least and the greatest.

namespace fake {

enum Type { int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16, e4m3, e5m2, n_types };
enum Op { sum, prod, max, min, avg, n_ops };

inline std::size_t size_of(int type) {
  static const std::size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}

inline float from_bfloat16(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline std::uint16_t to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
#ifdef __aarch64__
using Half = __fp16;  // g++ has no _Float16 there before version 13
#else
using Half = _Float16;
#endif
inline float from_float16(std::uint16_t bits) {
  Half half;
  std::memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}
inline std::uint16_t to_float16(float value) {
  const Half half = static_cast<Half>(value);
  std::uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

template <class T>
T combined(const T* terms, int n, int op) {
  if (n == 1) return terms[0];
  int cut = 1;
  while (2 * cut < n) cut *= 2;
  const T a = combined(terms, cut, op), b = combined(terms + cut, n - cut, op);
  switch (op) {
    case prod:
      return static_cast<T>(a * b);
    case max:
      return a > b || b != b ? a : b;
    case min:
      return a < b || b != b ? a : b;
    default:
      return static_cast<T>(a + b);
  }
}

template <class T>
T finished(T value, int n, int op) {
  if (op != avg) return value;
  if constexpr (static_cast<T>(0.5) != T{0}) return value * static_cast<T>(1.0 / n);
  return static_cast<T>(value / static_cast<T>(n));
}

/// The sum of the terms, each times its factor; pairwise, too, so that factors which are powers of two round nothing.
template <class T>
T scaled_sum(const T* terms, const T* factors, int n) {
  if (n == 1) return static_cast<T>(terms[0] * factors[0]);
  int cut = 1;
  while (2 * cut < n) cut *= 2;
  const T a = scaled_sum(terms, factors, cut);
  if constexpr (std::is_floating_point_v<T>) {
    if (n - cut == 1) return std::fma(terms[cut], factors[cut], a);
  }
  return static_cast<T>(a + scaled_sum(terms + cut, factors + cut, n - cut));
}

/// What one rank gives: where its elements are, and its factor where the operator has one.
struct Term {
  const std::byte* data;
  double factor;
  bool scaled;
};

template <class Stored, class T, class Load, class Store>
void reduce_as(const std::vector<Term>& terms, int op, std::byte* out, std::size_t count, Load load, Store store) {
  const int n = static_cast<int>(terms.size());
  std::vector<T> at(terms.size()), factors;
  for (const Term& term : terms) factors.push_back(static_cast<T>(term.factor));
  const bool averages_half_types = op == avg && sizeof(Stored) < sizeof(T);
  const auto round = [&](T value) { return load(store(value)); };
  for (std::size_t i = 0; i < count; ++i) {
    for (int r = 0; r < n; ++r) {
      Stored stored;
      std::memcpy(&stored, terms[r].data + i * sizeof stored, sizeof stored);
      at[r] = load(stored);
      if (averages_half_types) at[r] = round(at[r] * round(static_cast<T>(1.0 / n)));
    }
    const T value = terms[0].scaled ? scaled_sum(at.data(), factors.data(), n)
                                    : finished(combined(at.data(), n, op), n, averages_half_types ? sum : op);
    const Stored stored = store(value);
    std::memcpy(out + i * sizeof stored, &stored, sizeof stored);
  }
}

template <class T>
void reduce_plain(const std::vector<Term>& terms, int op, std::byte* out, std::size_t count) {
  const auto same = [](T value) { return value; };
  reduce_as<T, T>(terms, op, out, count, same, same);
}

/// False for types that cannot be reduced.
inline bool reduce(int type, const std::vector<Term>& terms, int op, std::byte* out, std::size_t count) {
  switch (type) {
    case int8:
      return reduce_plain<std::int8_t>(terms, op, out, count), true;
    case uint8:
      return reduce_plain<std::uint8_t>(terms, op, out, count), true;
    case int32:
      return reduce_plain<std::int32_t>(terms, op, out, count), true;
    case uint32:
      return reduce_plain<std::uint32_t>(terms, op, out, count), true;
    case int64:
      return reduce_plain<std::int64_t>(terms, op, out, count), true;
    case uint64:
      return reduce_plain<std::uint64_t>(terms, op, out, count), true;
    case float32:
      return reduce_plain<float>(terms, op, out, count), true;
    case float64:
      return reduce_plain<double>(terms, op, out, count), true;
    case float16:
      return reduce_as<std::uint16_t, float>(terms, op, out, count, from_float16, to_float16), true;
    case bfloat16:
      return reduce_as<std::uint16_t, float>(terms, op, out, count, from_bfloat16, to_bfloat16), true;
    default:
      return false;
  }
}

}  // namespace fake
