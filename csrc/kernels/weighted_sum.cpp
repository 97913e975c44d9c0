#include "kernels/weighted_sum.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "core/reduce_op.h"
#include "kernels/half.h"
#include "kernels/reduce.h"

namespace samestep::kernels {
namespace {

constexpr std::size_t kBlock = 1024;  // elements: some of each array fit into the first-level cache
constexpr std::size_t kMaxTerms = 2;
constexpr std::size_t kMaxAtOnce = 3;  // inputs that `reduce_into` adds one after another; of four it adds two pairs

constexpr std::size_t kDigits = 4;  // of the sum of an integer
constexpr unsigned kDigitBits = 32;
__extension__ using Int128 = __int128;

/// From `count` elements to their sums of one term. That of an integer is its product with `weight`.
using Widen = void (*)(const std::byte* from, std::byte* to, std::size_t count, double weight);

template <class From, class To, class Convert>
void widen_each(const std::byte* from, std::byte* to, std::size_t count, Convert convert) {
  for (std::size_t i = 0; i < count; ++i) {
    From narrow;
    std::memcpy(&narrow, from + i * sizeof narrow, sizeof narrow);
    const To wide = convert(narrow);
    std::memcpy(to + i * sizeof wide, &wide, sizeof wide);
  }
}

using Digits = std::array<std::int64_t, kDigits>;

template <class Integer>
void weigh_integers(const std::byte* from, std::byte* to, std::size_t count, double weight) {
  const auto factor = static_cast<std::int64_t>(weight);
  widen_each<Integer, Digits>(from, to, count, [factor](Integer x) {
    Int128 left = Int128{factor} * x;
    Digits digits;
    for (std::int64_t& digit : digits) {
      digit = static_cast<std::uint32_t>(left);
      left >>= kDigitBits;
    }
    digits.back() = static_cast<std::int32_t>(digits.back());
    return digits;
  });
}

using Halves [[gnu::vector_size(8)]] = std::uint16_t;
using Words [[gnu::vector_size(16)]] = std::uint32_t;
using Ints [[gnu::vector_size(16)]] = std::int32_t;
using Floats [[gnu::vector_size(16)]] = float;

template <class Four, class One>
void widen_halves(const std::byte* from, std::byte* to, std::size_t count, Four four, One one) {
  constexpr std::size_t kLanes = 4;
  const std::size_t whole = count - count % kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes) {
    Halves narrow;
    std::memcpy(&narrow, from + i * sizeof(std::uint16_t), sizeof narrow);
    const Floats wide = four(__builtin_convertvector(narrow, Words));
    std::memcpy(to + i * sizeof(float), &wide, sizeof wide);
  }
  widen_each<std::uint16_t, float>(from + whole * sizeof(std::uint16_t), to + whole * sizeof(float), count - whole,
                                   one);
}

void widen_float16(const std::byte* from, std::byte* to, std::size_t count, double) {
  widen_halves(
      from, to, count, [](Words words) { return detail::widen_float16<Floats, Ints, Words>(words); }, float16_to_float);
}

void widen_bfloat16(const std::byte* from, std::byte* to, std::size_t count, double) {
  widen_halves(from, to, count, [](Words words) { return __builtin_bit_cast(Floats, words << 16); }, bfloat16_to_float);
}

/// Null where elements are added as they are.
Widen widening_of(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return widen_float16;
    case DType::bfloat16:
      return widen_bfloat16;
    case DType::int8:
      return weigh_integers<std::int8_t>;
    case DType::int16:
      return weigh_integers<std::int16_t>;
    case DType::int32:
      return weigh_integers<std::int32_t>;
    case DType::int64:
      return weigh_integers<std::int64_t>;
    case DType::uint8:
      return weigh_integers<std::uint8_t>;
    case DType::uint16:
      return weigh_integers<std::uint16_t>;
    case DType::uint32:
      return weigh_integers<std::uint32_t>;
    case DType::uint64:
      return weigh_integers<std::uint64_t>;
    default:
      return nullptr;
  }
}

void fill_identity(DType dtype, std::byte* out, std::size_t count) {
  if (dtype == DType::float32) {
    // x + -0.0 is x for every x, while -0.0 + 0.0 would be 0.0.
    std::fill_n(reinterpret_cast<float*>(out), count, -0.0F);
  } else if (dtype == DType::float64) {
    std::fill_n(reinterpret_cast<double*>(out), count, -0.0);
  } else {
    std::memset(out, 0, count * itemsize(dtype));
  }
}

