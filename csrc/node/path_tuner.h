#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>

namespace samestep {

/// Selects the path of operations of one type on memory that is not shared: CMA or copy-in/copy-out. The faster one
/// depends on the processor, its placement by the hypervisor, and the kernel version. So operations are timed: for each
/// power of two of the size all paths are tried in turn, then the fastest is used, and others now and then. All paths
/// give the same bits.
///
/// Rank 0 selects the path of a collective and posts it with its header.
class PathTuner {
 public:
  /// `single_copy`: CMA by the receiver. `single_copy_split`: CMA by both ends. `copy_in_copy_out`: through the stages
  /// in shared memory; `_nt`: with non-temporal stores.
  enum class Path : std::uint8_t { single_copy, copy_in_copy_out, single_copy_split, copy_in_copy_out_nt };
  static constexpr std::array kTwoPaths{Path::single_copy, Path::copy_in_copy_out};

  /// The path of the next operation. `open`: the possible paths, at least two, and the same for all operations of a
  /// size.
  Path choose(std::size_t nbytes, std::span<const Path> open = kTwoPaths);
  /// The path of the last operation of this size; `single_copy` if there was none. Any rank may call it.
  Path last_choice(std::size_t nbytes) { return entry(nbytes).last_choice; }
  void record_choice(std::size_t nbytes, Path path) { entry(nbytes).last_choice = path; }
  /// Records the duration of an operation since its last rank began. Negative ones are ignored, see WrappingTimestamp.
  void record_time(std::size_t nbytes, Path path, double seconds);

 private:
  static constexpr std::size_t kTries = 3;            // of each path at first; the shortest of the last so many counts
  static constexpr std::uint64_t kExploreEvery = 64;  // operations

  struct Times {
    std::array<double, kTries> last{};
    std::uint64_t n = 0;
    double shortest() const;
  };
  struct Size {
    std::array<Times, 4> paths;
    std::uint64_t n_started = 0;
    Path last_choice = Path::single_copy;
  };
  Size& entry(std::size_t nbytes);

  std::map<int, Size> sizes_;  // by power of two
};

}  // namespace samestep
