#include <doctest/doctest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "isa_restored.h"
#include "kernels/divide.h"
#include "kernels/isa.h"

namespace samestep::kernels {
namespace {

constexpr std::size_t kCounts[] = {0, 1, 7, 31, 32, 33, 127, 128, 129, 1000};

/// At each position in turn one element is `odd`, whose quotient is finite or not.
template <class T>
void check(DType dtype, T odd, bool is_finite) {
  for (const std::size_t count : kCounts) {
    for (std::size_t at = 0; at < count; ++at) {
      std::vector<T> elements(count + 1), expected(count + 1);
      for (std::size_t i = 0; i <= count; ++i) elements[i] = static_cast<T>(i) - T{100};
      elements[at] = odd;
      for (std::size_t i = 0; i < count; ++i) expected[i] = elements[i] / static_cast<T>(0.3);
      expected[count] = elements[count];
      const bool found = divide_in_place(dtype, elements.data(), count, 0.3);
      REQUIRE(found == is_finite);
      if (odd == odd) REQUIRE(std::memcmp(elements.data(), expected.data(), elements.size() * sizeof(T)) == 0);
    }
  }
}

template <class T>
void check_all(DType dtype) {
  using Limits = std::numeric_limits<T>;
  check<T>(dtype, T{1}, true);
  check<T>(dtype, Limits::denorm_min(), true);
  check<T>(dtype, Limits::infinity(), false);
  check<T>(dtype, -Limits::infinity(), false);
  check<T>(dtype, Limits::quiet_NaN(), false);
  check<T>(dtype, Limits::max(), false);  // the quotient overflows
}

}  // namespace

TEST_CASE("division in place: each quotient is rounded once, and one that is not finite is found") {
  const IsaRestored restored;
  for (const std::string_view isa : supported_isas()) {
    INFO(std::string(isa));
    select_isa(isa);
    check_all<float>(DType::float32);
    check_all<double>(DType::float64);
  }
}

TEST_CASE("division in place: no elements, and memory that is not aligned") {
  CHECK(divide_in_place(DType::float32, nullptr, 0, 3.0));
  std::vector<std::byte> bytes(1 + 40 * sizeof(float));
  const float six = 6;
  for (std::size_t i = 0; i < 40; ++i) std::memcpy(bytes.data() + 1 + i * sizeof six, &six, sizeof six);
  CHECK(divide_in_place(DType::float32, bytes.data() + 1, 40, 3.0));
  for (std::size_t i = 0; i < 40; ++i) {
    float quotient = 0;
    std::memcpy(&quotient, bytes.data() + 1 + i * sizeof quotient, sizeof quotient);
    REQUIRE(quotient == 2);
  }
}

}  // namespace samestep::kernels
