#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "core/error.h"
#include "core/reduce_op.h"

namespace samestep {
namespace {

std::string error_text(DType dtype, ReduceOp op, double factor = 1.0) {
  try {
    require_reducible(dtype, {op, factor});
    return "";
  } catch (const InvalidArgumentError& error) {
    return error.what();
  }
}

// One row per kind of type, one column per op: sum prod min max avg band bor bxor land lor premul.
constexpr std::pair<DType, std::string_view> kFits[] = {
    {DType::bool_, "yyyynyyyyyn"},     {DType::int8, "yyyyyyyyyyy"},       {DType::uint64, "yyyyyyyyyyy"},
    {DType::float16, "yyyyynnnnny"},   {DType::bfloat16, "yyyyynnnnny"},   {DType::float64, "yyyyynnnnny"},
    {DType::complex64, "yynnynnnnny"}, {DType::complex128, "yynnynnnnny"}, {DType::float8_e5m2, "nnnnnnnnnnn"},
};

TEST_CASE("require_reducible: each op fits the types of the table") {
  for (const auto& [dtype, fits] : kFits) {
    for (int op = 0; op < kReduceOpCount; ++op) {
      CAPTURE(name(dtype));
      CAPTURE(name(static_cast<ReduceOp>(op)));
      CHECK(error_text(dtype, static_cast<ReduceOp>(op)).empty() == (fits[static_cast<std::size_t>(op)] == 'y'));
    }
  }
}

TEST_CASE("require_reducible: the text names op, type and what would fit") {
  CHECK(error_text(DType::complex64, ReduceOp::min) ==
        "op min does not fit complex64: complex arrays have sum, prod, avg and premul");
}

TEST_CASE("require_reducible: a factor for integers is a whole number of 64 bits") {
  for (const double factor : {0.0, -3.0, 0x1p62, -0x1p63})
    CHECK(error_text(DType::int32, ReduceOp::premul, factor) == "");
  for (const double factor : {0.5, 0x1p63, 1e300, double(INFINITY), double(NAN)}) {
    CAPTURE(factor);
    CHECK(error_text(DType::int32, ReduceOp::premul, factor).starts_with("op premul("));
    CHECK(error_text(DType::float32, ReduceOp::premul, factor) == "");
  }
}

}  // namespace
}  // namespace samestep