struct WeightedSum {
  DType dtype;        // of the sums
  std::size_t words;  // of the sum of an element of a term
  std::size_t term_itemsize;
  Widen widen;
  std::span<const WeightedTerm> terms;
  std::span<const void* const> sums;
  std::byte* out;

  bool is_one_pass() const { return widen == nullptr && terms.size() + sums.size() <= kMaxAtOnce; }
};

/// A block of at most kBlock elements, unless it is one pass.
void add_block(const WeightedSum& task, std::size_t first, std::size_t count) {
  alignas(64) std::byte widened[kMaxTerms][kBlock * sizeof(double)];
  alignas(64) std::byte partial[kBlock * sizeof(double)];
  std::array<Input, kMaxAtOnce> inputs;
  std::size_t n = 0;
  for (const WeightedTerm& term : task.terms) {
    // Zeros that change no bit, see WeightedTerm: they need no pass over memory.
    if (term.data == nullptr) continue;
    const std::byte* data = static_cast<const std::byte*>(term.data) + first / task.words * task.term_itemsize;
    if (task.widen != nullptr) {
      task.widen(data, widened[n], count / task.words, term.weight);
      data = widened[n];
    }
    inputs[n++] = {data, task.dtype == DType::int64 ? 1.0 : term.weight};
  }
  const std::size_t offset = first * itemsize(task.dtype);
  std::size_t next = 0;
  while (n < kMaxAtOnce && next < task.sums.size())
    inputs[n++] = {static_cast<const std::byte*>(task.sums[next++]) + offset};
  if (n == 0) return fill_identity(task.dtype, task.out + offset, count);
  while (true) {
    const bool is_last = next == task.sums.size();
    void* const to = is_last ? task.out + offset : partial;  // `out` may be the sum that is added last
    // Partial sums have the factor 1, which changes no bit, so that one operator serves all inputs.
    reduce_into(task.dtype, ReduceOp::premul, {inputs.data(), n}, {&to, 1}, count);
    if (is_last) return;
    inputs[0] = {to};
    inputs[1] = {static_cast<const std::byte*>(task.sums[next++]) + offset};
    n = 2;
  }
}

}  // namespace

std::optional<DType> sum_dtype(DType dtype) {
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
    case DType::complex64:
      return DType::float32;
    case DType::complex128:
      return DType::float64;
    case DType::float32:
    case DType::float64:
      return dtype;
    default:
      return is_integer(dtype) ? std::optional(DType::int64) : std::nullopt;
  }
}

std::size_t sum_words(DType dtype) { return is_integer(dtype) ? kDigits : is_complex(dtype) ? 2 : 1; }

void add_weighted(DType dtype, std::span<const WeightedTerm> terms, std::span<const void* const> sums, void* out,
                  std::size_t count) {
  // Real and imaginary parts are weighted and added in the same manner, so that complex numbers are pairs of reals
  // here.
  const DType wide = *sum_dtype(dtype);
  const std::size_t words = is_complex(dtype) ? 1 : sum_words(dtype);
  const std::size_t term_itemsize = is_complex(dtype) ? itemsize(wide) : itemsize(dtype);
  const WeightedSum task{wide, words, term_itemsize, widening_of(dtype), terms, sums, static_cast<std::byte*>(out)};
  // One pass reads and writes each array once anyway. Otherwise intermediate results of a block stay in the cache.
  const std::size_t block = task.is_one_pass() ? count : kBlock;
  for (std::size_t first = 0; first < count; first += block) add_block(task, first, std::min(block, count - first));
}

void divide_integers(void* sums, std::size_t count, double divisor) {
  const auto by = static_cast<std::int64_t>(divisor);
  auto* const words = static_cast<std::int64_t*>(sums);
  for (std::size_t i = 0; i < count; i += kDigits) {
    Int128 sum = 0;
    for (std::size_t k = kDigits; k-- > 0;) sum = (sum << kDigitBits) + words[i + k];
    words[i] = static_cast<std::int64_t>(sum / by - (sum % by < 0));
  }
}

}  // namespace samestep::kernels
