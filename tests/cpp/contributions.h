#pragma once

#include <cstddef>
#include <vector>

// What ranks bring to a collective in tests, and what must come out: exact in float32.

using Floats = std::vector<float>;

inline float element(int rank, std::size_t i) { return static_cast<float>(i % 17) + static_cast<float>(rank); }

inline Floats contribution(int rank, std::size_t count) {
  Floats values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = element(rank, i);
  return values;
}

inline Floats sum(int size, std::size_t count) {
  Floats values(count);
  for (int rank = 0; rank < size; ++rank) {
    for (std::size_t i = 0; i < count; ++i) values[i] += element(rank, i);
  }
  return values;
}
