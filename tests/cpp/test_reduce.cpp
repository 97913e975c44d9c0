#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "kernels/isa.h"
#include "kernels/reduce.h"
#include "reference_half.h"
#include "reference_reduce.h"

namespace samestep {
namespace {

bool is_reducible(DType dtype, ReduceOp op) {
  try {
    require_reducible(dtype, {op, 1.0});
    return true;
  } catch (const InvalidArgumentError&) {
    return false;
  }
}

template <class Use>
void for_each_dtype_and_op(Use use) {
  for (int d = 0; d < kDTypeCount; ++d) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (is_reducible(dtype, op)) use(dtype, op);
    }
  }
}

// ---- Buffers.

using Bytes = std::vector<std::byte>;

// Half of the elements are any bits at all (extremes, infinities, NaN, denormals), the others ordinary
// numbers, so that sums neither overflow nor are NaN everywhere.
Bytes random_bytes(DType dtype, std::size_t count, std::mt19937_64& random) {
  Bytes bytes(count * itemsize(dtype));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  reference::with_reference(dtype, [&](auto reference) {
    for (std::size_t i = 0; i < count; ++i) {
      if (random() % 2 == 0) continue;
      const auto value = reference.of(static_cast<double>(random() % 4096) / 128.0 - 16.0);
      std::memcpy(&bytes[i * sizeof value], &value, sizeof value);
    }
  });
  return bytes;
}

struct Case {
  DType dtype;
  ReduceOp op;
  std::vector<Bytes> buffers = {};
  std::vector<double> factors = {};
  std::size_t count;

  Case(DType dtype_, ReduceOp op_, std::size_t n_ranks, std::size_t count_, std::mt19937_64& random)
      : dtype(dtype_), op(op_), count(count_) {
    for (std::size_t r = 0; r < n_ranks; ++r) {
      buffers.push_back(random_bytes(dtype, count, random));
      factors.push_back(static_cast<double>(random() % 9) - 4.0);
    }
  }

  std::vector<kernels::Input> inputs() const {
    std::vector<kernels::Input> list;
    for (std::size_t r = 0; r < buffers.size(); ++r) list.push_back({buffers[r].data(), factors[r]});
    return list;
  }

  Bytes result() const {
    Bytes out(count * itemsize(dtype));
    kernels::reduce(dtype, op, inputs(), out.data(), count);
    return out;
  }

  Bytes expected() const {
    Bytes out(count * itemsize(dtype));
    reference::with_reference(dtype, [&](auto reference) {
      using T = typename decltype(reference)::Element;
      std::vector<T> xs(buffers.size());
      for (std::size_t i = 0; i < count; ++i) {
        for (std::size_t r = 0; r < xs.size(); ++r) std::memcpy(&xs[r], &buffers[r][i * sizeof(T)], sizeof(T));
        const T value = reference.reduce(op, xs, factors);
        std::memcpy(&out[i * sizeof(T)], &value, sizeof(T));
      }
    });
    return out;
  }
};

// Real parts of floating-point types at index i, to tell NaN from NaN; 0 for others.
double part(DType dtype, const Bytes& bytes, std::size_t i) {
  const auto read = [&](auto value) {
    std::memcpy(&value, &bytes[i * sizeof value], sizeof value);
    return value;
  };
  if (dtype == DType::float16) return reference::widen(reference::kFloat16, read(std::uint16_t{}));
  if (dtype == DType::bfloat16) return reference::widen(reference::kBFloat16, read(std::uint16_t{}));
  if (dtype == DType::float32 || dtype == DType::complex64) return read(float{});
  if (dtype == DType::float64 || dtype == DType::complex128) return read(double{});
  return 0;
}

// The first differing part (half an element of complex types), or -1. NaN equals NaN.
std::ptrdiff_t first_difference(DType dtype, const Bytes& a, const Bytes& b) {
  if (a.size() != b.size()) return 0;
  const std::size_t part_size = is_complex(dtype) ? itemsize(dtype) / 2 : itemsize(dtype);
  for (std::size_t i = 0; i < a.size() / part_size; ++i) {
    if (std::memcmp(&a[i * part_size], &b[i * part_size], part_size) == 0) continue;
    if (std::isnan(part(dtype, a, i)) && std::isnan(part(dtype, b, i))) continue;
    return static_cast<std::ptrdiff_t>(i);
  }
  return -1;
}

