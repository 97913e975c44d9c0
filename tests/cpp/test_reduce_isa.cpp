#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "isa_restored.h"
#include "kernels/isa.h"
#include "kernels/reduce.h"
#include "reference_half.h"

namespace samestep {
namespace {

using Bytes = std::vector<std::byte>;

constexpr DType kTypes[] = {DType::float16, DType::bfloat16,  DType::float32,
                            DType::float64, DType::complex64, DType::complex128};
constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::prod, ReduceOp::min,
                             ReduceOp::max, ReduceOp::avg,  ReduceOp::premul};

bool fits(DType dtype, ReduceOp op) { return !is_complex(dtype) || (op != ReduceOp::min && op != ReduceOp::max); }

template <class T>
T read(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

bool is_nan(DType dtype, const std::byte* at) {
  if (dtype == DType::float16) return std::isnan(reference::widen(reference::kFloat16, read<std::uint16_t>(at)));
  if (dtype == DType::bfloat16) return std::isnan(reference::widen(reference::kBFloat16, read<std::uint16_t>(at)));
  if (dtype == DType::float32 || dtype == DType::complex64) return std::isnan(read<float>(at));
  return std::isnan(read<double>(at));
}

// The first part (half an element of complex types) with other bits, or -1. NaN equals NaN.
std::ptrdiff_t first_difference(DType dtype, const std::byte* a, const std::byte* b, std::size_t nbytes) {
  const std::size_t part = is_complex(dtype) ? itemsize(dtype) / 2 : itemsize(dtype);
  for (std::size_t at = 0; at < nbytes; at += part) {
    if (std::memcmp(a + at, b + at, part) == 0 || (is_nan(dtype, a + at) && is_nan(dtype, b + at))) continue;
    return static_cast<std::ptrdiff_t>(at / part);
  }
  return -1;
}

// Any bits; one number in four has an exponent of all zeros or all ones: zeros, denormals, infinities, NaN.
Bytes random_bytes(DType dtype, std::size_t nbytes, std::mt19937_64& random) {
  Bytes bytes(nbytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  if (!is_floating(dtype) && !is_complex(dtype)) return bytes;
  const std::size_t part = is_complex(dtype) ? itemsize(dtype) / 2 : itemsize(dtype);
  for (std::size_t at = 0; at + part <= nbytes; at += part) {
    if (random() % 4 != 0) continue;
    const auto edge = static_cast<std::byte>(random() % 2 == 0 ? 0x7f : 0);
    bytes[at + part - 1] = (bytes[at + part - 1] & std::byte{0x80}) | edge;
    if (random() % 2 == 0) bytes[at + part - 2] = edge == std::byte{} ? std::byte{} : std::byte{0xf0};
    if (random() % 2 == 0) std::fill_n(&bytes[at], part - 2, std::byte{});
  }
  return bytes;
}

// `n` buffers at odd addresses, and guards around them that nothing may touch.
class Buffers {
 public:
  static constexpr std::size_t kGuard = 67;

  Buffers(DType dtype, std::size_t n, std::size_t nbytes, std::mt19937_64& random) : nbytes_(nbytes) {
    for (std::size_t i = 0; i < n; ++i) all_.push_back(random_bytes(dtype, nbytes + 2 * kGuard, random));
    before_ = all_;
  }

  std::byte* at(std::size_t i) { return &all_[i][kGuard]; }

  bool guards_are_whole() const {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (std::memcmp(all_[i].data(), before_[i].data(), kGuard) != 0) return false;
      if (std::memcmp(&all_[i][kGuard + nbytes_], &before_[i][kGuard + nbytes_], kGuard) != 0) return false;
    }
    return true;
  }

 private:
  std::vector<Bytes> all_, before_;
  std::size_t nbytes_;
};

struct Shape {
  std::size_t n_inputs, n_outs, n_in_place, count;
};

// The bits of every result are those of a single result with portable code; nothing else is written.
void check(DType dtype, ReduceOp op, const Shape& shape, std::mt19937_64& random) {
  const std::size_t nbytes = shape.count * itemsize(dtype);
  const Buffers original(dtype, shape.n_inputs, nbytes, random);
  Buffers separate(dtype, shape.n_outs, nbytes, random);
  const auto inputs_of = [&](Buffers& buffers) {
    std::vector<kernels::Input> inputs;
    for (std::size_t i = 0; i < shape.n_inputs; ++i) inputs.push_back({buffers.at(i), 0.75 - double(i)});
    return inputs;
  };

  kernels::select_isa("portable");
  Bytes expected(nbytes);
  Buffers buffers = original;
  kernels::reduce(dtype, op, inputs_of(buffers), expected.data(), shape.count);

  for (const auto isa : kernels::supported_isas()) {
    kernels::select_isa(isa);
    buffers = original;
    std::vector<void*> outs;
    for (std::size_t k = 0; k < shape.n_outs; ++k) {
      outs.push_back(k < shape.n_in_place ? buffers.at(shape.n_inputs - 1 - k) : separate.at(k));
    }
    kernels::reduce_into(dtype, op, inputs_of(buffers), outs, shape.count);

    INFO(isa, " ", name(dtype), " ", name(op), ", inputs ", shape.n_inputs, ", outs ", shape.n_outs, ", in place ",
         shape.n_in_place, ", count ", shape.count);
    for (const void* out : outs) {
      CHECK(first_difference(dtype, static_cast<const std::byte*>(out), expected.data(), nbytes) == -1);
    }
    CHECK(buffers.guards_are_whole());
    CHECK(separate.guards_are_whole());
  }
}

template <class Use>
void for_each_type_and_op(Use use) {
  for (const DType dtype : kTypes) {
    for (const ReduceOp op : kOps) {
      if (fits(dtype, op)) use(dtype, op);
    }
  }
}

TEST_CASE("isa: every count to 70 gives the bits of the portable code, into one result and in place") {
  const IsaRestored restored;
  std::mt19937_64 random(21);
  for_each_type_and_op([&](DType dtype, ReduceOp op) {
    for (std::size_t count = 0; count <= 70; ++count) {
      check(dtype, op, {.n_inputs = 1 + count % 9, .n_outs = 1, .n_in_place = 0, .count = count}, random);
      check(dtype, op, {.n_inputs = 2, .n_outs = 2, .n_in_place = 2, .count = count}, random);
    }
  });
}

TEST_CASE("isa: 1 to 9 inputs into 1 to 9 results, some of them inputs") {
  const IsaRestored restored;
  std::mt19937_64 random(22);
  for_each_type_and_op([&](DType dtype, ReduceOp op) {
    for (std::size_t n_inputs = 1; n_inputs <= 9; ++n_inputs) {
      for (std::size_t n_outs = 1; n_outs <= 9; ++n_outs) {
        const std::size_t n_in_place = random() % (std::min(n_inputs, n_outs) + 1);
        check(dtype, op, {n_inputs, n_outs, n_in_place, 200 + random() % 500}, random);
      }
    }
  });
}

TEST_CASE("isa: more inputs than fit a step, and more elements than a block") {
  const IsaRestored restored;
  std::mt19937_64 random(23);
  for_each_type_and_op([&](DType dtype, ReduceOp op) {
    check(dtype, op, {.n_inputs = 33, .n_outs = 3, .n_in_place = 2, .count = 5003}, random);
  });
}

TEST_CASE("isa: integers and bools go into many results, too") {
  std::mt19937_64 random(24);
  for (const DType dtype : {DType::bool_, DType::int8, DType::uint16, DType::int32, DType::int64}) {
    const std::size_t count = 777, nbytes = count * itemsize(dtype);
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::lor, ReduceOp::bxor, ReduceOp::avg}) {
      if (dtype == DType::bool_ && op == ReduceOp::avg) continue;
      for (const std::size_t n : {1, 2, 3, 4, 7}) {
        Buffers buffers(dtype, n, nbytes, random), separate(dtype, 1, nbytes, random);
        std::vector<kernels::Input> inputs;
        std::vector<void*> outs = {separate.at(0)};
        for (std::size_t i = 0; i < n; ++i) {
          inputs.push_back({buffers.at(i)});
          outs.push_back(buffers.at(i));
        }
        Bytes expected(nbytes);
        kernels::reduce(dtype, op, inputs, expected.data(), count);
        kernels::reduce_into(dtype, op, inputs, outs, count);
        INFO(name(dtype), " ", name(op), ", ", n, " ranks");
        for (const void* out : outs) CHECK(std::memcmp(out, expected.data(), nbytes) == 0);
        CHECK(buffers.guards_are_whole());
        CHECK(separate.guards_are_whole());
      }
    }
  }
}

