#pragma once

// What members of a clique do together before they first use an algorithm or each other. On devices with cuMem NCCL
// connects them only then, and that takes until all of them have arrived.

#include <atomic>
#include <cstddef>
#include <functional>
#include <vector>

#include "fake_elements.h"

namespace fake {

constexpr int kMaxRanks = 8;
enum class Kind : int { all_reduce, reduce, broadcast, all_gather, reduce_scatter, send, receive };

struct Task {
  Kind kind;
  std::byte *in, *out;
  std::size_t count;
  int type, op, root;
  double factor;
  bool scaled;
  std::size_t in_nbytes = 0, out_nbytes = 0;
};

enum Algorithm : int { ring, tree, pat, n_algorithms };

/// Broadcasts and reductions to one rank know the ring only, and so do sums with a factor, which the algorithms of
/// switches cannot compute. Of the others short ones use another algorithm.
inline Algorithm algorithm_of(const Task& task) {
  constexpr std::size_t kShort = 50000;  // bytes; no power of two, as in reality
  if (task.kind == Kind::broadcast || task.kind == Kind::reduce || task.scaled) return ring;
  if (task.count * size_of(task.type) > kShort) return ring;
  return task.kind == Kind::all_reduce ? tree : pat;
}

/// In a mapped file, which starts as zeroes.
struct SharedConnections {
  std::atomic<int> n_came[n_algorithms];
  std::atomic<bool> sender_came[kMaxRanks][kMaxRanks], receiver_came[kMaxRanks][kMaxRanks];  // [from][to]
};

/// Those of one member.
class Connections {
 public:
  /// Comes for what `tasks` need and this member has not used before. The conditions to wait for.
  std::vector<std::function<bool()>> come_for(const std::vector<Task>& tasks, SharedConnections& shared, int rank,
                                              int size) {
    std::vector<std::function<bool()>> ready;
    for (const Task& task : tasks) {
      if (task.kind == Kind::send || task.kind == Kind::receive) {
        const bool sends = task.kind == Kind::send;
        const int from = sends ? rank : task.root, to = sends ? task.root : rank;
        if (std::exchange((sends ? sends_to_ : receives_from_)[task.root], true)) continue;
        (sends ? shared.sender_came : shared.receiver_came)[from][to] = true;
        ready.push_back([&shared, from, to] { return shared.sender_came[from][to] && shared.receiver_came[from][to]; });
      } else {
        std::atomic<int>& n_came = shared.n_came[algorithm_of(task)];
        if (std::exchange(uses_[algorithm_of(task)], true)) continue;
        ++n_came;
        ready.push_back([&n_came, size] { return n_came == size; });
      }
    }
    return ready;
  }

 private:
  bool uses_[n_algorithms] = {}, sends_to_[kMaxRanks] = {}, receives_from_[kMaxRanks] = {};
};

}  // namespace fake
