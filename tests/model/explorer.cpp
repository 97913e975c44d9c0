#include "explorer.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace model {
namespace {

constexpr std::size_t kMaxSteps = 100'000;
constexpr std::size_t kTold = 60;  // accesses of a report

void save(std::array<void*, 2>& exceptions) {
  std::memcpy(exceptions.data(), abi::__cxa_get_globals(), sizeof exceptions);
}
void restore(const std::array<void*, 2>& exceptions) {
  std::memcpy(abi::__cxa_get_globals(), exceptions.data(), sizeof exceptions);
}

}  // namespace

Watched watched;

Explorer& explorer() {
  static auto& only = *new Explorer;
  return only;
}

void violated(const std::string& what) { explorer().report(what); }

void Explorer::report(const std::string& what) const {
  std::printf("%s: VIOLATED: %s\n", scenario_->name.c_str(), what.c_str());
  const std::size_t first = trace_.size() > kTold ? trace_.size() - kTold : 0;
  constexpr const char* kKinds[] = {"loads", "stores to", "updates", "pauses"};
  for (std::size_t i = first; i < trace_.size(); ++i) {
    const Access& access = trace_[i];
    std::printf("  rank %d %s byte %zu\n", access.rank, kKinds[static_cast<int>(access.kind)], access.word * 8);
  }
  std::fflush(stdout);
  std::_Exit(1);
}

// ---- fibers

void Explorer::run_body() {
  Explorer& self = explorer();
  try {
    self.scenario_->body(self.current_);
  } catch (const std::exception& error) {
    self.report("rank " + std::to_string(self.current_) + ": " + error.what());
  }
  self.me().status = Status::finished;
  self.yield();
}

void Explorer::begin(int rank) {
  Rank& r = ranks_[static_cast<std::size_t>(rank)];
  ::getcontext(&r.start);
  r.start.uc_stack.ss_sp = r.stack.data();
  r.start.uc_stack.ss_size = r.stack.size();
  r.start.uc_link = nullptr;
  ::makecontext(&r.start, &Explorer::run_body, 0);
  r.started = r.may_time_out = r.waits = r.times_out = r.finds_nothing = false;
  r.exceptions = {};
  r.status = Status::runs;
  r.history = static_cast<std::uint64_t>(rank);
  r.place = 0;
  r.eventful = true;
  r.looked_at.clear();
  resume(rank);
}

void Explorer::resume(int rank) {
  Rank& r = ranks_[static_cast<std::size_t>(rank)];
  save(exceptions_);
  restore(r.exceptions);
  current_ = rank;
  watched = {memory_.base() + unwatched_, memory_.base() + Memory::kNbytes};
  if (::_setjmp(scheduler_) == 0) {
    if (r.started) ::_longjmp(r.at, 1);
    r.started = true;
    ::setcontext(&r.start);
  }
  current_ = -1;
  watched = {};
  save(r.exceptions);
  restore(exceptions_);
}

void Explorer::yield() {
  if (::_setjmp(me().at) == 0) ::_longjmp(scheduler_, 1);
}

// ---- what a rank does

void Explorer::event(std::uint64_t what, std::size_t word) {
  Rank& r = me();
  r.history = mix(mix(mix(r.history, what), word), r.place);
  r.place = 0;
  r.eventful = true;
}

void Explorer::before(Kind kind, std::size_t word, std::memory_order order) {
  Rank& r = me();
  if (kind == Kind::load && (r.finds_nothing || order == std::memory_order_relaxed)) return;
  r.finds_nothing = false;
  r.kind = kind;
  r.word = word;
  yield();
  trace_.push_back({current_, kind, word});
}

void Explorer::loaded(std::size_t word, std::memory_order order) {
  Rank& r = me();
  r.looked_at.push_back(word);
  if (memory_.load(current_, word, order)) {
    event(memory_.seen(current_, word), word);
  } else {
    ++r.place;
  }
}

void Explorer::stored(std::size_t word, std::memory_order order) {
  event(1, word);
  memory_.store(current_, word, order, mix(me().history, 2));
}

void Explorer::updated(std::size_t word, std::memory_order order) {
  event(memory_.latest(word), word);
  memory_.update(current_, word, order, mix(me().history, 3));
}

void Explorer::plain(const volatile void* address, std::size_t nbytes, bool writes) {
  memory_.plain(current_, address, nbytes, writes);
  if (writes) event(4, memory_.word_of(address));
}

bool Explorer::pause(bool may_time_out) {
  Rank& r = me();
  if (!r.eventful || may_time_out) {
    r.kind = Kind::pause;
    r.word = 0;
    r.waits = !r.eventful;
    r.may_time_out = may_time_out;
    r.times_out = false;
    yield();
    if (r.times_out) event(5, 0);
  }
  const bool times_out = may_time_out && r.times_out;
  r.looked_at.clear();
  r.eventful = false;
  r.place = 0;
  return times_out;
}