// Each of the 65536 patterns meets itself shifted through all patterns by `stride`, by the definition.
int wrong_half_sums(DType dtype, reference::HalfFormat format, unsigned stride) {
  std::vector<std::uint16_t> a(1 << 16), b(1 << 16), sums(1 << 16);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<std::uint16_t>(i);
    b[i] = static_cast<std::uint16_t>(i * 40503U + stride);
  }
  const std::vector<kernels::Input> inputs = {{a.data()}, {b.data()}};
  kernels::reduce(dtype, ReduceOp::sum, inputs, sums.data(), sums.size());
  int wrong = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto sum =
        static_cast<float>(reference::widen(format, a[i])) + static_cast<float>(reference::widen(format, b[i]));
    const std::uint16_t expected = reference::round(format, sum);
    const bool both_nan =
        std::isnan(reference::widen(format, sums[i])) && std::isnan(reference::widen(format, expected));
    wrong += sums[i] != expected && !both_nan;
  }
  return wrong;
}

TEST_CASE("isa: sums of all half patterns are rounded once, to nearest even") {
  const IsaRestored restored;
  for (const auto isa : kernels::supported_isas()) {
    kernels::select_isa(isa);
    CAPTURE(isa);
    for (const unsigned stride : {0x0U, 0x1U, 0x3ffU, 0x7c01U, 0x8000U, 0xfbffU}) {
      CHECK(wrong_half_sums(DType::float16, reference::kFloat16, stride) == 0);
      CHECK(wrong_half_sums(DType::bfloat16, reference::kBFloat16, stride) == 0);
    }
  }
}

