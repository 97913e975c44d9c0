#pragma once

#include <algorithm>
#include <list>
#include <utility>
#include <vector>

#include "communicator/communicator.h"

namespace samestep {

/// The posted receives and the unexpected messages of one rank, matched by source and tag. A message matches the first
/// receive that was posted, a receive the first message that arrived. A receive may leave source and tag open.
///
/// `Receive`: a pointer of any kind. `Message`: has `source` and `tag`; its address does not change while it is kept.
/// Not thread-safe.
template <class Receive, class Message>
class TagMatcher {
 public:
  bool has_posted() const { return !posted_.empty(); }
  bool has_unexpected() const { return !unexpected_.empty(); }

  void post(int source, int tag, Receive receive) { posted_.push_back({source, tag, std::move(receive)}); }
  /// Removes the first posted receive that matches such a message, and returns it; null if there is none.
  Receive match(int source, int tag) {
    const auto found = std::ranges::find_if(
        posted_, [&](const Posted& posted) { return matches(posted.source, posted.tag, source, tag); });
    if (found == posted_.end()) return nullptr;
    Receive receive = std::move(found->receive);
    posted_.erase(found);
    return receive;
  }
  /// Removes a posted receive. False if it is no longer posted.
  bool withdraw(const Receive& receive) {
    return std::erase_if(posted_, [&](const Posted& posted) { return posted.receive == receive; }) != 0;
  }
  /// Removes all posted receives.
  std::vector<Receive> withdraw_all() {
    std::vector<Receive> receives;
    for (Posted& posted : posted_) receives.push_back(std::move(posted.receive));
    posted_.clear();
    return receives;
  }

  /// Keeps a message that no receive has matched.
  Message& keep(Message message) { return unexpected_.emplace_back(std::move(message)); }
  /// Keeps a message that arrived before those which `is_later`.
  template <class Predicate>
  void keep_before(Message message, const Predicate& is_later) {
    unexpected_.insert(std::ranges::find_if(unexpected_, is_later), std::move(message));
  }
  /// The first message that matches such a receive and satisfies `is_open`; null if there is none.
  template <class Predicate>
  Message* find(int source, int tag, const Predicate& is_open) {
    const auto found = std::ranges::find_if(unexpected_, [&](const Message& message) {
      return matches(source, tag, message.source, message.tag) && is_open(message);
    });
    return found == unexpected_.end() ? nullptr : &*found;
  }
  Message* find(int source, int tag) {
    return find(source, tag, [](const Message&) { return true; });
  }
  void drop(const Message* message) {
    unexpected_.remove_if([message](const Message& kept) { return &kept == message; });
  }
  template <class Predicate>
  void drop_if(const Predicate& is_dropped) {
    unexpected_.remove_if(is_dropped);
  }
  template <class Visit>
  void for_each_unexpected(const Visit& visit) {
    for (Message& message : unexpected_) visit(message);
  }

 private:
  struct Posted {
    int source, tag;
    Receive receive;
  };
  static bool matches(int wanted_source, int wanted_tag, int source, int tag) {
    return (wanted_source == kAnySource || wanted_source == source) && (wanted_tag == kAnyTag || wanted_tag == tag);
  }

  std::vector<Posted> posted_;     // in the order of their calls; short
  std::list<Message> unexpected_;  // in the order of arrival
};

}  // namespace samestep
