#include <doctest/doctest.h>

#include <set>
#include <string>
#include <vector>

#include "communicator/signature.h"

namespace samestep {
namespace {

Shape shape_of(std::initializer_list<std::uint64_t> extents) {
  Shape shape;
  for (const std::uint64_t extent : extents) shape.extents[shape.n_dims++] = extent;
  return shape;
}

constexpr int kVerbCount = static_cast<int>(CollectiveType::close) + 1;

std::vector<Shape> many_shapes() {
  std::vector<Shape> shapes = {shape_of({}), shape_of({0}), shape_of({1, 1, 1, 1, 1, 1})};
  for (std::uint64_t i = 1; i < 200; ++i) {
    shapes.push_back(shape_of({i}));
    shapes.push_back(shape_of({i << 32}));
    for (std::uint64_t j = 0; j < 20; ++j) {
      shapes.push_back(shape_of({i, j}));
      shapes.push_back(shape_of({j, i, 1}));
    }
  }
  return shapes;
}

TEST_CASE("Signature::digest: equal for equal signatures") {
  const Signature a{CollectiveType::allreduce, DType::float32, ReduceOp::sum, -1, shape_of({2, 3})};
  Signature b = a;
  CHECK(a.digest() == b.digest());
  b.shape.extents[5] = 7;  // beyond n_dims
  CHECK(a.digest() == b.digest());
}

TEST_CASE("Signature::digest: no two of 100000 signatures share one") {
  std::set<std::uint64_t> digests;
  std::size_t n = 0;
  const auto add = [&](const Signature& signature) {
    digests.insert(signature.digest());
    ++n;
  };
  for (const Shape& shape : many_shapes()) {
    for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
      for (const std::int32_t root : {-1, 0, 1, 1 << 30})
        add({CollectiveType::reduce, dtype, ReduceOp::max, root, shape});
    }
  }
  for (int verb = 0; verb < kVerbCount; ++verb) {
    for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
      for (int op = 0; op < kReduceOpCount; ++op) {
        const auto reduce_op = static_cast<ReduceOp>(op);
        add({static_cast<CollectiveType>(verb), static_cast<DType>(dtype), reduce_op, -1, Shape::flat(77'777)});
      }
    }
  }
  CHECK(digests.size() == n);
}

TEST_CASE("name(CollectiveType): every collective has one of its own") {
  std::set<std::string_view> names;
  for (int verb = 0; verb < kVerbCount; ++verb) names.insert(name(static_cast<CollectiveType>(verb)));
  CHECK(names.size() == kVerbCount);
  CHECK(name(CollectiveType::alltoallv) == "alltoallv");
}

TEST_CASE("Signature::describe: what a user wrote") {
  const Shape shape = shape_of({2, 3});
  const std::pair<Signature, std::string> kRows[] = {
      {{CollectiveType::allreduce, DType::float32, ReduceOp::sum, -1, shape}, "allreduce of float32[2, 3] with op sum"},
      {{CollectiveType::reduce, DType::int8, ReduceOp::max, 2, shape}, "reduce of int8[2, 3] with op max to root 2"},
      {{CollectiveType::bcast, DType::float64, ReduceOp::sum, 0, shape_of({})}, "bcast of float64[] from root 0"},
      {{CollectiveType::gather, DType::bool_, ReduceOp::sum, 1, Shape::flat(9)}, "gather of bool[9] to root 1"},
      {{CollectiveType::scatterv, DType::uint8, ReduceOp::sum, 1, {}}, "scatterv of uint8 from root 1"},
      {{CollectiveType::allgatherv, DType::bfloat16, ReduceOp::sum, -1, {}}, "allgatherv of bfloat16"},
      {{CollectiveType::reduce_scatter, DType::complex64, ReduceOp::avg, -1, Shape::flat(0)},
       "reduce_scatter of complex64[0] with op avg"},
      {{}, "barrier"},
      {{CollectiveType::make_group}, "group creation"},
  };
  for (const auto& [signature, text] : kRows) CHECK(signature.describe() == text);
}

TEST_CASE("mismatch_text: ranks that agree are named together, in order of the first") {
  const std::string two = "allreduce of float32[2] with op sum", three = "allreduce of float32[3] with op sum";
  CHECK(mismatch_text("world", 12, {two, three, two}) ==
        "allreduce (operation 12 of group 'world'): the ranks do not agree. ranks 0, 2: allreduce of float32[2] with "
        "op sum; rank 1: allreduce of float32[3] with op sum. All ranks must call the same operations in the same "
        "order, with equal shapes, dtypes, ops and roots.");
}

TEST_CASE("description: a long call is cut, and the operation is not") {
  const std::size_t most = sizeof(Description) - 1;
  for (const std::string operation : {"allreduce of float32[2] with op sum", "bcast of int8[1] from root 0"}) {
    for (std::size_t length = 0; length < 2 * most; ++length) {
      const std::string call(length, 'x');
      const std::string text = description(call, operation).data();
      CHECK(text.ends_with(operation));
      const bool fits = length + 1 + operation.size() <= most;
      CHECK(text.size() == (length == 0 ? operation.size() : fits ? length + 1 + operation.size() : most));
      if (!fits) CHECK(text.find("xxx...\n") != std::string::npos);
    }
  }
  std::string letters;
  while (letters.size() < most) letters += "\u00e9";
  for (const std::string before : {"", "x"}) {  // whole letters only
    const std::string text = description(before + letters, "barrier").data();
    CHECK((text.find("...") - before.size()) % 2 == 0);
  }
  CHECK(std::string(description("call", std::string(2 * most, 'y')).data()) == std::string(most, 'y'));
}

TEST_CASE("mismatch_text: no single verb is blamed when verbs differ") {
  CHECK(mismatch_text("world", 3, {"barrier", "bcast of int8[1] from root 0"})
            .starts_with("operation 3 of group 'world': the ranks do not agree. rank 0: barrier; rank 1: bcast of"));
}

TEST_CASE("mismatch_text: many ranks are named by ranges") {
  std::vector<std::string> descriptions(12, "barrier");
  for (const std::size_t odd : {3, 7, 8}) descriptions[odd] = "close";
  const std::string text = mismatch_text("g", 1, descriptions);
  CHECK(text.find("ranks 0-2, 4-6, 9-11: barrier; ranks 3, 7, 8: close.") != std::string::npos);
}

}  // namespace
}  // namespace samestep
