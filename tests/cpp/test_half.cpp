#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/half.h"
#include "reference_half.h"

namespace samestep {
namespace {

struct Type {
  const char* name;
  reference::HalfFormat format;
  float (*widen)(std::uint16_t);
  std::uint16_t (*round)(float);
};

constexpr Type kTypes[] = {
    {"float16", reference::kFloat16, kernels::float16_to_float, kernels::float_to_float16},
    {"bfloat16", reference::kBFloat16, kernels::bfloat16_to_float, kernels::float_to_bfloat16},
};

bool same_half(const Type& type, std::uint16_t a, std::uint16_t b) {
  return a == b || (std::isnan(reference::widen(type.format, a)) && std::isnan(reference::widen(type.format, b)));
}

bool same_float(float a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

// The first pattern whose conversion is wrong, or -1.
int first_wrong_widening(const Type& type) {
  for (int bits = 0; bits < 1 << 16; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if (!same_float(type.widen(half), reference::widen(type.format, half))) return bits;
  }
  return -1;
}

bool rounds_right(const Type& type, float value) {
  return same_half(type, type.round(value), reference::round(type.format, value));
}

// Every value at which rounding changes its mind lies between two adjacent values; tried there and one float to
// either side. Returns the first lower neighbour of a wrong one, or -1.
int first_wrong_rounding(const Type& type) {
  for (int bits = 0; bits < 1 << 15; ++bits) {
    for (const int sign : {0, 1 << 15}) {
      const auto low = type.widen(static_cast<std::uint16_t>(sign | bits));
      const auto high = type.widen(static_cast<std::uint16_t>(sign | (bits + 1)));
      const float middle = low / 2 + high / 2;
      const bool right = rounds_right(type, low) && rounds_right(type, middle) &&
                         rounds_right(type, std::nextafter(middle, low)) &&
                         rounds_right(type, std::nextafter(middle, high));
      if (!right) return bits;
    }
  }
  return -1;
}

TEST_CASE("half types: all 65536 patterns widen exactly") {
  for (const Type& type : kTypes) {
    CAPTURE(type.name);
    CHECK(first_wrong_widening(type) == -1);
  }
}

TEST_CASE("half types: widening and rounding gives the same value back") {
  for (const Type& type : kTypes) {
    int wrong = 0;
    for (int bits = 0; bits < 1 << 16; ++bits) {
      const auto half = static_cast<std::uint16_t>(bits);
      wrong += !same_half(type, type.round(type.widen(half)), half);
    }
    CAPTURE(type.name);
    CHECK(wrong == 0);
  }
}

TEST_CASE("half types: rounding is to nearest even around every value") {
  for (const Type& type : kTypes) {
    CAPTURE(type.name);
    CHECK(first_wrong_rounding(type) == -1);
  }
}

TEST_CASE("half types: any float rounds to nearest even") {
  std::mt19937 random(1);
  for (const Type& type : kTypes) {
    int wrong = 0;
    for (int i = 0; i < 2'000'000; ++i) {
      wrong += !rounds_right(type, std::bit_cast<float>(static_cast<std::uint32_t>(random())));
    }
    for (const float value :
         {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
          std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min(),
          std::numeric_limits<float>::signaling_NaN(), 65519.996F, 65520.0F, 0x1p-25F, 0x1.8p-25F}) {
      wrong += !rounds_right(type, value);
    }
    CAPTURE(type.name);
    CHECK(wrong == 0);
  }
}

TEST_CASE("half types: a NaN whose payload lies in the dropped bits stays NaN") {
  const float nan = std::bit_cast<float>(0xff80'0001U);
  for (const Type& type : kTypes) {
    CAPTURE(type.name);
    CHECK(std::isnan(type.widen(type.round(nan))));
  }
}

#if defined(__x86_64__)
TEST_CASE("float16: denormals survive in a process that flushes float32 denormals to zero") {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | _MM_FLUSH_ZERO_ON | 0x0040);  // and denormals are zeros
  int wrong = 0;
  for (int bits = 0; bits < 0x0800; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    wrong += kernels::float_to_float16(kernels::float16_to_float(half)) != half;
  }
  _mm_setcsr(saved);
  CHECK(wrong == 0);
}
#endif

}  // namespace
}  // namespace samestep
