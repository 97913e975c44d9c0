#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/reduce_op.h"
#include "reference_half.h"

/// The reduction of one element by the contract of kernels/reduce.h; written for reading, not for speed.
namespace samestep::reference {

__extension__ using Int128 = __int128;

template <class T, class Combine>
T pairwise(const std::vector<T>& values, Combine combine, std::size_t first, std::size_t n) {
  if (n == 1) return values[first];
  std::size_t left = 1;
  while (2 * left < n) left *= 2;
  return combine(pairwise(values, combine, first, left), pairwise(values, combine, first + left, n - left));
}

template <class T, class Combine>
T pairwise(const std::vector<T>& values, Combine combine) {
  return pairwise(values, combine, 0, values.size());
}

template <class T>
struct Floating {
  using Element = T;

  T of(double x) const { return static_cast<T>(x); }

  T reduce(ReduceOp op, std::vector<T> xs, const std::vector<double>& factors) const {
    const auto smaller = [](T a, T b) { return std::isnan(a) ? a : std::isnan(b) ? b : b <= a ? b : a; };
    const auto larger = [](T a, T b) { return std::isnan(a) ? a : std::isnan(b) ? b : b >= a ? b : a; };
    if (op == ReduceOp::premul) {
      for (std::size_t r = 0; r < xs.size(); ++r) xs[r] *= static_cast<T>(factors[r]);
    }
    if (op == ReduceOp::prod) return pairwise(xs, [](T a, T b) { return a * b; });
    if (op == ReduceOp::min) return pairwise(xs, smaller);
    if (op == ReduceOp::max) return pairwise(xs, larger);
    const T sum = pairwise(xs, [](T a, T b) { return a + b; });
    return op == ReduceOp::avg ? sum * static_cast<T>(1.0 / static_cast<double>(xs.size())) : sum;
  }
};

struct Half {
  using Element = std::uint16_t;
  HalfFormat format;

  Element of(double x) const { return round(format, x); }

  Element reduce(ReduceOp op, const std::vector<Element>& xs, const std::vector<double>& factors) const {
    std::vector<float> wide;
    for (const Element x : xs) wide.push_back(static_cast<float>(widen(format, x)));
    return round(format, Floating<float>{}.reduce(op, wide, factors));
  }
};

template <class T>
struct ComplexOf {
  using Element = std::complex<T>;

  Element of(double x) const { return {static_cast<T>(x), static_cast<T>(1 - x)}; }

  Element reduce(ReduceOp op, const std::vector<Element>& xs, const std::vector<double>& factors) const {
    if (op == ReduceOp::prod) {
      return pairwise(xs, [](Element a, Element b) {
        return Element(a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real());
      });
    }
    std::vector<T> re, im;
    for (const Element& x : xs) {
      re.push_back(x.real());
      im.push_back(x.imag());
    }
    return {Floating<T>{}.reduce(op, re, factors), Floating<T>{}.reduce(op, im, factors)};
  }
};

template <class T>
struct Integer {
  using Element = T;

  T of(double x) const { return static_cast<T>(static_cast<int>(x)); }

  T reduce(ReduceOp op, const std::vector<T>& xs, const std::vector<double>& factors) const {
    Int128 sum = 0, n = static_cast<Int128>(xs.size());
    std::uint64_t scaled = 0, product = 1;  // modulo 2^64, then modulo the width
    T band = xs[0], bor = 0, bxor = 0;
    for (std::size_t r = 0; r < xs.size(); ++r) {
      const auto bits = static_cast<std::uint64_t>(xs[r]);
      sum += xs[r];
      scaled += bits * static_cast<std::uint64_t>(static_cast<std::int64_t>(factors[r]));
      product *= bits;
      band = static_cast<T>(band & xs[r]);
      bor = static_cast<T>(bor | xs[r]);
      bxor = static_cast<T>(bxor ^ xs[r]);
    }
    if (op == ReduceOp::premul) return static_cast<T>(scaled);
    if (op == ReduceOp::prod) return static_cast<T>(product);
    if (op == ReduceOp::min) return std::ranges::min(xs);
    if (op == ReduceOp::max) return std::ranges::max(xs);
    if (op == ReduceOp::avg) return static_cast<T>(sum / n - (sum / n * n > sum));
    if (op == ReduceOp::band) return band;
    if (op == ReduceOp::bor) return bor;
    if (op == ReduceOp::bxor) return bxor;
    if (op == ReduceOp::land) return std::ranges::find(xs, T{0}) == xs.end();
    if (op == ReduceOp::lor) return bor != 0;
    return static_cast<T>(sum);
  }
};

struct Bool {
  using Element = std::uint8_t;

  Element of(double x) const { return x > 0; }

  Element reduce(ReduceOp op, const std::vector<Element>& xs, const std::vector<double>&) const {
    const auto trues = std::ranges::count_if(xs, [](Element x) { return x != 0; });
    if (op == ReduceOp::bxor) return trues % 2 != 0;
    const bool all = op == ReduceOp::prod || op == ReduceOp::min || op == ReduceOp::band || op == ReduceOp::land;
    return all ? trues == static_cast<std::ptrdiff_t>(xs.size()) : trues > 0;
  }
};

/// Calls `use` with the reference for `dtype`.
template <class Use>
void with_reference(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::bool_:
      return use(Bool{});
    case DType::int8:
      return use(Integer<std::int8_t>{});
    case DType::int16:
      return use(Integer<std::int16_t>{});
    case DType::int32:
      return use(Integer<std::int32_t>{});
    case DType::int64:
      return use(Integer<std::int64_t>{});
    case DType::uint8:
      return use(Integer<std::uint8_t>{});
    case DType::uint16:
      return use(Integer<std::uint16_t>{});
    case DType::uint32:
      return use(Integer<std::uint32_t>{});
    case DType::uint64:
      return use(Integer<std::uint64_t>{});
    case DType::float16:
      return use(Half{kFloat16});
    case DType::bfloat16:
      return use(Half{kBFloat16});
    case DType::float32:
      return use(Floating<float>{});
    case DType::float64:
      return use(Floating<double>{});
    case DType::complex64:
      return use(ComplexOf<float>{});
    case DType::complex128:
      return use(ComplexOf<double>{});
    default:
      return;
  }
}

}  // namespace samestep::reference
