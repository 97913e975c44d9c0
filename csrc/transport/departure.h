#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace samestep {

/// Why a rank has left a group, as it reports that to the others. Ranks are numbered as in the world.
///
/// A rank that leaves because another one has left passes on that rank's report. So every rank names the same cause,
/// and error texts do not quote each other.
struct Departure {
  enum class Why : std::uint32_t {
    died,      ///< the process or host of `cause` has failed, without a report
    failed,    ///< the program of `cause` has raised an error
    finished,  ///< the program of `cause` has ended without an error
    late,      ///< `cause` has left this group only: its deadline passed while it waited for the ranks in `late`, or an
               ///< operation failed
    revoked,   ///< `cause` has left a block of `together()`; another group replaces this one
  };
  static constexpr std::size_t kMaxLate = 8;

  Why why = Why::failed;
  std::int32_t cause = -1;   ///< the rank that left first
  std::int64_t time_ns = 0;  ///< when, by the clock of the host that detected it
  std::uint32_t n_late = 0;  ///< used entries of `late`
  std::array<std::int32_t, kMaxLate> late{};
  std::uint64_t block = 0;       ///< of `together()`, where that is the reason
  std::array<char, 432> text{};  ///< about `cause`, such as "its process has ended"; null-terminated

  /// A report with the current time. Truncates a text that is too long.
  static Departure of(Why why, int cause, std::string_view text);
  bool is_own_end_of(int world_rank) const { return why == Why::finished && cause == world_rank; }
};

}  // namespace samestep
