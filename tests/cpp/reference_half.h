#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

/// The 16-bit types by arithmetic on doubles, straight from their definition; slow, and nothing like the
/// code under test.
namespace samestep::reference {

struct HalfFormat {
  int mantissa_bits;
  int exponent_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int largest_exponent() const { return (1 << exponent_bits) - 1; }  // of infinities and NaN
};

inline constexpr HalfFormat kFloat16 = {10, 5};
inline constexpr HalfFormat kBFloat16 = {7, 8};

inline double widen(HalfFormat format, std::uint16_t bits) {
  const double sign = bits >> 15 ? -1.0 : 1.0;
  const int exponent = (bits >> format.mantissa_bits) & format.largest_exponent();
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  if (exponent == format.largest_exponent()) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  const int implicit = exponent == 0 ? 0 : 1 << format.mantissa_bits;
  const int scale = (exponent == 0 ? 1 : exponent) - format.bias() - format.mantissa_bits;
  return sign * std::ldexp(mantissa + implicit, scale);
}

/// To nearest, ties to even. Any quiet NaN for NaN.
inline std::uint16_t round(HalfFormat format, double value) {
  const int sign = std::signbit(value) ? 1 << 15 : 0;
  const int infinity = format.largest_exponent() << format.mantissa_bits;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity | 1 << (format.mantissa_bits - 1));
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity);
  if (value == 0) return static_cast<std::uint16_t>(sign);
  const int lowest = 1 - format.bias();
  const int exponent = std::max(std::ilogb(value), lowest);
  const double units = std::nearbyint(std::ldexp(std::abs(value), format.mantissa_bits - exponent));
  // Units of the last place count on from the patterns of the binade; a carry lands in the next one.
  const double pattern = units + std::ldexp(exponent - lowest, format.mantissa_bits);
  return static_cast<std::uint16_t>(sign | (pattern >= infinity ? infinity : static_cast<int>(pattern)));
}

}  // namespace samestep::reference
