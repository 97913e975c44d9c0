#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>

namespace samestep {

/// Which way operations of one kind on private memory take: through shared memory or through the kernel. Which one is
/// fastest depends on the processor, on where the hypervisor puts it and on the kernel, so that operations are timed:
/// for each doubling of the size all are tried in turn, then the fastest one is taken, and from time to time another.
/// All give the same bits.
///
/// Of collectives rank 0 decides and says so in its announcement, of a message its receiver.
class WayChoice {
 public:
  /// `divided`: through the kernel, by both ends. `past_caches`: through shared memory, written past the caches.
  enum class Way : std::uint8_t { direct, staged, divided, past_caches };
  static constexpr std::array kTwoWays{Way::direct, Way::staged};

  /// For the next operation, to which these ways are open, the same ones for each of its size.
  Way next(std::size_t nbytes, std::span<const Way> open = kTwoWays);
  /// What the last operation of this size took; `direct` if there was none. On any rank.
  Way last(std::size_t nbytes) { return about(nbytes).last; }
  void goes(std::size_t nbytes, Way way) { about(nbytes).last = way; }
  /// An operation took so long, from where its last rank began it. Less than nothing is no time, see Moment.
  void took(std::size_t nbytes, Way way, double seconds);

 private:
  static constexpr std::size_t kTries = 3;          // of each way at first; the shortest of the last so many counts
  static constexpr std::uint64_t kOtherEvery = 64;  // operations

  struct Times {
    std::array<double, kTries> last{};
    std::uint64_t n = 0;
    double shortest() const;
  };
  struct Size {
    std::array<Times, 4> ways;
    std::uint64_t n_begun = 0;
    Way last = Way::direct;
  };
  Size& about(std::size_t nbytes);

  std::map<int, Size> sizes_;  // by doubling
};

}  // namespace samestep
