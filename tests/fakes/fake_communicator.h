#pragma once

// A communicator of the stand-in of NCCL: what its ranks share, and what its operations do in their streams.

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_connections.h"
#include "fake_elements.h"
#include "fake_gpu.h"

namespace fake {

enum Result {
  kSuccess,
  kUnhandledCudaError,
  kSystemError,
  kInternalError,
  kInvalidArgument,
  kInvalidUsage,
  kRemoteError,
  kInProgress
};
constexpr std::size_t kChunk = 256 << 10, kPipe = 64 << 10;

inline std::string text_of(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : otherwise;  // NCCL takes an empty variable for none
}
inline int version() { return std::atoi(text_of("FAKE_NCCL_VERSION", "22809").c_str()); }

struct Signature {
  Kind kind;
  std::size_t count;
  int type, op, root;
  bool operator==(const Signature& b) const {
    return kind == b.kind && count == b.count && type == b.type && op == b.op && root == b.root;
  }
};

/// What ranks share, in a mapped file. It starts as zeroes.
struct Shared {
  std::atomic<int> n_attached, n_ended;
  struct Barrier {
    std::atomic<int> n_arrived, phase;
  } in_streams, on_hosts;
  struct Split {
    int color, key;
  } splits[kMaxRanks];
  SharedConnections connections;
  struct Slot {
    int version;
    char bus_id[32], host[64];
    Signature signature;
    double factor;
    bool scaled;
    alignas(64) std::byte chunk[kChunk];
  } slots[kMaxRanks];
  struct Pipe {
    std::atomic<std::size_t> written, read;
    std::byte bytes[kPipe];
  } pipes[kMaxRanks][kMaxRanks];
};

inline Signature signature_of(const Task& task) { return {task.kind, task.count, task.type, task.op, task.root}; }

/// What a call has left to do in a thread of its own.
class Job {
 public:
  /// An earlier one has ended.
  void run(std::function<void()> act) {
    const std::lock_guard lock(mutex_);
    if (thread_.joinable()) thread_.join();
    thread_ = std::thread(std::move(act));
  }
  void join() {
    const std::lock_guard lock(mutex_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::mutex mutex_;
  std::thread thread_;
};

/// Unlike std::thread::id never used again.
inline long thread_number() {
  static std::atomic<long> n{0};
  thread_local const long mine = ++n;
  return mine;
}

/// Kernels that run one after the other, in the order of their launches.
class Kernels {
 public:
  long take_ticket() {
    const std::lock_guard lock(mutex_);
    return last_++;
  }
  /// Whether it is the turn of `ticket`.
  bool serves(long ticket) {
    const std::lock_guard lock(mutex_);
    while (given_up_.erase(serving_) != 0) ++serving_;
    return serving_ == ticket;
  }
  /// The kernel has ended, or will not run.
  void give_up(long ticket) {
    const std::lock_guard lock(mutex_);
    given_up_.insert(ticket);
  }

 private:
  std::mutex mutex_;
  long last_ = 0, serving_ = 0;
  std::set<long> given_up_;
};

struct Comm {
  Shared* shared = nullptr;
  int rank = 0, size = 1, device = 0;
  bool blocking = true, shares = false;  // with those that are split off it
  std::atomic<int> error{kSuccess};
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  std::atomic<int> polls_left{0};
  std::atomic<int> n_inside{0};  // calls that other threads are in
  Job job;
  std::string last_error, path;
  long maker = 0;               // members of one clique that one thread has made are called together
  std::vector<double> factors;  // of operators made at run time
  long n_operations = 0;
  int n_splits = 0;
  Connections connections;
  Kernels kernels;
  std::shared_ptr<int> in_streams = std::make_shared<int>();  // held by operations of streams, and of graphs

  ~Comm() {
    if (shared != nullptr) ::munmap(shared, sizeof *shared);
  }

  void fail(int code, const std::string& text) {
    last_error = text;
    error = code;
  }

  template <class Ready>
  bool wait(Ready ready) {
    for (unsigned n = 0; !ready(); ++n) {
      if (*aborted) return false;
      if (n < 50) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    return !*aborted;
  }

  bool barrier() { return synchronize(shared->in_streams); }
  bool synchronize(Shared::Barrier& barrier) {
    const int phase = barrier.phase;
    if (barrier.n_arrived.fetch_add(1) + 1 == size) {
      barrier.n_arrived = 0;
      barrier.phase = phase + 1;
      return true;
    }
    const Stuck stuck([this, &barrier, phase] { return *aborted || barrier.phase != phase; });
    return wait([&] { return barrier.phase != phase; });
  }
  bool hang() {
    const Stuck stuck([this] { return aborted->load(); });
    return wait([] { return false; });
  }

  /// What is to go wrong with this operation on this rank: "", error, hang or die.
  std::string accident(const std::string& operation) const {
    const std::string wanted = text_of("FAKE_NCCL_FAIL", ""), mine = std::to_string(rank) + ":" + operation + ":";
    return wanted.compare(0, mine.size(), mine) == 0 ? wanted.substr(mine.size()) : "";
  }
  /// False where it went wrong.
  bool survive(const std::string& operation) {
    const std::string what = accident(operation);
    if (what == "die") ::kill(::getpid(), SIGKILL);
    if (what == "hang") return hang();
    if (what == "error") fail(kSystemError, "fake: injected error");
    return what.empty();
  }

  void open() {
    Shared::Slot& mine = shared->slots[rank];
    mine.version = version();
    const std::string identity = version() >= 23000 ? uuid(device) : bus_id(device);
    std::strncpy(mine.bus_id, identity.c_str(), sizeof mine.bus_id - 1);
    const std::string host = text_of("NCCL_HOSTID", "here");
    std::strncpy(mine.host, host.c_str(), sizeof mine.host - 1);
    if (!survive("init")) return;
    ++shared->n_attached;
    if (!wait([&] { return shared->n_attached == size; }) || !synchronize(shared->on_hosts)) return;
    if (rank == 0) ::unlink(path.c_str());
    for (int r = 0; r < size; ++r) {
      const Shared::Slot& theirs = shared->slots[r];
      if (theirs.version != mine.version) return fail(kInvalidUsage, "Mismatched NCCL version detected");
      const bool same = std::strcmp(theirs.bus_id, mine.bus_id) == 0 && std::strcmp(theirs.host, mine.host) == 0;
      if (r != rank && same && text_of("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "1") {
        return fail(kInvalidUsage, "Duplicate GPU detected");
      }
    }
    if (synchronize(shared->on_hosts)) error = kSuccess;
  }

  // ---- what runs in streams

  /// Once per rank and chunk: between the two barriers the slots hold the chunks of all ranks.
  template <class Use>
  bool exchange(const std::byte* mine, std::size_t nbytes, Use use) {
    if (mine != nullptr) std::memcpy(shared->slots[rank].chunk, mine, nbytes);
    if (!barrier()) return false;
    use();
    return barrier();
  }

  bool agree(const Task& task) {
    Shared::Slot& mine = shared->slots[rank];
    mine.signature = signature_of(task);
    mine.factor = task.factor;
    mine.scaled = task.scaled;
    if (!barrier()) return false;
    bool same = true;
    for (int r = 0; r < size; ++r) same = same && shared->slots[r].signature == mine.signature;
    if (!barrier()) return false;
    if (same) return true;
    if (text_of("FAKE_NCCL_MISMATCH", "") == "hang") return hang();
    fail(kInvalidUsage, "fake: the ranks do not agree on an operation");
    return false;
  }

  void reduce_chunk(const Task& task, std::byte* out, std::size_t count) {
    std::vector<Term> terms;
    for (int r = 0; r < size; ++r) {
      const Shared::Slot& slot = shared->slots[r];
      terms.push_back({slot.chunk, slot.factor, slot.scaled});
    }
    if (!reduce(task.type, terms, task.op, out, count)) fail(kInvalidArgument, "fake: no reduction of this type");
  }

  bool collective(const Task& task) {
    if (!agree(task)) return false;
    const std::size_t item = size_of(task.type), most = kChunk / item;
    const int n_blocks = task.kind == Kind::reduce_scatter ? size : 1;
    const bool slow = text_of("FAKE_NCCL_SLOW", "") == std::to_string(rank);
    std::vector<std::byte> late;  // what others have already, in the case of all_reduce
    for (int block = 0; block < n_blocks; ++block) {
      const std::size_t start = static_cast<std::size_t>(block) * task.count;
      for (std::size_t at = 0; at < task.count; at += most) {
        const std::size_t count = std::min(most, task.count - at), nbytes = count * item;
        const bool gives = task.kind != Kind::broadcast || rank == task.root;
        const bool ok = exchange(gives ? task.in + (start + at) * item : nullptr, nbytes, [&] {
          switch (task.kind) {
            case Kind::broadcast:
              std::memcpy(task.out + at * item, shared->slots[task.root].chunk, nbytes);
              break;
            case Kind::all_gather:
              for (int r = 0; r < size; ++r) {
                std::memcpy(task.out + (static_cast<std::size_t>(r) * task.count + at) * item, shared->slots[r].chunk,
                            nbytes);
              }
              break;
            case Kind::reduce:
              if (rank == task.root) reduce_chunk(task, task.out + at * item, count);
              break;
            case Kind::reduce_scatter:
              if (rank == block) reduce_chunk(task, task.out + at * item, count);
              break;
            default:
              late.resize(nbytes);
              reduce_chunk(task, late.data(), count);
          }
        });
        if (!ok) return false;
        if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        if (task.kind == Kind::all_reduce && nbytes != 0) std::memcpy(task.out + at * item, late.data(), nbytes);
      }
    }
    return true;
  }

  /// Sends and receives of one group, all at once. Each begins with what it is.
  bool messages(const std::vector<Task>& tasks) {
    struct Progress {
      const Task* task;
      Shared::Pipe* pipe;
      std::size_t at, total;
      bool head;
    };
    std::vector<Progress> open;
    for (const Task& task : tasks) {
      if (task.kind != Kind::send && task.kind != Kind::receive) continue;
      auto* pipe = task.kind == Kind::send ? &shared->pipes[rank][task.root] : &shared->pipes[task.root][rank];
      open.push_back({&task, pipe, 0, task.count * size_of(task.type), true});
    }
    const Stuck stuck([this] { return aborted->load(); });
    return wait([&] {
      std::vector<std::pair<const Shared::Pipe*, Kind>> busy;  // an earlier message in the same pipe is first
      for (auto it = open.begin(); it != open.end();) {
        const auto end = std::make_pair(static_cast<const Shared::Pipe*>(it->pipe), it->task->kind);
        const bool mine = std::find(busy.begin(), busy.end(), end) == busy.end();
        if (mine && advance(*it->task, *it->pipe, it->at, it->total, it->head)) {
          it = open.erase(it);
        } else {
          busy.push_back(end);
          ++it;
        }
      }
      return open.empty() || error == kInvalidUsage;
    });
  }

  bool advance(const Task& task, Shared::Pipe& pipe, std::size_t& at, std::size_t total, bool& head) {
    const bool sends = task.kind == Kind::send;
    const std::size_t n_head = 16;
    const auto ready = [&] {
      const std::size_t inside = pipe.written - pipe.read;
      return sends ? kPipe - inside : inside;
    };
    if (head) {
      if (ready() < n_head) return false;
      std::uint64_t words[2] = {task.count, static_cast<std::uint64_t>(task.type)};
      if (sends) {
        put(pipe, reinterpret_cast<std::byte*>(words), n_head);
      } else {
        take(pipe, reinterpret_cast<std::byte*>(words), n_head);
        if (words[0] != task.count || words[1] != static_cast<std::uint64_t>(task.type)) {
          fail(kInvalidUsage, "fake: a message is received as something else than was sent");
          return true;
        }
      }
      head = false;
    }
    const std::size_t nbytes = std::min(ready(), total - at);
    if (sends) {
      put(pipe, task.in + at, nbytes);
    } else {
      take(pipe, task.out + at, nbytes);
    }
    at += nbytes;
    return at == total;
  }
  static void put(Shared::Pipe& pipe, const std::byte* from, std::size_t nbytes) {
    for (std::size_t i = 0; i < nbytes; ++i) pipe.bytes[(pipe.written + i) % kPipe] = from[i];
    pipe.written += nbytes;
  }
  static void take(Shared::Pipe& pipe, std::byte* to, std::size_t nbytes) {
    for (std::size_t i = 0; i < nbytes; ++i) to[i] = pipe.bytes[(pipe.read + i) % kPipe];
    pipe.read += nbytes;
  }

  void run(const std::vector<Task>& tasks, long first) {
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const int state = error;  // in progress: a later call has not started
      if (*aborted || (state != kSuccess && state != kInProgress) ||
          !survive(std::to_string(first + static_cast<long>(i))))
        return;
      if (tasks[i].kind != Kind::send && tasks[i].kind != Kind::receive && !collective(tasks[i])) return;
    }
    messages(tasks);
  }
};

}  // namespace fake
