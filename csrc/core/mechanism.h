#pragma once

#include <cstdint>

namespace samestep {

/// What benchmarks/ablation.py can switch off; the values are its bit numbers, and those of removed mechanisms stay
/// unused.
enum class Mechanism : std::uint8_t {
  cache_line_demotion = 0,
  late_first_poll = 1,
  cpu_numbers = 2,
  oversubscribed_sleep = 3,
  line_ownership = 4,
  single_copy_path = 5,
  copy_in_copy_out_path = 6,
  split_path = 7,
  nontemporal_path = 8,
  last_arrival_timing = 9,
  prestaging = 10,
  two_rank_swap = 11,
  dynamic_chunks = 13,
  tiny_sums = 15,
  release_prefetch = 16,
  expected_path = 17,
  fast_path = 18,
  inline_progress = 19,
};

}  // namespace samestep
