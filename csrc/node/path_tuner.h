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
/// Rank 0 selects the path of a collective and posts it with its header. The others expect the path that it selected
/// last, and check only then whether CMA can reach their buffers. If rank 0 selects CMA where another rank has not
/// checked, that operation uses copy-in/copy-out, and rank 0 selects CMA once more.
class PathTuner {
 public:
  /// `single_copy`: CMA by the receiver. `single_copy_split`: CMA by both ends. `copy_in_copy_out`: through the stages
  /// in shared memory; `_nt`: with non-temporal stores.
  enum class Path : std::uint8_t { single_copy, copy_in_copy_out, single_copy_split, copy_in_copy_out_nt };
  static constexpr std::array kTwoPaths{Path::single_copy, Path::copy_in_copy_out};

  /// The path of the next operation. `open`: the possible paths, at least two, and the same for all operations of a
  /// size.
  Path choose(std::size_t nbytes, std::span<const Path> open = kTwoPaths);
  static bool uses_stages(Path path) { return path == Path::copy_in_copy_out || path == Path::copy_in_copy_out_nt; }
  /// Whether the last choice for this size was copy-in/copy-out. Any rank may call it.
  bool expects_stages(std::size_t nbytes);
  /// The same, but false while paths are tried in turn, so that CMA is checked for then.
  bool needs_no_cma(std::size_t nbytes);
  /// Records the choice of rank 0 and the path that was used.
  void record_choice(std::size_t nbytes, Path chosen, Path used);
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
    std::uint64_t n_chosen = 0, n_recorded = 0;
    Path last_choice = Path::single_copy;
    bool is_due = false;          // another path was used instead
    std::uint64_t n_repeats = 0;  // of that choice
  };
  Size& entry(std::size_t nbytes);

  std::map<int, Size> sizes_;  // by power of two
};

}  // namespace samestep