#define CAPTURE_CASE(c, n) INFO(name((c).dtype), " ", name((c).op), ", ", (n), " ranks, count ", (c).count)

template <class T>
std::vector<T> reduced(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& ranks) {
  std::vector<kernels::Input> inputs;
  for (const auto& rank : ranks) inputs.push_back({rank.data()});
  std::vector<T> out(ranks[0].size());
  kernels::reduce(dtype, op, inputs, out.data(), out.size());
  return out;
}

TEST_CASE("reduce: every dtype and op is what the contract says, element by element") {
  std::mt19937_64 random(2);
  for_each_dtype_and_op([&](DType dtype, ReduceOp op) {
    for (std::size_t n_ranks = 1; n_ranks <= 9; ++n_ranks) {
      for (const std::size_t count : {0, 1, 2, 5, 1031}) {
        const Case c(dtype, op, n_ranks, count, random);
        CAPTURE_CASE(c, n_ranks);
        CHECK(first_difference(dtype, c.result(), c.expected()) == -1);
      }
    }
  });
}

TEST_CASE("reduce: many ranks, and more elements than a block") {
  std::mt19937_64 random(3);
  for_each_dtype_and_op([&](DType dtype, ReduceOp op) {
    for (const auto& [n_ranks, count] : {std::pair<std::size_t, std::size_t>{5, 5003}, {33, 1031}}) {
      const Case c(dtype, op, n_ranks, count, random);
      CAPTURE_CASE(c, n_ranks);
      CHECK(first_difference(dtype, c.result(), c.expected()) == -1);
    }
  });
}

TEST_CASE("reduce: in place over any of the inputs") {
  std::mt19937_64 random(4);
  for_each_dtype_and_op([&](DType dtype, ReduceOp op) {
    for (const std::size_t n_ranks : {1, 2, 3, 4, 7}) {
      for (std::size_t target = 0; target < n_ranks; ++target) {
        Case c(dtype, op, n_ranks, 1031, random);
        const Bytes expected = c.result();
        kernels::reduce(dtype, op, c.inputs(), c.buffers[target].data(), c.count);
        CAPTURE_CASE(c, n_ranks);
        CAPTURE(target);
        CHECK(first_difference(dtype, c.buffers[target], expected) == -1);
      }
    }
  });
}

TEST_CASE("reduce: the bits do not depend on how a buffer is cut, nor on its alignment") {
  std::mt19937_64 random(5);
  for_each_dtype_and_op([&](DType dtype, ReduceOp op) {
    for (const std::size_t n_ranks : {1, 2, 3, 4, 6}) {
      Case c(dtype, op, n_ranks, 1031, random);
      const Bytes expected = c.result();
      for (Bytes& buffer : c.buffers) buffer.insert(buffer.begin(), std::byte{});  // now at odd addresses
      Bytes out(expected.size() + 1);
      for (std::size_t first = 0, length = 0; first < c.count; first += length) {
        length = std::min<std::size_t>(random() % 70, c.count - first);
        const std::size_t offset = 1 + first * itemsize(dtype);
        std::vector<kernels::Input> inputs = c.inputs();
        for (std::size_t r = 0; r < n_ranks; ++r) inputs[r].data = &c.buffers[r][offset];
        if (length > 0) kernels::reduce(dtype, op, inputs, &out[offset], length);
      }
      out.erase(out.begin());
      CAPTURE_CASE(c, n_ranks);
      CHECK(first_difference(dtype, out, expected) == -1);
    }
  });
}

TEST_CASE("reduce: ranks are added pairwise, not one after the other") {
  const std::vector<std::vector<float>> ranks = {{1e8F}, {1.0F}, {-1e8F}, {1.0F}};
  CHECK(reduced(DType::float32, ReduceOp::sum, ranks)[0] == 0.0F);  // in sequence it is 1
}

TEST_CASE("reduce: half types are rounded once") {
  const std::uint16_t two_to_11 = 0x6800, one = 0x3c00, two_to_11_plus_2 = 0x6801;
  const std::vector<std::vector<std::uint16_t>> ranks = {{two_to_11}, {one}, {one}};
  CHECK(reduced(DType::float16, ReduceOp::sum, ranks)[0] == two_to_11_plus_2);  // 2048 + 1 rounds to 2048
}

