#pragma once

#include <cstddef>

#include "floats.h"

// What ranks bring to a collective in tests, and what must come out: exact in float32.

inline constexpr std::size_t kPeriod = 17;

inline float element(int rank, std::size_t i) { return static_cast<float>(i % kPeriod) + static_cast<float>(rank); }

inline Floats contribution(int rank, std::size_t count) {
  Floats period(kPeriod);
  for (std::size_t i = 0; i < kPeriod; ++i) period[i] = element(rank, i);
  return repeated(period, count);
}

inline Floats sum(int size, std::size_t count) {
  Floats period(kPeriod);
  for (std::size_t i = 0; i < kPeriod; ++i) {
    for (int rank = 0; rank < size; ++rank) period[i] += element(rank, i);
  }
  return repeated(period, count);
}
