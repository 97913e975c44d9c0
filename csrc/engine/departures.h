#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/error.h"
#include "transport/departure.h"

namespace samestep {

struct ExchangeOptions;

/// The ranks that have left a group, and the error texts that name them. Ranks are numbered as in the group unless
/// stated otherwise.
class Departures {
 public:
  struct Entry {
    std::uint64_t first_absent;  ///< the first collective in which the rank takes no part
    Departure why;
  };

  /// Keeps a reference to `options`.
  Departures(const ExchangeOptions& options, int rank, int size) : options_(options), rank_(rank), size_(size) {}

  /// Ignores a second report about a rank.
  void add(int peer, const Entry& entry) { entries_.emplace(peer, entry); }
  bool empty() const { return entries_.empty(); }
  bool contains(int peer) const { return entries_.contains(peer); }
  /// Also without a report of its own: another rank's names it as the cause.
  bool has_left(int peer) const;
  const std::map<int, Entry>& entries() const { return entries_; }

  /// Whether a receive from any rank may still complete: the program of `peer` has ended without an error, and another
  /// rank remains.
  bool is_harmless(int peer) const;

  int world_rank(int rank) const;
  /// For error texts, such as "rank 1 (rank 3 of the world, node2)"; without what is obvious.
  std::string name(int rank) const;
  std::string list(const std::vector<int>& ranks) const;
  /// For errors.
  NamedRanks named(std::vector<int> ranks) const;

  /// The cause of the departure of `peer`, and how many followed, such as "rank 1 has left group 'world': its process
  /// has ended; 2 other ranks have left since".
  std::string text(int peer) const;
  /// For an error because `peer` has left: the cause, and all ranks that are known to have died.
  NamedRanks lost(int peer) const;
  /// If the rank that caused the departure of `peer` had waited until its deadline: the ranks of this group for which
  /// it had waited. Empty otherwise, and if this rank is one of them.
  std::vector<int> late_behind(int peer) const;

 private:
  int rank_of(int world_rank) const;  // -1: not in this group
  std::string in_parentheses(int rank) const;

  const ExchangeOptions& options_;
  int rank_, size_;
  std::map<int, Entry> entries_;
};

}  // namespace samestep
