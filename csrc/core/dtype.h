#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace samestep {

/// Element types. The float8 types can be moved but not reduced.
enum class DType : std::uint8_t {
  bool_,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  float16,
  bfloat16,
  float32,
  float64,
  complex64,
  complex128,
  float8_e4m3fn,
  float8_e5m2,
};

inline constexpr int kDTypeCount = 17;

namespace detail {
struct DTypeFacts {
  std::string_view name;  // NumPy's (ml_dtypes' for the types NumPy lacks)
  std::uint8_t itemsize;
};
inline constexpr DTypeFacts kDTypeFacts[kDTypeCount] = {
    {"bool", 1},    {"int8", 1},      {"int16", 2},       {"int32", 4},         {"int64", 8},       {"uint8", 1},
    {"uint16", 2},  {"uint32", 4},    {"uint64", 8},      {"float16", 2},       {"bfloat16", 2},    {"float32", 4},
    {"float64", 8}, {"complex64", 8}, {"complex128", 16}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1},
};
}  // namespace detail

/// Bytes of one element.
constexpr std::size_t itemsize(DType dtype) { return detail::kDTypeFacts[static_cast<int>(dtype)].itemsize; }

/// NumPy's name of the type, e.g. "float32".
constexpr std::string_view name(DType dtype) { return detail::kDTypeFacts[static_cast<int>(dtype)].name; }

constexpr bool is_complex(DType dtype) { return dtype == DType::complex64 || dtype == DType::complex128; }

constexpr bool is_float8(DType dtype) { return dtype == DType::float8_e4m3fn || dtype == DType::float8_e5m2; }

/// Real floating-point types that can be reduced.
constexpr bool is_floating(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}

constexpr bool is_integer(DType dtype) { return dtype >= DType::int8 && dtype <= DType::uint64; }

}  // namespace samestep
