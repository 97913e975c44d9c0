#pragma once

#include <optional>
#include <span>
#include <utility>

#include "communicator/collective_args.h"

namespace samestep {

/// Whether an operation could overwrite parts of its input before it has read them: on `rank` the input shares memory
/// with the output, but not in place, as NCCL and our own algorithms expect it. In place are: reductions
/// whose buffers are equal; a gather whose input is block `rank` of its output; a scatter whose output is block `rank`
/// of its input. Source: NCCL documentation, "In-place Operations".
bool overwrites_input(const CollectiveArgs& args, int rank);

/// Memory of one of many arrays that are used together.
struct MemoryRange {
  const void* data = nullptr;
  std::size_t nbytes = 0;
  bool written = true;  ///< not only read
};

/// Two of the ranges, by index, that share memory of which one is written; the first by index comes first. O(n log n).
std::optional<std::pair<std::size_t, std::size_t>> find_conflict(std::span<const MemoryRange> ranges);

}  // namespace samestep
