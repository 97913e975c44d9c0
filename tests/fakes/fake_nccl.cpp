// A stand-in for libnccl (or, built against the other runtime, librccl). For tests only: never installed, never where
// a loader would look.
//
// Ranks meet in a file whose name travels in the unique id. Each operation runs in its stream, with real arithmetic.
// It is stricter than NCCL: ranks that disagree about an operation get ncclInvalidUsage as asynchronous error, or
// hang, as they would there. A rank that has died is not noticed, as with NCCL over shared memory. Several members of
// a clique that one thread makes, calls or ends have to be in one group, where NCCL may hang.
//
//   FAKE_NCCL_VERSION      what ncclGetVersion says (22809)
//   FAKE_NCCL_MISMATCH     "hang": ranks that disagree hang
//   FAKE_NCCL_IN_PROGRESS  n: calls return ncclInProgress, and what they started begins after n looks at the state
//   FAKE_NCCL_SLOW         rank: its results come 50 ms after the others have theirs
//   FAKE_NCCL_FAIL         rank:operation:what, where operation is a number from 0 or "init", and what is
//                          error, hang or die

#include <fcntl.h>

#include <cstdio>
#include <memory>
#include <mutex>
#include <random>

#include "fake_communicator.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace fake;

using CommPtr = std::shared_ptr<Comm>;
std::mutex comms_mutex;
std::vector<CommPtr>& comms() {
  static auto& all = *new std::vector<CommPtr>;
  return all;
}
CommPtr find(void* handle) {
  const std::lock_guard lock(comms_mutex);
  for (const CommPtr& comm : comms()) {
    if (comm.get() == handle) return comm;
  }
  return nullptr;
}
void forget(void* handle) {
  const std::lock_guard lock(comms_mutex);
  for (auto it = comms().begin(); it != comms().end(); ++it) {
    if (it->get() == handle) {
      comms().erase(it);
      return;
    }
  }
}

struct Launch {
  CommPtr comm;
  void* stream;
  Task task;
};
thread_local int group_depth = 0;
thread_local std::vector<Launch> group;
thread_local int group_error = kSuccess;
thread_local std::vector<CommPtr> group_inits, group_ends;
thread_local std::string last_error;

int refuse(int code, const std::string& why) {
  last_error = why;
  if (group_depth > 0) group_error = code;
  return code;
}

bool start(const CommPtr& comm, void* stream, std::vector<Task> tasks) {
  const long first = comm->n_operations;
  comm->n_operations += static_cast<long>(tasks.size());
  return enqueue(stream, comm->device, [comm, tasks, first] { comm->run(tasks, first); });
}

/// Communicators of the clique of `comm` that the same thread has made.
std::vector<CommPtr> siblings_of(const Comm& comm) {
  std::vector<CommPtr> found;
  const std::lock_guard lock(comms_mutex);
  for (const CommPtr& other : comms()) {
    if (other->path == comm.path && other->maker == comm.maker) found.push_back(other);
  }
  return found;
}

/// Whether all members of one thread are in the group, with as many calls: NCCL may wait for the others in the first.
template <class ByComm>
bool all_siblings_in(const ByComm& by_comm) {
  const auto n_calls_of = [&](const CommPtr& comm) {
    std::size_t n = 0;
    for (const auto& [key, tasks] : by_comm) n += key.first == comm ? tasks.size() : 0;
    return n;
  };
  for (const auto& [key, tasks] : by_comm) {
    for (const CommPtr& sibling : siblings_of(*key.first)) {
      if (n_calls_of(sibling) != n_calls_of(key.first)) return false;
    }
  }
  return true;
}

bool overlap(const std::byte* a, std::size_t a_nbytes, const std::byte* b, std::size_t b_nbytes) {
  return a != nullptr && b != nullptr && a < b + b_nbytes && b < a + a_nbytes;
}

/// Whether a task has the input where NCCL's documentation allows it beside the output.
bool is_in_place(const Comm& comm, const Task& task) {
  const auto rank = static_cast<std::size_t>(comm.rank);
  if (task.kind == Kind::all_gather) return task.in == task.out + rank * task.in_nbytes;
  if (task.kind == Kind::reduce_scatter) return task.out == task.in + rank * task.out_nbytes;
  return task.in == task.out;
}

