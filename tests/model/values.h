#pragma once

#include <cstddef>
#include <span>

namespace model {

/// Elements at each end of a chunk of 128 KiB that are reduced; what lies between is left as it is.
inline constexpr std::size_t kSumEnd = 16;
inline constexpr std::size_t kSumAllTo = 1 << 14;

/// values[i] = first + (i / 1024) % 64, as one access of the rank that runs.
void fill(std::span<float> values, float first);
/// A violation unless values[i] == first + step * ((i / 1024) % 64).
void expect(std::span<const float> values, float first, float step);

}  // namespace model
