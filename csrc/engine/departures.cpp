#include "engine/departures.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/format.h"
#include "engine/progress_engine.h"

namespace samestep {

int Departures::world_rank(int rank) const {
  return options_.world_ranks.empty() ? rank : options_.world_ranks[static_cast<std::size_t>(rank)];
}

int Departures::rank_of(int world_rank) const {
  // A search instead of an inverse table: it runs only when a rank has left.
  for (int rank = 0; rank < size_; ++rank) {
    if (this->world_rank(rank) == world_rank) return rank;
  }
  return -1;
}

bool Departures::has_left(int peer) const {
  const int world = world_rank(peer);
  return contains(peer) ||
         std::ranges::any_of(entries_, [&](const auto& entry) { return entry.second.why.cause == world; });
}

bool Departures::is_harmless(int peer) const {
  return static_cast<int>(entries_.size()) < size_ - 1 && entries_.at(peer).why.is_own_end_of(world_rank(peer));
}

std::string Departures::in_parentheses(int rank) const {
  const auto i = static_cast<std::size_t>(rank);
  std::string text = options_.world_ranks.empty() ? "" : str("rank ", options_.world_ranks[i], " of the world");
  if (i < options_.hosts.size()) text += str(text.empty() ? "" : ", ", options_.hosts[i]);
  return text.empty() ? "" : str(" (", text, ")");
}

std::string Departures::name(int rank) const { return str("rank ", rank, in_parentheses(rank)); }

std::string Departures::list(const std::vector<int>& ranks) const {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += str(i ? ", " : "", ranks[i], in_parentheses(ranks[i]));
  return text;
}

NamedRanks Departures::named(std::vector<int> ranks) const {
  NamedRanks named{std::move(ranks)};
  if (options_.hosts.empty()) return named;
  for (const int rank : named.ranks) named.hosts.push_back(options_.hosts[static_cast<std::size_t>(rank)]);
  return named;
}

NamedRanks Departures::lost(int peer) const {
  const int cause = rank_of(entries_.at(peer).why.cause);
  std::set<int> ranks{cause >= 0 ? cause : peer};
  for (const auto& [other, entry] : entries_) {
    const int dead = entry.why.why == Departure::Why::died ? rank_of(entry.why.cause) : -1;
    if (dead >= 0) ranks.insert(dead);
  }
  return named({ranks.begin(), ranks.end()});
}

std::string Departures::text(int peer) const {
  const Departure& why = entries_.at(peer).why;
  const int cause = rank_of(why.cause);
  const std::string of_group = str(" has left group '", options_.name, "'");
  std::string text =
      cause >= 0 ? name(cause) + of_group : str(name(peer), of_group, " because of rank ", why.cause, " of the world");
  text += str(": ", why.text.data());
  // Ranks that leave because of another one pass on its report, so the same cause means that a rank has followed. So
  // does a later time: it then left after the cause.
  const int named = cause >= 0 ? cause : peer;
  const auto followers = std::count_if(entries_.begin(), entries_.end(), [&](const auto& entry) {
    const Departure& other = entry.second.why;
    return entry.first != named && (other.cause == why.cause || other.time_ns >= why.time_ns);
  });
  if (followers > 0)
    text += str("; ", followers, followers == 1 ? " other rank has" : " other ranks have", " left since");
  return text;
}

std::vector<int> Departures::late_behind(int peer) const {
  const Departure& why = entries_.at(peer).why;
  std::vector<int> ranks;
  for (std::uint32_t i = 0; why.why == Departure::Why::late && i < why.n_late; ++i) {
    const int rank = rank_of(why.late[i]);
    // This rank is late itself: for it the peer has left, and no deadline has passed.
    if (rank == rank_) return {};
    if (rank >= 0) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace samestep
