#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels/half.h"
#include "kernels/isa.h"
#include "kernels/weighted_sum.h"

namespace samestep::kernels {

namespace {

constexpr std::size_t kCounts[] = {0, 1, 7, 63, 1024, 1025, 3000};

__extension__ using Wide = __int128;

template <class T>
std::vector<T> values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> made(count);
  for (T& value : made) value = static_cast<T>(static_cast<std::int32_t>(random() % 2001) - 1000) / T{3};
  return made;
}

template <class T>
const void* address(const std::vector<T>& values) {
  return values.data();
}

template <class T>
constexpr DType dtype_of = std::is_signed_v<T> ? sizeof(T) == 1   ? DType::int8
                                                 : sizeof(T) == 2 ? DType::int16
                                                 : sizeof(T) == 4 ? DType::int32
                                                                  : DType::int64
                           : sizeof(T) == 1    ? DType::uint8
                           : sizeof(T) == 2    ? DType::uint16
                           : sizeof(T) == 4    ? DType::uint32
                                               : DType::uint64;

/// Checks all numbers of terms and sums. `wide(x)` is an element of a term in the type of the sums.
template <class Sum, class Element, class Wide>
void check(DType dtype, const std::vector<std::vector<Element>>& terms, Wide wide) {
  const double weights[] = {3, 0.1};
  for (const std::size_t count : kCounts) {
    for (std::size_t n_terms = 0; n_terms <= 2; ++n_terms) {
      for (std::size_t n_sums = 0; n_sums <= 4; ++n_sums) {
        std::vector<std::vector<Sum>> sums;
        for (unsigned k = 0; k < n_sums; ++k) sums.push_back(values<Sum>(count, 100 + k));
        std::vector<Sum> expected(count, static_cast<Sum>(-0.0));
        for (std::size_t i = 0; i < count; ++i) {
          for (std::size_t t = 0; t < n_terms; ++t) {
            const Sum product = static_cast<Sum>(weights[t]) * static_cast<Sum>(wide(terms[t][i]));
            expected[i] = t == 0 ? product : expected[i] + product;
          }
          for (std::size_t k = 0; k < n_sums; ++k) {
            expected[i] = k == 0 && n_terms == 0 ? sums[k][i] : sums[k][i] + expected[i];
          }
        }
        std::vector<WeightedTerm> given;
        for (std::size_t t = 0; t < n_terms; ++t) given.push_back({address(terms[t]), weights[t]});
        std::vector<const void*> added;
        for (const auto& sum : sums) added.push_back(address(sum));
        std::vector<Sum> fresh(count + 1, Sum{9});
        add_weighted(dtype, given, added, fresh.data(), count);
        CHECK(fresh[count] == Sum{9});
        CHECK((count == 0 || std::memcmp(fresh.data(), expected.data(), count * sizeof(Sum)) == 0));
        if (n_sums == 0) continue;
        add_weighted(dtype, given, added, sums.back().data(), count);  // into the sum that is added last
        CHECK((count == 0 || std::memcmp(sums.back().data(), expected.data(), count * sizeof(Sum)) == 0));
      }
    }
  }
}

template <class Sum, class Element, class Wide>
void check_all(DType dtype, const std::vector<std::vector<Element>>& terms, Wide wide) {
  for (const std::string_view isa : supported_isas()) {
    select_isa(isa);
    check<Sum>(dtype, terms, wide);
  }
}

template <class Element, class Narrow>
std::vector<std::vector<Element>> half_values(Narrow narrow) {
  std::vector<std::vector<Element>> made(2);
  for (unsigned t = 0; t < 2; ++t) {
    for (const float x : values<float>(3000, t)) made[t].push_back(narrow(x));
    made[t][0] = 1;  // the smallest denormal number
    made[t][1] = narrow(-INFINITY);
  }
  return made;
}

}  // namespace

TEST_CASE("weighted terms and sums are added from the inside out, each product and sum rounded by itself") {
  const auto plain = [](auto x) { return x; };
  check_all<float>(DType::float32, std::vector{values<float>(3000, 0), values<float>(3000, 1)}, plain);
  check_all<float>(DType::complex64, std::vector{values<float>(3000, 0), values<float>(3000, 1)}, plain);
  check_all<double>(DType::float64, std::vector{values<double>(3000, 0), values<double>(3000, 1)}, plain);
}

TEST_CASE("half types are widened first") {
  check_all<float>(DType::float16, half_values<std::uint16_t>(float_to_float16), float16_to_float);
  check_all<float>(DType::bfloat16, half_values<std::uint16_t>(float_to_bfloat16), bfloat16_to_float);
}

TEST_CASE_TEMPLATE("means of integers are exact, at the limits of their types and of weights", T, std::int8_t,
                   std::int16_t, std::int32_t, std::int64_t, std::uint8_t, std::uint16_t, std::uint32_t,
                   std::uint64_t) {
  using Limits = std::numeric_limits<T>;
  const DType dtype = dtype_of<T>;
  for (const std::size_t count : kCounts) {
    std::mt19937_64 random(count);
    std::vector<std::vector<T>> terms(4, std::vector<T>(count));
    for (auto& term : terms) {
      for (T& x : term) x = static_cast<T>(random());
    }
    for (std::size_t t = 0; count != 0 && t < 4; ++t) terms[t][0] = t % 2 == 0 ? Limits::max() : Limits::min();
    const double weights[] = {0x1p51 - 1, 1, 0x1p52, 77};
    const std::size_t words = sum_words(dtype) * count;
    std::vector<std::int64_t> first(words), second(words + 1, 9);
    const WeightedTerm some[] = {{terms[0].data(), weights[0]}, {terms[1].data(), weights[1]}};
    const WeightedTerm others[] = {{terms[2].data(), weights[2]}, {terms[3].data(), weights[3]}};
    add_weighted(dtype, some, {}, first.data(), words);
    const void* const sums[] = {first.data()};
    add_weighted(dtype, others, sums, second.data(), words);
    const auto divisor = static_cast<Wide>(weights[0] + weights[1] + weights[2] + weights[3]);
    divide_integers(second.data(), words, static_cast<double>(divisor));
    CHECK(second[words] == 9);
    for (std::size_t i = 0; i < count; ++i) {
      Wide sum = 0;
      for (std::size_t t = 0; t < 4; ++t) sum += static_cast<Wide>(weights[t]) * terms[t][i];
      const Wide quotient = sum / divisor - (sum % divisor < 0 ? 1 : 0);
      CHECK(static_cast<T>(second[sum_words(dtype) * i]) == static_cast<T>(quotient));
    }
  }
}

TEST_CASE("a term without data changes no bit") {
  const float sum[] = {-0.0F, 2.0F}, term[] = {-1.0F, 5.0F};
  const WeightedTerm terms[] = {{nullptr, 2.0}, {term, 1.0}};
  const void* const sums[] = {sum};
  float out[2];
  add_weighted(DType::float32, {terms, 1}, sums, out, 2);
  CHECK(std::memcmp(out, sum, sizeof out) == 0);
  add_weighted(DType::float32, terms, {}, out, 2);
  CHECK(std::memcmp(out, term, sizeof out) == 0);
}

TEST_CASE("what has no mean has no dtype of sums") {
  CHECK(!sum_dtype(DType::bool_));
  CHECK(!sum_dtype(DType::float8_e4m3fn));
  CHECK(sum_dtype(DType::uint64) == DType::int64);
  CHECK(sum_dtype(DType::int8) == DType::int64);
}

}  // namespace samestep::kernels