/// Whether what the tasks of a group write is otherwise read or written by one of them: NCCL gives wrong results then.
bool has_overlaps(const Comm& comm, const std::vector<Task>& tasks) {
  for (const Task& writer : tasks) {
    if (overlap(writer.out, writer.out_nbytes, writer.in, writer.in_nbytes) && !is_in_place(comm, writer)) return true;
    for (const Task& other : tasks) {
      if (&other == &writer) continue;
      if (overlap(writer.out, writer.out_nbytes, other.in, other.in_nbytes)) return true;
      if (overlap(writer.out, writer.out_nbytes, other.out, other.out_nbytes)) return true;
    }
  }
  return false;
}

int launch_group() {
  std::vector<std::pair<std::pair<CommPtr, void*>, std::vector<Task>>> by_comm;
  for (Launch& launch : group) {
    const auto key = std::make_pair(launch.comm, launch.stream);
    auto it = std::find_if(by_comm.begin(), by_comm.end(), [&](const auto& entry) { return entry.first == key; });
    if (it == by_comm.end()) it = by_comm.insert(by_comm.end(), {key, {}});
    it->second.push_back(launch.task);
  }
  group.clear();
  if (!all_siblings_in(by_comm)) {
    return refuse(kInvalidUsage, "fake: all members of a clique in one thread must be called in one group");
  }
  for (const auto& [key, tasks] : by_comm) {
    if (has_overlaps(*key.first, tasks)) return refuse(kInvalidArgument, "fake: buffers of one launch overlap");
  }
  int result = kSuccess;
  for (auto& [key, tasks] : by_comm) {
    Comm& comm = *key.first;
    if (const int polls = std::atoi(text_of("FAKE_NCCL_IN_PROGRESS", "0").c_str()); !comm.blocking && polls > 0) {
      comm.late.emplace_back(key.second, tasks);
      comm.polls_left = polls;
      comm.error = kInProgress;
      result = kInProgress;
    } else if (!start(key.first, key.second, tasks)) {
      result = refuse(kInvalidArgument, "fake: the stream is not one of the communicator's device");
    }
  }
  return result;
}

int open_group(const std::vector<CommPtr>& inits) {
  for (const CommPtr& comm : inits) {
    comm->opener = std::thread([raw = comm.get()] { raw->open(); });
  }
  int result = kSuccess;
  for (const CommPtr& comm : inits) {
    if (!comm->blocking) return kInProgress;
    comm->opener.join();
    if (comm->error != kSuccess) result = comm->error;
  }
  return result;
}

int end_group(const std::vector<CommPtr>& ends) {
  for (const CommPtr& comm : ends) {
    for (const CommPtr& sibling : siblings_of(*comm)) {
      if (std::find(ends.begin(), ends.end(), sibling) == ends.end()) {
        return refuse(kInvalidUsage, "fake: all members of a clique in one thread must be ended in one group");
      }
    }
  }
  for (const CommPtr& comm : ends) {
    if (comm->opener.joinable()) comm->opener.join();
    forget(comm.get());
  }
  return kSuccess;
}

int end(void* handle, bool abort) {
  const CommPtr comm = find(handle);
  if (!comm) return kInvalidArgument;
  if (abort) comm->aborted = true;
  if (group_depth == 0) return end_group({comm});
  group_ends.push_back(comm);
  return kSuccess;
}

std::atomic<long>& n_calls() {
  static std::atomic<long> n{0};
  return n;
}

