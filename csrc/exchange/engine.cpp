#include "exchange/engine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "core/bystanders.h"
#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "exchange/message_meeting.h"
#include "exchange/operation.h"
#include "exchange/spread_meeting.h"
#include "exchange/tags.h"
#include "exchange/waiting.h"

namespace samestep {
namespace {

/// What a rank tells its peers when it leaves a group in which they may still wait for it.
struct Farewell {
  std::uint64_t first_missing;
  std::array<char, 504> text;
};

constexpr Seconds kAskAfter{1};  // of waiting: peers that are merely late are not asked after
constexpr Seconds kAskAgain{0.25};
constexpr int kMostAskedAfter = 64;  // ranks of a group; in larger ones those that are waited for,
constexpr int kAskedByTurns = 8;     // and some others each time

/// The engines of this process that have started something.
std::vector<std::weak_ptr<Engine>>& engines() {
  static auto& all = *new std::vector<std::weak_ptr<Engine>>;
  return all;
}
std::mutex& engines_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

std::unique_ptr<Meeting> meet_by_messages(Messenger& messenger, const ExchangeOptions& options) {
  const std::size_t wanted = options.inline_limit;
  if (messenger.size() > options.spread_above) {
    return std::make_unique<SpreadMeeting>(messenger, SpreadMeeting::limit_for(wanted, messenger.size()));
  }
  return std::make_unique<MessageMeeting>(messenger, MessageMeeting::limit_for(wanted, messenger.size()));
}

}  // namespace

Engine::Engine(std::unique_ptr<Messenger> messenger, ExchangeOptions options, std::unique_ptr<Meeting> meeting)
    : messenger_(std::move(messenger)),
      rank_(messenger_->rank()),
      size_(messenger_->size()),
      options_(std::move(options)),
      inbox_(*messenger_),
      meeting_(std::move(meeting)) {
  messenger_->set_oversubscribed(options_.oversubscribed);
  if (meeting_ == nullptr) meeting_ = meet_by_messages(*messenger_, options_);
  refusal_ = std::make_exception_ptr(NotInitializedError(str(
      "this process was forked from rank ", rank_, " of group '", name(), "' and is no rank itself: only rank ", rank_,
      " may use the group; more ranks are started by `samestep run`, mpirun or ", "samestep.multiprocessing.spawn")));
  listen();
}

void Engine::set_oversubscribed(bool oversubscribed) {
  const std::lock_guard lock(mutex_);
  options_.oversubscribed = oversubscribed;
  messenger_->set_oversubscribed(oversubscribed);
}

Engine::~Engine() { stop_listening(); }

/// What other threads were doing here when the process was forked has stopped halfway: nothing is touched but what
/// refuses every use, and no memory is taken or given back.
void Engine::after_fork_in_child() noexcept {
  mutex_.forget_threads();
  if (std::exchange(forked_, true)) return;  // by a child, whose child this is
  broken_.swap(refusal_);
}

void Engine::register_once() {
  if (registered_) return;
  registered_ = true;
  const std::lock_guard lock(engines_mutex());
  std::erase_if(engines(), [](const auto& engine) { return engine.expired(); });
  engines().push_back(weak_from_this());
}

void Engine::progress_everywhere() {
  std::vector<std::shared_ptr<Engine>> all;
  {
    const std::lock_guard lock(engines_mutex());
    for (const auto& engine : engines()) all.push_back(engine.lock());
  }
  for (const auto& engine : all) {
    if (engine == nullptr) continue;
    const std::unique_lock alone(engine->mutex_, std::try_to_lock);
    if (alone.owns_lock() && engine->usable()) engine->progress();
  }
  advance_bystanders();
}

void Engine::require_usable() const {
  if (closed_) {
    throw NotInitializedError(str("group '", name(), "' is closed: call samestep.initialize() again to start anew"));
  }
  if (broken_) std::rethrow_exception(broken_);
}

void Engine::start(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  require_usable();
  register_once();
  std::uint64_t sequence = 0;
  if (operation->is_collective()) {
    sequence = next_sequence_++;
    collectives_.push_back(operation);
  } else {
    ++point_to_point_started_;
    messages_under_way_.push_back(operation);
  }
  if (operation->is_collective() && std::exchange(next_is_announced_, false)) {
    static_cast<Collective&>(*operation).begin_announced(sequence);
  } else {
    operation->begin(sequence);
  }
  const bool alone = collectives_.size() == 1 && collectives_.front() == operation;
  if (const unsigned polls = std::exchange(polls_at_start_, 0); polls != 0 && alone) {
    drive(*operation, polls);
  } else {
    progress();
  }
  for (const auto& [peer, departed] : departed_) fail_without(peer, departed);
}

std::exception_ptr Engine::advance(Operation& operation) {
  if (operation.finished()) return nullptr;
  try {
    if (operation.advance()) operation.finish();
  } catch (const MismatchError&) {
    operation.fail(std::current_exception());
  } catch (const std::exception&) {
    operation.fail(std::current_exception());
    return std::current_exception();
  }
  return nullptr;
}

void Engine::drive(Operation& operation, unsigned polls) {
  Pause pause = Pause::of_who_leaves(options_.oversubscribed);
  std::exception_ptr transport_failed;
  for (unsigned i = 0; i < polls && !operation.finished(); ++i) {
    if (i != 0 && pause.step()) break;
    transport_failed = advance(operation);
  }
  drop_finished();
  if (transport_failed) abandon(transport_failed, "its transport failed");
}

void Engine::progress() {
  const std::lock_guard lock(mutex_);
  if (forked_) std::rethrow_exception(broken_);
  std::exception_ptr transport_failed;
  try {
    inbox_.look();
  } catch (const std::exception&) {
    transport_failed = std::current_exception();
  }
  const auto step = [&](Operation& operation) {
    if (const std::exception_ptr failed = advance(operation)) transport_failed = failed;
  };
  for (const auto& operation : collectives_) step(*operation);
  for (const auto& operation : messages_under_way_) step(*operation);
  drop_finished();
  if (transport_failed) abandon(transport_failed, "its transport failed");
}

void Engine::drop_finished() {
  if (!usable() || !departed_.empty()) return;  // what failed may still be read or written by the transport
  while (!collectives_.empty() && collectives_.front()->finished()) collectives_.pop_front();
  std::erase_if(messages_under_way_, [](const auto& operation) { return operation->finished(); });
}

std::string Engine::on_host(int rank) const {
  const auto i = static_cast<std::size_t>(rank);
  return i < options_.hosts.size() ? str(" (", options_.hosts[i], ")") : "";
}

std::string Engine::list(const std::vector<int>& ranks) const {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += str(i ? ", " : "", ranks[i], on_host(ranks[i]));
  return text;
}

void Engine::wait(Operation& operation, const Deadline& deadline) {
  Pause pause(options_.oversubscribed, [this] { return messenger_->rest(); }, [this] { return messenger_->nap(); });
  bool warned = false;
  Seconds ask_at = kAskAfter;
  std::uint64_t moved = 0;
  while (!operation.done()) {
    if (const std::uint64_t now = moved_.load(std::memory_order_relaxed) + messenger_->ended(); now != moved) {
      moved = now;
      pause.moved();
    }
    if (!pause.step()) continue;
    wait_hooks().interrupt();
    progress_everywhere();
    if (pause.waited() > ask_at) {
      ask_at = pause.waited() + kAskAgain;
      ask_after(operation);
    }
    look_for_farewells();
    if (operation.finished()) break;
    if (deadline.passed()) throw TimeoutError(late_text(operation, deadline.timeout()) + ": the deadline has passed");
    if (!warned && pause.waited().count() > wait_hooks().warn_after_s) {
      warned = true;
      wait_hooks().warn(late_text(operation, pause.waited()) + ": still waiting");
    }
  }
  if (operation.error()) std::rethrow_exception(operation.error());
}

void Engine::ask_after(Operation& operation) {
  const std::lock_guard lock(mutex_);
  if (!usable() || operation.finished()) return;
  if (operation.is_collective()) meeting_->wait_is_long(operation.sequence());
  if (size_ > kMostAskedAfter) {
    for (const int peer : operation.waits_for()) messenger_->ask_after(peer);
    for (int i = 0; i < kAskedByTurns; ++i) {  // those may wait for others
      next_asked_ = (next_asked_ + 1) % size_;
      if (next_asked_ != rank_) messenger_->ask_after(next_asked_);
    }
    return;
  }
  for (int peer = 0; peer < size_; ++peer) {  // who is waited for may itself be waiting for the one that has died
    if (peer != rank_) messenger_->ask_after(peer);
  }
}

std::string Engine::late_text(Operation& operation, Seconds waited) {
  const std::lock_guard lock(mutex_);
  const std::vector<int> late = operation.waits_for();
  std::vector<int> here;
  for (int rank = 0; rank < size_; ++rank) {
    if (std::find(late.begin(), late.end(), rank) == late.end()) here.push_back(rank);
  }
  const double rounded = std::round(waited.count() * 100) / 100;
  std::string text = str("rank ", rank_, on_host(rank_), ": ", operation.describe(), " has waited ", rounded, " s for ",
                         late.empty() ? "data from ranks that have arrived" : list(late));
  if (operation.is_collective() && !late.empty()) text += "; arrived: " + list(here);
  return text;
}

void Engine::look_for_farewells() {
  const std::lock_guard lock(mutex_);
  if (!usable()) return;
  const std::vector<Messenger::Loss> losses = messenger_->losses();  // before their last words are looked for
  Messenger::Envelope from;
  while (messenger_->probe(tags::kFarewell, from)) {
    Farewell farewell{};
    Messenger::Request request = messenger_->receive(&farewell, sizeof farewell, from.source, tags::kFarewell);
    while (!messenger_->test(request)) {
    }
    farewell.text.back() = '\0';
    const Departed departed{farewell.first_missing, str("rank ", from.source, on_host(from.source), " has left group '",
                                                        name(), "': ", farewell.text.data())};
    let_go(from.source, departed);
  }
  std::vector<std::pair<Messenger::Loss, std::string>> news;
  for (const Messenger::Loss& loss : losses) {
    if (!departed_.contains(loss.peer)) news.emplace_back(loss, text_of(loss, losses));
  }
  for (const auto& [loss, text] : news) let_go(loss.peer, {loss.first_missing, text});
}

/// Names others, too, for it is not known who has left because of whom.
std::string Engine::text_of(const Messenger::Loss& loss, const std::vector<Messenger::Loss>& losses) const {
  constexpr std::size_t kMostNamed = 8;
  const auto of = [this](const Messenger::Loss& one) {
    return str("rank ", one.peer, on_host(one.peer), " has left group '", name(), "': ", one.text);
  };
  std::string text = of(loss);
  std::size_t n = 1;
  for (const Messenger::Loss& other : losses) {
    if (other.peer != loss.peer && n++ < kMostNamed) text += "; " + of(other);
  }
  return n > kMostNamed ? str(text, "; and ", n - kMostNamed, " more") : text;
}

void Engine::let_go(int peer, const Departed& departed) {
  progress();  // what it sent before is here too
  departed_.emplace(peer, departed);
  fail_without(peer, departed);
}

void Engine::fail_without(int peer, const Departed& departed) {
  const auto fail = [&](Operation& operation) {
    if (operation.finished() || !operation.needs(peer, departed.first_missing)) return;
    operation.fail(std::make_exception_ptr(PeerLostError(str(operation.describe(), ": ", departed.text))));
  };
  for (const auto& operation : collectives_) fail(*operation);
  for (const auto& operation : messages_under_way_) fail(*operation);
  drop_finished();
}

void Engine::abandon(std::exception_ptr error, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!usable()) return;
  broken_ = error;
  Farewell farewell{next_sequence_, {}};
  for (const auto& operation : collectives_) {
    if (!operation->finished()) farewell.first_missing = std::min(farewell.first_missing, operation->sequence());
  }
  meeting_->leave(farewell.first_missing, reason);
  leaving_(farewell.first_missing);
  std::strncpy(farewell.text.data(), reason.c_str(), farewell.text.size() - 1);
  auto bytes = std::make_unique<std::vector<std::byte>>(sizeof farewell);
  std::memcpy(bytes->data(), &farewell, sizeof farewell);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || departed_.contains(peer)) continue;
    messenger_->send(bytes->data(), bytes->size(), peer, tags::kFarewell);
  }
  farewells_.push_back(std::move(bytes));
  for (const auto& operation : collectives_) operation->fail(error);
  for (const auto& operation : messages_under_way_) operation->fail(error);
  meeting_->abandon();
  inbox_.abandon();
  keep_for_good();  // sends cannot be given up: what they read must outlive them
}

void Engine::keep_for_good() {
  const std::lock_guard lock(mutex_);
  if (kept_ || (closed_ && !broken_)) return;
  kept_ = true;
  static std::mutex guard;
  static auto& kept = *new std::vector<std::shared_ptr<Engine>>;
  const std::lock_guard guarded(guard);
  kept.push_back(shared_from_this());
}

void Engine::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  const bool whole = broken_ == nullptr;
  if (whole) {
    meeting_->abandon();
    inbox_.abandon();
  }
  closed_ = true;
  if (whole) messenger_->close();
}

}  // namespace samestep
