#include "engine/group_creation.h"

#include <algorithm>

#include "communicator/signature.h"
#include "core/error.h"
#include "core/format.h"
#include "transport/tags.h"

namespace samestep {

GroupCreation::GroupCreation(std::shared_ptr<ProgressEngine> shared_engine, std::vector<int> ranks,
                             std::string_view failure)
    : Operation(std::move(shared_engine)),
      ranks_(std::move(ranks)),
      received_(ranks_.size()),
      receives_(ranks_.size()) {
  // Members compare a digest of fixed length, because a rank that has passed another list may have passed one of
  // another length, and receives must have room for it.
  for (const int rank : ranks_) own_.digest = mix(own_.digest, static_cast<std::uint64_t>(rank) + 1);
  // The array was zeroed, so a text that is cut still ends in a zero.
  std::copy_n(failure.begin(), std::min(failure.size(), own_.failure.size() - 1), own_.failure.begin());
}

void GroupCreation::begin(std::uint64_t) {
  // Each member offers a number, and all use the highest one. They agree on it without the ranks outside of the new
  // group, which do not make this call.
  own_.number = transport().reserve_group_id();
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    received_[i] = own_;
    if (ranks_[i] == rank()) continue;
    sends_.send(transport(), &own_, sizeof own_, ranks_[i], tags::kMakeGroup);
    receives_[i].receive(transport(), &received_[i], sizeof received_[i], ranks_[i], tags::kMakeGroup);
  }
}

bool GroupCreation::advance() {
  // All messages have to be complete before a mismatch is thrown: until then the transport may still write to
  // `received_`.
  bool finished = sends_.test(transport());
  for (RequestSet& receive : receives_) finished = receive.test(transport()) && finished;
  if (!finished) return false;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (received_[i].digest != own_.digest) {
      throw MismatchError(str(describe(), ": rank ", ranks_[i], " calls group with another list of ranks"));
    }
  }
  return true;
}

std::uint32_t GroupCreation::group_id() const {
  std::uint32_t highest = 0;
  for (const Announcement& word : received_) highest = std::max(highest, word.number);
  return highest;
}

std::string GroupCreation::failure() const {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const std::string text = received_[i].failure.data();
    if (!text.empty()) return str(engine().departures().name(ranks_[i]), ": ", text);
  }
  return "";
}

bool GroupCreation::needs(int peer, std::uint64_t) {
  // A member whose announcement has arrived may leave: it has done what this operation needs.
  const auto found = std::find(ranks_.begin(), ranks_.end(), peer);
  return found != ranks_.end() && !receives_[static_cast<std::size_t>(found - ranks_.begin())].test(transport());
}

std::string GroupCreation::what() const {
  std::string list;
  for (const int rank : ranks_) list += str(list.empty() ? "" : ", ", rank);
  return str("group of ranks [", list, "]");
}

std::vector<int> GroupCreation::pending_peers_of_operation() {
  std::vector<int> late;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (!receives_[i].test(transport())) late.push_back(ranks_[i]);
  }
  return late;
}

void GroupCreation::abort() {
  for (RequestSet& receive : receives_) receive.abandon(transport());
}

}  // namespace samestep