int add(void* handle, Kind kind, const void* in, void* out, std::size_t count, int type, int op, int root,
        void* stream) {
  ++n_calls();
  const CommPtr comm = find(handle);
  if (!comm) return refuse(kInvalidArgument, "fake: no such communicator");
  if (comm->error != kSuccess) return refuse(kInvalidUsage, "fake: the communicator is not ready: " + comm->last_error);
  if (current_device() != comm->device) return refuse(kInvalidUsage, "fake: another device is current");
  if (type < 0 || type >= n_types || root >= comm->size) return refuse(kInvalidArgument, "fake: bad type or root");
  const std::size_t nbytes = count * size_of(type), all = nbytes * static_cast<std::size_t>(comm->size);
  const bool gives = kind != Kind::receive && (kind != Kind::broadcast || comm->rank == root);
  const bool gets = kind != Kind::send && (kind != Kind::reduce || comm->rank == root);
  Task task{kind, nullptr, nullptr, count, type, op, root, 1.0, false};
  if (op >= n_ops) {
    const auto index = static_cast<std::size_t>(op - n_ops);
    if (index >= comm->factors.size()) return refuse(kInvalidArgument, "fake: no such operator");
    task.op = sum;
    task.factor = comm->factors[index];
    task.scaled = true;
  }
  task.in_nbytes = kind == Kind::reduce_scatter ? all : nbytes;
  task.out_nbytes = kind == Kind::all_gather ? all : nbytes;
  if (gives) task.in = reach(in, task.in_nbytes, comm->device);
  if (gets) task.out = reach(out, task.out_nbytes, comm->device);
  if (nbytes != 0 && ((gives && task.in == nullptr) || (gets && task.out == nullptr))) {
    return refuse(kInvalidArgument, "fake: a buffer is not memory of the communicator's device");
  }
  group.push_back({comm, stream, task});
  return group_depth > 0 ? kSuccess : launch_group();
}

}  // namespace

struct UniqueId {
  char text[128];
};
struct Config {  // the fields that every version has
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

EXPORT int ncclGetVersion(int* out) {
  *out = version();
  return kSuccess;
}
EXPORT const char* ncclGetErrorString(int code) {
  static const char* texts[] = {"no error",
                                "unhandled cuda error",
                                "unhandled system error",
                                "internal error",
                                "invalid argument",
                                "invalid usage",
                                "remote process exited or there was a network error",
                                "NCCL operation in progress"};
  return code >= 0 && code <= kInProgress ? texts[code] : "unknown result code";
}
EXPORT const char* ncclGetLastError(void* handle) {
  const CommPtr comm = find(handle);
  if (comm && !comm->last_error.empty()) last_error = comm->last_error;
  return last_error.c_str();
}
EXPORT int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->text, sizeof id->text, "%s/fake-nccl-%d-%08x", text_of("TMPDIR", "/tmp").c_str(), ::getpid(),
                random());
  const int fd = ::open(id->text, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 || ::ftruncate(fd, sizeof(Shared)) != 0) return kSystemError;
  ::close(fd);
  return kSuccess;
}

EXPORT int ncclCommInitRankConfig(void** out, int size, UniqueId id, int rank, const Config* config) {
  if (config->magic != 0xcafebeef) return refuse(kInvalidArgument, "fake: the config has no magic");
  if (size > kMaxRanks || rank < 0 || rank >= size) return refuse(kInvalidArgument, "fake: bad rank or size");
  const int fd = ::open(id.text, O_RDWR | O_CLOEXEC);
  if (fd < 0) return refuse(kSystemError, "fake: nobody has made this unique id");
  void* memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (memory == MAP_FAILED) return refuse(kSystemError, "fake: no memory");
  auto comm = std::make_shared<Comm>();
  comm->shared = static_cast<Shared*>(memory);
  comm->rank = rank;
  comm->size = size;
  comm->device = current_device();
  comm->blocking = config->blocking != 0;
  comm->error = kInProgress;
  comm->path = id.text;
  comm->maker = std::this_thread::get_id();
  if (group_depth == 0 && !siblings_of(*comm).empty()) {
    return refuse(kInvalidUsage, "fake: one thread makes several members of a clique outside a group");
  }
  {
    const std::lock_guard lock(comms_mutex);
    comms().push_back(comm);
  }
  *out = comm.get();
  if (group_depth > 0) {
    group_inits.push_back(comm);
    return kSuccess;
  }
  comm->opener = std::thread([raw = comm.get()] { raw->open(); });
  if (!comm->blocking) return kInProgress;
  comm->opener.join();
  return comm->error;
}
EXPORT int ncclCommGetAsyncError(void* handle, int* out) {
  const CommPtr comm = find(handle);
  if (!comm) return kInvalidArgument;
  if (comm->error == kInProgress && !comm->late.empty() && --comm->polls_left <= 0) {
    comm->error = kSuccess;
    for (auto& [stream, tasks] : comm->late) start(comm, stream, tasks);
    comm->late.clear();
  }
  *out = comm->error;
  return kSuccess;
}
EXPORT int ncclCommAbort(void* handle) { return end(handle, /*abort=*/true); }
EXPORT int ncclCommFinalize(void* handle) { return find(handle) ? kSuccess : kInvalidArgument; }
EXPORT int ncclCommDestroy(void* handle) { return end(handle, /*abort=*/false); }
EXPORT int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, void* handle) {
  const CommPtr comm = find(handle);
  if (!comm || residence != 1) return refuse(kInvalidArgument, "fake: a factor must come from the host");
  double factor = 0;
  switch (type) {
    case float64:
      factor = *static_cast<double*>(scalar);
      break;
    case float32:
      factor = *static_cast<float*>(scalar);
      break;
    case float16:
      factor = from_float16(*static_cast<std::uint16_t*>(scalar));
      break;
    case bfloat16:
      factor = from_bfloat16(*static_cast<std::uint16_t*>(scalar));
      break;
    default:
      return refuse(kInvalidArgument, "fake: factors are of floating point");
  }
  comm->factors.push_back(factor);
  *op = n_ops + static_cast<int>(comm->factors.size()) - 1;
  return kSuccess;
}
EXPORT int ncclRedOpDestroy(int, void* handle) { return find(handle) ? kSuccess : kInvalidArgument; }