TEST_CASE("reduce: one NaN is enough for min and max, wherever it is") {
  for (std::size_t n_ranks = 1; n_ranks <= 9; ++n_ranks) {
    for (std::size_t at = 0; at < n_ranks; ++at) {
      for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
        std::vector<std::vector<float>> ranks(n_ranks, std::vector<float>(19, 1.0F));
        ranks[at].assign(19, std::numeric_limits<float>::quiet_NaN());
        for (const float x : reduced(DType::float32, op, ranks)) CHECK(std::isnan(x));
      }
    }
  }
}

TEST_CASE("reduce: the mean of integers is exact and rounds down") {
  const std::vector<std::vector<std::int8_t>> ones(49, {1, 127, -128, -1});
  CHECK(reduced(DType::int8, ReduceOp::avg, ones) == ones[0]);
  CHECK(reduced<std::int32_t>(DType::int32, ReduceOp::avg, {{-1, 1, -3}, {0, 0, 0}}) ==
        std::vector<std::int32_t>{-1, 0, -2});

  constexpr auto kLargest = std::numeric_limits<std::uint64_t>::max();
  CHECK(reduced<std::uint64_t>(DType::uint64, ReduceOp::avg, {{kLargest}, {kLargest}, {kLargest - 3}})[0] ==
        kLargest - 1);
  constexpr auto kSmallest = std::numeric_limits<std::int64_t>::min();
  CHECK(reduced<std::int64_t>(DType::int64, ReduceOp::avg, {{kSmallest}, {kSmallest}, {kSmallest + 1}})[0] ==
        kSmallest);
}

TEST_CASE("reduce: a weighted mean is products, their sum and one division, without what has no weight") {
  const std::string_view before = kernels::isa_name();
  for (const std::string_view isa : kernels::supported_isas()) {
    kernels::select_isa(isa);
    for (std::size_t count = 1; count <= 70; ++count) {
      std::vector<float> a(count), none(count, std::numeric_limits<float>::quiet_NaN()), b(count), got(count);
      for (std::size_t i = 0; i < count; ++i) {
        a[i] = 0.1F + static_cast<float>(i);
        b[i] = -1.0F / static_cast<float>(i + 3);
      }
      const kernels::Input inputs[] = {{a.data(), 0.3}, {none.data(), 0.0}, {b.data(), 7.0}};
      kernels::reduce(DType::float32, ReduceOp::mean, inputs, got.data(), count, 7.3);
      for (std::size_t i = 0; i < count; ++i) CHECK(got[i] == (0.3F * a[i] + 7.0F * b[i]) / 7.3F);
    }
    const float zero = -0.0F;
    float sum = 1.0F;
    const kernels::Input inputs[] = {{&sum, 0.0}, {&zero, 1.0}};
    kernels::reduce(DType::float32, ReduceOp::mean, inputs, &sum, 1, 1.0);
    CHECK(std::signbit(sum));
  }
  kernels::select_isa(before);
}

TEST_CASE("reduce: the weighted mean of integers is exact and rounds down") {
  constexpr std::int64_t kSmallest = std::numeric_limits<std::int64_t>::min();
  const std::int64_t first[] = {kSmallest, -1, 5}, second[] = {kSmallest, 0, 6};
  std::int64_t got[3];
  const kernels::Input inputs[] = {{first, 0x1p52}, {second, 3.0}};
  kernels::reduce(DType::int64, ReduceOp::mean, inputs, got, 3, 0x1p52 + 3);
  CHECK(got[0] == kSmallest);
  CHECK(got[1] == -1);
  CHECK(got[2] == 5);
  const std::uint8_t most = 255;
  std::uint8_t byte = 0;
  const kernels::Input bytes[] = {{&most, 0x1p40}, {&most, 1.0}};
  kernels::reduce(DType::uint8, ReduceOp::mean, bytes, &byte, 1, 0x1p40 + 1);
  CHECK(byte == 255);
}

TEST_CASE("reduce: bools count as 0 or 1 whatever their byte, and a sum is lor") {
  const std::vector<std::vector<std::uint8_t>> ranks = {{0, 1, 255, 0}, {0, 2, 4, 3}};
  CHECK(reduced(DType::bool_, ReduceOp::sum, ranks) == std::vector<std::uint8_t>{0, 1, 1, 1});
  CHECK(reduced(DType::bool_, ReduceOp::prod, ranks) == std::vector<std::uint8_t>{0, 1, 1, 0});
  CHECK(reduced(DType::bool_, ReduceOp::bxor, ranks) == std::vector<std::uint8_t>{0, 0, 0, 1});
}

}  // namespace
}  // namespace samestep
