#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "memory.h"

namespace model {

/// What is explored: `body` runs once for each rank, between `set_up` and `tear_down`, in every order there is.
struct Scenario {
  std::string name;
  int size = 2;
  int victim = -1;         ///< may be killed before any of its accesses
  int preemptions = -1;    ///< most changes away from a rank that could go on; -1: any number
  bool loops_end = false;  ///< a loop of the code that counts its turns may come to its end
  std::function<void()> set_up, tear_down;
  std::function<void(int rank)> body;
};

/// Runs ranks as fibers of one thread, one access to shared atomic words at a time, and explores all orders of
/// these accesses. If every rank has seen the same stores and stands at the same point after two orders, their
/// continuations are equal: the second is not followed.
///
/// A violation: ranks that all wait, accesses that never end, and whatever Memory or a scenario calls one.
class Explorer {
 public:
  struct Found {
    std::size_t states = 0, executions = 0, longest = 0;
  };

  Found explore(const Scenario& scenario);

  Memory& memory() { return memory_; }
  /// The first bytes of it, which ranks may read and write as they like.
  void leave_out(std::size_t nbytes) { unwatched_ = nbytes; }
  /// The rank that runs, or -1 outside of all.
  int current() const { return current_; }
  bool is_dead(int rank) const { return ranks_[static_cast<std::size_t>(rank)].status == Status::dead; }
  /// A word that is stored to when the rank is killed.
  std::size_t end_of(int rank) const { return Memory::kNbytes / 8 - 1 - static_cast<std::size_t>(rank); }

  // For the rank that runs.

  /// Before an access to an atomic word: others may come first. `done` tells what it was.
  enum class Kind : std::uint8_t { load, store, update, pause };
  void before(Kind kind, std::size_t word, std::memory_order order);
  void loaded(std::size_t word, std::memory_order order);
  void stored(std::size_t word, std::memory_order order);
  void updated(std::size_t word, std::memory_order order);
  void plain(const volatile void* address, std::size_t nbytes, bool writes);

  /// After an iteration of a loop that polls. If it found nothing new, the rank waits until a word that it looked at
  /// has changed. True if `may_time_out` and its time is over: both answers are explored.
  bool pause(bool may_time_out);
  /// The same in a loop of the code that counts its iterations: either it waits, or all later iterations find nothing.
  void pause_in_bounded_loop();
  /// Such a loop is over.
  void end_bounded_loop();

  /// All that the rank will do depends on the shared memory, on what is left of its body, and on `state`.
  void forget(std::uint64_t state);

  [[noreturn]] void report(const std::string& what) const;

 private:
  enum class Status : std::uint8_t { runs, finished, dead };
  struct Rank {
    ucontext_t start;
    jmp_buf at;
    bool started = false;
    std::array<void*, 2> exceptions{};  // what the C++ runtime keeps for a thread
    std::vector<std::byte> stack = std::vector<std::byte>(256 << 10);
    Status status = Status::finished;
    Kind kind = Kind::pause;  // of what it is about to do
    std::size_t word = 0;
    bool may_time_out = false, waits = false, times_out = false, finds_nothing = false;
    std::uint64_t history = 0;           // of stores it has made and seen
    std::uint64_t place = 0;             // accesses since the begin of the turn
    bool eventful = true;                // has the turn found or made something new?
    std::vector<std::size_t> looked_at;  // in this turn
  };
  struct Action {
    int rank;
    enum class What : std::uint8_t { continues, times_out, dies } what;
  };
  struct Node {
    std::vector<Action> actions;
    std::size_t at = 0;
  };
  struct Access {
    int rank;
    Kind kind;
    std::size_t word;
  };

  static void run_body();
  void run_once();
  void begin(int rank);
  void perform(Action action);
  void resume(int rank);
  void yield();
  std::vector<Action> actions();
  bool can_go_on(int rank) const;
  bool is_inside_a_turn(int rank) const;
  std::uint64_t key() const;
  void event(std::uint64_t what, std::size_t word);
  bool backtrack();
  Rank& me() { return ranks_[static_cast<std::size_t>(current_)]; }

  const Scenario* scenario_ = nullptr;
  Memory memory_;
  std::size_t unwatched_ = 0;
  std::array<Rank, kMaxRanks> ranks_;
  jmp_buf scheduler_;
  std::array<void*, 2> exceptions_{};
  int current_ = -1, last_ = 0, preemptions_ = 0;
  std::vector<Node> path_;
  std::unordered_set<std::uint64_t> visited_;
  std::vector<Access> trace_;
  Found found_;
};

/// For the instrumentation, which must call nothing to learn it: while a rank runs, the memory that is watched.
struct Watched {
  const std::byte *begin = nullptr, *end = nullptr;
};
extern Watched watched;

/// The one of this process.
Explorer& explorer();

}  // namespace model