EXPORT int ncclGroupStart() {
  ++group_depth;
  return kSuccess;
}
EXPORT int ncclGroupEnd() {
  if (group_depth == 0) return refuse(kInvalidUsage, "fake: ncclGroupEnd without ncclGroupStart");
  if (--group_depth > 0) return kSuccess;
  const int error = group_error;
  group_error = kSuccess;
  const std::vector<CommPtr> inits = std::exchange(group_inits, {}), ends = std::exchange(group_ends, {});
  if (!inits.empty() + !ends.empty() + !group.empty() > 1) {
    group.clear();
    return refuse(kInvalidUsage, "fake: communicators are made, used and ended in one group");
  }
  if (error == kSuccess) return !inits.empty() ? open_group(inits) : !ends.empty() ? end_group(ends) : launch_group();
  group.clear();
  return error;
}
EXPORT int ncclAllReduce(const void* in, void* out, std::size_t count, int type, int op, void* comm, void* stream) {
  return add(comm, Kind::all_reduce, in, out, count, type, op, -1, stream);
}
EXPORT int ncclReduce(const void* in, void* out, std::size_t count, int type, int op, int root, void* comm,
                      void* stream) {
  return add(comm, Kind::reduce, in, out, count, type, op, root, stream);
}
EXPORT int ncclBroadcast(const void* in, void* out, std::size_t count, int type, int root, void* comm, void* stream) {
  return add(comm, Kind::broadcast, in, out, count, type, 0, root, stream);
}
EXPORT int ncclAllGather(const void* in, void* out, std::size_t count, int type, void* comm, void* stream) {
  return add(comm, Kind::all_gather, in, out, count, type, 0, -1, stream);
}
EXPORT int ncclReduceScatter(const void* in, void* out, std::size_t count, int type, int op, void* comm, void* stream) {
  return add(comm, Kind::reduce_scatter, in, out, count, type, op, -1, stream);
}
EXPORT int ncclSend(const void* in, std::size_t count, int type, int peer, void* comm, void* stream) {
  return add(comm, Kind::send, in, nullptr, count, type, 0, peer, stream);
}
EXPORT int ncclRecv(void* out, std::size_t count, int type, int peer, void* comm, void* stream) {
  return add(comm, Kind::receive, nullptr, out, count, type, 0, peer, stream);
}
/// Collectives and messages that this process has asked for.
EXPORT long fakeNcclCalls() { return n_calls(); }
/// Communicators of this process that exist.
EXPORT long fakeNcclComms() {
  const std::lock_guard lock(comms_mutex);
  return static_cast<long>(comms().size());
}
