#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/formats.h"
#include "kernels/reduce_args.h"

/// What happens to one pack of elements: how it is read from memory (a *format*), how two values are
/// combined (an *operator*), and what is done with the finished value. A `Rule` joins the three, and
/// `kernels/tree.h` runs a rule over buffers. Internal to `kernels/`.
namespace samestep::kernels::SAMESTEP_ISA {

template <class R>
struct Complex {
  R re, im;
};

// ---- Operators, on values and on vectors of them.

struct Plus {
  template <class T>
  SAMESTEP_INLINE static T combine(T a, T b) {
    return a + b;
  }
};

struct Times {
  template <class T>
  SAMESTEP_INLINE static T combine(T a, T b) {
    return a * b;
  }
  template <class R>
  SAMESTEP_INLINE static Complex<R> combine(Complex<R> a, Complex<R> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

// Where b is NaN every comparison is false, which picks b. Where a is NaN, a itself has to be picked; for
// integers no a differs from itself.
struct Least {
  template <class T>
  SAMESTEP_INLINE static T combine(T a, T b) {
    const T winner = a < b ? a : b;
    return a != a ? a : winner;
  }
};

struct Greatest {
  template <class T>
  SAMESTEP_INLINE static T combine(T a, T b) {
    const T winner = a > b ? a : b;
    return a != a ? a : winner;
  }
};

struct And {
  template <class T>
  SAMESTEP_INLINE static T combine(T a, T b) {
    return a & b;
  }
};

struct Or {
  template <class T>
  SAMESTEP_INLINE static T combine(T a, T b) {
    return a | b;
  }
};

struct Xor {
  template <class T>
  SAMESTEP_INLINE static T combine(T a, T b) {
    return a ^ b;
  }
};

// ---- What is done with the finished value.

struct Keep {
  template <class V>
  SAMESTEP_INLINE V operator()(V value) const {
    return value;
  }
};

template <class Factor>
struct Multiply {
  Factor factor;
  template <class V>
  SAMESTEP_INLINE V operator()(V value) const {
    return value * factor;
  }
};

template <class Divisor>
struct Divide {
  Divisor divisor;
  template <class V>
  SAMESTEP_INLINE V operator()(V value) const {
    return value / divisor;
  }
};

template <class V, class Divisor = std::int32_t>
struct FloorDivide {
  Divisor divisor;  // > 0

  SAMESTEP_INLINE V operator()(V value) const {
    // Most sums fit half the width, and that division is several times cheaper.
    if constexpr (sizeof(V) > sizeof divisor) {
      const auto half = static_cast<Half>(value);
      if (half == value) return static_cast<V>(FloorDivide<Half, Divisor>{divisor}(half));
    }
    const V d = static_cast<V>(divisor);
    if constexpr (kSigned) {
      return value / d - (value % d < 0);
    } else {
      return value / d;
    }
  }

 private:
  static constexpr bool kSigned = static_cast<V>(-1) < V{1};  // std::is_signed does not know __int128
  using Half = std::conditional_t<sizeof(V) == 16, std::conditional_t<kSigned, std::int64_t, std::uint64_t>,
                                  std::conditional_t<kSigned, std::int32_t, std::uint32_t>>;
};

// ---- Rules.

/// The pack that begins with element i of one rank's buffer. Trees are built of functions of i like this.
template <class Format>
struct Term {
  const std::byte* data;

  SAMESTEP_INLINE typename Format::Values operator()(std::size_t i) const {
    return Format::read(data + i * sizeof(typename Format::Element));
  }
};

template <class Format_, class Operator_, class Finish_ = Keep>
struct Rule {
  using Format = Format_;
  using Operator = Operator_;
  using Values = typename Format::Values;

  [[no_unique_address]] Finish_ finish = {};

  /// The elements of `input` from element `first` on.
  SAMESTEP_INLINE static auto term(const Input& input, std::size_t first) {
    return Term<Format>{static_cast<const std::byte*>(input.data) + first * sizeof(typename Format::Element)};
  }
  SAMESTEP_INLINE typename Format::Packed result(Values values) const {
    for (auto& part : values.part) part = finish(part);
    return Format::pack(values);
  }
};

/// The sum of each rank's elements times its factor.
template <class Format, class Finish = Keep>
struct PremulRule : Rule<Format, Plus, Finish> {
  using Value = typename Format::Value;

  struct ScaledTerm {
    Term<Format> term;
    Value factor;
    SAMESTEP_INLINE typename Format::Values operator()(std::size_t i) const {
      auto values = term(i);
      for (auto& part : values.part) part = part * factor;
      return values;
    }
  };
  SAMESTEP_INLINE static auto term(const Input& input, std::size_t first) {
    return ScaledTerm{Rule<Format, Plus>::term(input, first), factor_of(input)};
  }

 protected:
  SAMESTEP_INLINE static Value factor_of(const Input& input) {
    if constexpr (std::is_floating_point_v<Value>) {
      // A NaN without low bits, which bfloat16 relies on.
      return input.factor != input.factor ? __builtin_nanf("") : static_cast<Value>(input.factor);
    } else {
      return static_cast<Value>(static_cast<std::int64_t>(input.factor));  // negative ones wrap, as they should
    }
  }
};

/// The same over a divisor. A rank of the factor 0 adds -0.0, or 0, whatever its elements are.
template <class Format, class Finish>
struct MeanRule : PremulRule<Format, Finish> {
  using Value = typename Format::Value;

  struct WeightedTerm {
    Term<Format> term;
    Value factor;
    bool is_read;
    SAMESTEP_INLINE typename Format::Values operator()(std::size_t i) const {
      typename Format::Values values = {};
      if (is_read) values = term(i);
      for (auto& part : values.part) part = part * factor;
      return values;
    }
  };
  SAMESTEP_INLINE static auto term(const Input& input, std::size_t first) {
    // The product of zeros and a negative factor is -0.0.
    const bool is_read = input.factor != 0;
    const Value factor = is_read ? PremulRule<Format, Finish>::factor_of(input) : static_cast<Value>(-1);
    return WeightedTerm{Rule<Format, Plus>::term(input, first), factor, is_read};
  }
};

}  // namespace samestep::kernels::SAMESTEP_ISA