TEST_CASE("isa: a factor that is any NaN at all gives NaN") {
  const IsaRestored restored;
  const double nan = std::bit_cast<double>(0xffff'ffff'ffff'ffffU);  // rounding up its bits would carry to 0
  for (const auto isa : kernels::supported_isas()) {
    kernels::select_isa(isa);
    for (const DType dtype : kTypes) {
      const Bytes ones(itemsize(dtype), std::byte{0x3c});
      Bytes out(itemsize(dtype));
      kernels::reduce(dtype, ReduceOp::premul, std::vector<kernels::Input>{{ones.data(), nan}}, out.data(), 1);
      INFO(isa, " ", name(dtype));
      CHECK(is_nan(dtype, out.data()));
    }
  }
}

TEST_CASE("isa: the fastest one is in use, and a choice lasts") {
  const IsaRestored restored;
  CHECK(kernels::supported_isas().front() == "portable");
  CHECK(kernels::isa_name() == kernels::supported_isas().back());
  for (const auto isa : kernels::supported_isas()) {
    kernels::select_isa(isa);
    CHECK(kernels::isa_name() == isa);
  }
}

TEST_CASE("isa: an unknown name is answered with those that would do") {
  const std::string_view before = kernels::isa_name();
  std::string text;
  try {
    kernels::select_isa("sse9");
  } catch (const InvalidArgumentError& error) {
    text = error.what();
  }
  CHECK(text.starts_with("instruction set 'sse9': this processor runs portable"));
  CHECK(kernels::isa_name() == before);
}

}  // namespace
}  // namespace samestep
