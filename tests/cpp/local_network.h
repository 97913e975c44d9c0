#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "transport/tags.h"
#include "transport/transport.h"

namespace samestep {

/// A transport between threads of one process, for tests: ranks are threads, messages are copied when they
/// meet, and now and then a request pretends not to have ended yet.
class LocalNetwork {
 public:
  explicit LocalNetwork(int n_ranks) : size(n_ranks) {}

  struct Message {
    int source, dest, tag;
    const void* data;
    std::size_t nbytes;
    bool* taken;
  };
  struct Posted {
    std::uintptr_t id;
    int rank, source, tag;
    void* data;
    std::size_t capacity;
    bool met = false;
    Transport::Envelope envelope;
  };

  const int size;
  std::mutex mutex;
  std::list<Message> messages;  // that no receive has met, in order of sending
  std::list<Posted> posted;     // in order of posting
  std::list<std::pair<std::uintptr_t, bool>> sends;
  std::uintptr_t next_id = 1;
  int loses_from = -1;  // the network loses the first header that this rank sends
  bool has_lost = false;

  static bool matches(const Posted& posted, const Message& message) {
    return posted.rank == message.dest && (posted.source == kAnySource || posted.source == message.source) &&
           (posted.tag == kAnyTag || posted.tag == message.tag);
  }

  static void deliver(Posted& to, Message& from) {
    if (from.nbytes > to.capacity) throw Error("a message is longer than the receive that it met");
    if (from.nbytes != 0) std::memcpy(to.data, from.data, from.nbytes);
    to.met = true;
    to.envelope = {from.source, from.tag};
    *from.taken = true;
  }
};

class LocalTransport final : public Transport {
 public:
  LocalTransport(std::shared_ptr<LocalNetwork> network, int rank, std::size_t max_message = 1 << 30)
      : network_(std::move(network)), rank_(rank), max_message_(max_message), random_(static_cast<unsigned>(rank)) {}

  int rank() const override { return rank_; }
  int size() const override { return network_->size; }
  std::string_view name() const override { return "local"; }
  std::size_t max_message() const override { return max_message_; }

  Request send(const void* data, std::size_t nbytes, int dest, int tag) override {
    if (nbytes > max_message_) throw Error("a message is longer than max_message");
    const std::lock_guard lock(network_->mutex);
    network_->sends.emplace_back(network_->next_id++, false);
    auto& [id, taken] = network_->sends.back();
    if (rank_ == network_->loses_from && tag == tags::kHeaders && !std::exchange(network_->has_lost, true)) {
      taken = true;
      return {id, true};
    }
    LocalNetwork::Message message{rank_, dest, tag, data, nbytes, &taken};
    for (auto& posted : network_->posted) {
      if (posted.met || !LocalNetwork::matches(posted, message)) continue;
      LocalNetwork::deliver(posted, message);
      return {id, true};
    }
    network_->messages.push_back(message);
    return {id, true};
  }

  Request receive(void* data, std::size_t capacity, int source, int tag) override {
    const std::lock_guard lock(network_->mutex);
    LocalNetwork::Posted posted{network_->next_id++, rank_, source, tag, data, capacity, false, {}};
    for (auto message = network_->messages.begin(); message != network_->messages.end(); ++message) {
      if (!LocalNetwork::matches(posted, *message)) continue;
      LocalNetwork::deliver(posted, *message);
      network_->messages.erase(message);
      break;
    }
    network_->posted.push_back(posted);
    return {posted.id, true};
  }

  bool test(Request& request, Envelope* envelope) override {
    if (!request.active) return true;
    if (random_() % 4 == 0) return false;  // a slow network
    const std::lock_guard lock(network_->mutex);
    const auto posted = find(request);
    if (posted != network_->posted.end()) {
      if (!posted->met) return false;
      if (envelope != nullptr) *envelope = posted->envelope;
      network_->posted.erase(posted);
    } else {
      auto& sends = network_->sends;
      const auto sent =
          std::find_if(sends.begin(), sends.end(), [&](const auto& s) { return s.first == request.bits; });
      if (!sent->second) return false;
      sends.erase(sent);
    }
    request.active = false;
    return true;
  }

  bool cancel(Request& request) override {
    const std::lock_guard lock(network_->mutex);
    const auto posted = find(request);
    if (posted == network_->posted.end() || posted->met) return false;
    network_->posted.erase(posted);
    request.active = false;
    return true;
  }

  bool probe(int tag, Envelope& envelope) override {
    const std::lock_guard lock(network_->mutex);
    for (const auto& message : network_->messages) {
      if (message.dest != rank_ || message.tag != tag) continue;
      envelope = {message.source, message.tag};
      return true;
    }
    return false;
  }

  std::unique_ptr<Transport> subset(std::span<const int>, std::uint32_t) override {
    throw Error("LocalTransport has no groups");
  }
  void close() override {}

 private:
  std::list<LocalNetwork::Posted>::iterator find(const Request& request) {
    return std::find_if(network_->posted.begin(), network_->posted.end(),
                        [&](const auto& posted) { return posted.id == request.bits; });
  }

  std::shared_ptr<LocalNetwork> network_;
  int rank_;
  std::size_t max_message_;
  std::mt19937 random_;
};

/// Runs `body(rank)` for every rank in a thread of its own and joins them. Errors are rethrown.
template <class Body>
void as_threads(int size, Body body) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace samestep
