#include "values.h"

#include <string>
#include <utility>
#include <vector>

#include "explorer.h"

namespace model {
namespace {

constexpr std::size_t kRun = 1024, kRuns = 64;
constexpr std::size_t kPiece = 1 << 15;  // of long runs only the ends of these: a chunk of csrc/node has as many

/// Where the values that count begin and end.
std::vector<std::pair<std::size_t, std::size_t>> spans(std::size_t count) {
  if (count < 2 * kPiece || count % kPiece != 0) return {{0, count}};
  std::vector<std::pair<std::size_t, std::size_t>> found;
  for (std::size_t at = 0; at < count; at += kPiece) {
    found.emplace_back(at, at + kSumEnd);
    found.emplace_back(at + kPiece - kSumEnd, at + kPiece);
  }
  return found;
}

}  // namespace

void fill(std::span<float> values, float first) {
  explorer().plain(values.data(), values.size_bytes(), true);
  for (const auto& [begin, end] : spans(values.size())) {
    for (std::size_t i = begin; i < end; ++i) values[i] = first + static_cast<float>(i / kRun % kRuns);
  }
}

void expect(std::span<const float> values, float first, float step) {
  explorer().plain(values.data(), values.size_bytes(), false);
  for (const auto& [begin, end] : spans(values.size())) {
    for (std::size_t i = begin; i < end; ++i) {
      const float wanted = first + step * static_cast<float>(i / kRun % kRuns);
      if (values[i] == wanted) continue;
      violated("element " + std::to_string(i) + " of " + std::to_string(values.size()) + " is " +
               std::to_string(values[i]) + " and not " + std::to_string(wanted));
    }
  }
}

}  // namespace model