void Explorer::pause_in_bounded_loop() {
  if (me().finds_nothing) return;
  if (pause(scenario_->loops_end)) me().finds_nothing = true;
}

void Explorer::end_bounded_loop() {
  me().finds_nothing = false;
  me().eventful = true;
}

void Explorer::forget(std::uint64_t state) {
  Rank& r = me();
  r.history = mix(static_cast<std::uint64_t>(current_), state);
  r.place = 0;
  r.eventful = true;
}

// ---- orders

bool Explorer::can_go_on(int rank) const {
  const Rank& r = ranks_[static_cast<std::size_t>(rank)];
  if (r.status != Status::runs) return false;
  if (r.kind != Kind::pause || !r.waits) return true;
  return std::any_of(r.looked_at.begin(), r.looked_at.end(),
                     [&](std::size_t word) { return memory_.has_news(rank, word); });
}

bool Explorer::is_inside_a_turn(int rank) const {
  const Rank& r = ranks_[static_cast<std::size_t>(rank)];
  return r.status == Status::runs && r.kind != Kind::pause;
}

std::vector<Explorer::Action> Explorer::actions() {
  std::vector<Action> found;
  const bool stays = preemptions_ == scenario_->preemptions && is_inside_a_turn(last_);
  for (int step = 0; step < scenario_->size; ++step) {
    const int rank = (last_ + step) % scenario_->size;
    const Rank& r = ranks_[static_cast<std::size_t>(rank)];
    if (can_go_on(rank) && (rank == last_ || !stays)) found.push_back({rank, Action::What::continues});
    if (r.status != Status::runs) continue;
    if (r.kind == Kind::pause && r.may_time_out && !stays) found.push_back({rank, Action::What::times_out});
    if (rank == scenario_->victim) found.push_back({rank, Action::What::dies});
  }
  return found;
}

std::uint64_t Explorer::key() const {
  std::uint64_t hash = memory_.state();
  if (scenario_->preemptions >= 0) hash = mix(hash, static_cast<std::uint64_t>(preemptions_ * kMaxRanks + last_));
  for (int rank = 0; rank < scenario_->size; ++rank) {
    const Rank& r = ranks_[static_cast<std::size_t>(rank)];
    hash = mix(hash, mix(mix(r.history, r.place), static_cast<std::uint64_t>(r.status)));
    hash = mix(hash, static_cast<std::uint64_t>(r.kind) * 4 + (r.eventful ? 2 : 0) + (r.finds_nothing ? 1 : 0));
  }
  return hash;
}

void Explorer::perform(Action action) {
  Rank& r = ranks_[static_cast<std::size_t>(action.rank)];
  if (action.rank != last_ && action.what == Action::What::continues && is_inside_a_turn(last_)) ++preemptions_;
  last_ = action.rank;
  if (action.what == Action::What::dies) {
    r.status = Status::dead;
    memory_.note_value(end_of(action.rank), 0, 1);
    memory_.store(action.rank, end_of(action.rank), std::memory_order_release, mix(r.history, 6));
    trace_.push_back({action.rank, Kind::store, end_of(action.rank)});
    last_ = (action.rank + 1) % scenario_->size;
    return;
  }
  r.times_out = action.what == Action::What::times_out;
  resume(action.rank);
}

void Explorer::run_once() {
  memory_.reset();
  trace_.clear();
  last_ = preemptions_ = 0;
  scenario_->set_up();
  for (int rank = 0; rank < scenario_->size; ++rank) begin(rank);
  std::size_t depth = 0, steps = 0;
  bool known = false;
  const auto dies = [](const Action& action) { return action.what == Action::What::dies; };
  for (std::vector<Action> open = actions(); !std::all_of(open.begin(), open.end(), dies); open = actions()) {
    Action action = open.front();
    if (depth < path_.size()) {
      if (open.size() > 1) {
        const Node& node = path_[depth++];
        if (node.actions.size() != open.size()) report("an execution that cannot be repeated");
        action = node.actions[node.at];
      }
    } else if (open.size() > 1 && !known) {
      if (visited_.insert(key()).second) {
        path_.push_back({std::move(open), 0});
        ++depth;
      } else {
        known = true;
      }
    }
    perform(action);
    if (++steps > kMaxSteps) report("it runs forever");
  }
  for (int rank = 0; rank < scenario_->size; ++rank) {
    if (ranks_[static_cast<std::size_t>(rank)].status == Status::runs) {
      report("rank " + std::to_string(rank) + " waits for ever");
    }
  }
  found_.longest = std::max(found_.longest, steps);
  ++found_.executions;
  scenario_->tear_down();
}

bool Explorer::backtrack() {
  while (!path_.empty() && ++path_.back().at == path_.back().actions.size()) path_.pop_back();
  return !path_.empty();
}

Explorer::Found Explorer::explore(const Scenario& scenario) {
  scenario_ = &scenario;
  found_ = {};
  path_.clear();
  visited_.clear();
  do {
    run_once();
  } while (backtrack());
  found_.states = visited_.size();
  return found_;
}

}  // namespace model
