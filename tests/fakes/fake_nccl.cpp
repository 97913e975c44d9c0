// A stand-in for libnccl (or, built against the other runtime, librccl). For tests only: never installed, never where
// a loader would look.
//
// Ranks meet in a file whose name travels in the unique id. Each operation runs in its stream, with real arithmetic.
// It is stricter than NCCL: ranks that disagree about an operation get ncclInvalidUsage as asynchronous error, or
// hang, as they would there. A rank that has died is not noticed, as with NCCL over shared memory. Several members of
// a clique that one thread makes, calls or ends have to be in one group, where NCCL may hang.
//
// As in NCCL, members connect at their first use of an algorithm or of each other, which waits for the others; every
// group of a non-blocking communicator starts a thread; a communicator of one rank copies at once; to end a
// communicator waits for the device, and to destroy it for the other ranks; one with an error cannot be destroyed.
// Stricter than NCCL: a communicator that a thread is calling must not be ended. With NCCL_LAUNCH_ORDER_IMPLICIT=1 two
// threads must not launch operations of one device at a time.
//
//   FAKE_NCCL_VERSION      what ncclGetVersion says (22809)
//   FAKE_NCCL_MISMATCH     "hang": ranks that disagree hang
//   FAKE_NCCL_IN_PROGRESS  n: what calls start begins after n looks: at the state, or in a blocking communicator at
//                          whether to end
//   FAKE_NCCL_ONE_AT_A_TIME  1: the kernels of a device run one after the other, in the order of their launches
//   FAKE_NCCL_SLOW         rank: its results come 50 ms after the others have theirs
//   FAKE_NCCL_FAIL         rank:operation:what, where operation is a number from 0 or "init", and what is
//                          error, hang or die

#include "fake_nccl.h"

#include <fcntl.h>

#include <climits>
#include <cstdio>
#include <random>

using namespace fake;

struct UniqueId {
  char text[128];
};
struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking;  // the last that every version has
  int cga_cluster_size, min_ctas, max_ctas;
  const char* net_name;
  int split_share;
};

namespace {

constexpr int kNoSplit = -1, kUndefined = INT_MIN;

std::atomic<long>& n_looks_for_ends() {
  static std::atomic<long> n{0};
  return n;
}

int open_group(const std::vector<CommPtr>& inits) {
  for (const CommPtr& comm : inits) {
    comm->job.run([raw = comm.get()] { raw->open(); });
  }
  int result = kSuccess;
  for (const CommPtr& comm : inits) {
    if (!comm->blocking) return kInProgress;
    comm->job.join();
    if (comm->error != kSuccess) result = comm->error;
  }
  return result;
}

/// Ends all of them: `abort` says which at once.
int end_group(const std::vector<CommPtr>& ends) {
  for (const CommPtr& comm : ends) {
    for (const CommPtr& sibling : siblings_of(*comm)) {
      if (std::find(ends.begin(), ends.end(), sibling) == ends.end()) {
        return refuse(kInvalidUsage, "fake: all members of a clique in one thread must be ended in one group");
      }
    }
  }
  for (const CommPtr& comm : ends) {
    comm->job.join();
    ++comm->shared->n_ended;
  }
  for (const CommPtr& comm : ends) {
    comm->wait([&] {
      if (comm->shared->n_ended >= comm->size) return true;
      ++n_looks_for_ends();
      return false;
    });
    drain(comm->device);                                            // to free memory waits for all that the device has
    comm->wait([&] { return comm->in_streams.use_count() == 1; });  // also for graphs, as NCCL does
    forget(comm.get());
  }
  return kSuccess;
}

int end(void* handle, bool abort) {
  const CommPtr comm = find(handle);
  if (!comm) return kInvalidArgument;
  if (comm->n_inside > 0 && comm->blocking) {
    std::fprintf(stderr, "fake: a communicator is ended while a thread is calling it\n");
    std::abort();
  }
  if (abort) {
    *comm->aborted = true;
  } else if (comm->error != kSuccess) {
    ++group_depth;  // as in NCCL, whose later calls in this thread then never begin
    return comm->error;
  }
  if (group_depth == 0) return end_group({comm});
  group_ends.push_back(comm);
  return kSuccess;
}

/// Null if the configuration is wrong.
CommPtr make_comm(const Config* config, int rank, int size, const std::string& path) {
  if (config->magic != 0xcafebeef) return nullptr;
  const bool has_rest = config->size >= sizeof(Config) && config->version >= 21800;
  if (has_rest && (config->cga_cluster_size != kUndefined || config->min_ctas != kUndefined ||
                   config->max_ctas != kUndefined || config->net_name != nullptr))
    return nullptr;
  auto comm = std::make_shared<Comm>();
  comm->rank = rank;
  comm->size = size;
  comm->device = current_device();
  comm->blocking = text_of("NCCL_COMM_BLOCKING", config->blocking != 0 ? "1" : "0") != "0";
  comm->shares = has_rest && config->split_share == 1;
  comm->error = kInProgress;
  comm->path = path;
  comm->maker = thread_number();
  return comm;
}

/// Maps what ranks share. False if there is no such file.
bool attach(Comm& comm, int flags) {
  const int fd = ::open(comm.path.c_str(), O_RDWR | O_CLOEXEC | flags, 0600);
  if (fd < 0) return false;
  void* memory = MAP_FAILED;
  if (::ftruncate(fd, sizeof(Shared)) == 0) {
    memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  ::close(fd);
  if (memory == MAP_FAILED) return false;
  comm.shared = static_cast<Shared*>(memory);
  return true;
}

/// Makes the child of `parent` that has the ranks of its color, and stores it in `out` once it is complete.
int split(Comm& parent, const CommPtr& child, int color, int key, void** out) {
  parent.shared->splits[parent.rank] = {color, key};
  if (!parent.synchronize(parent.shared->on_hosts)) return kInternalError;
  child->rank = child->size = 0;
  for (int r = 0; r < parent.size; ++r) {
    const Shared::Split& other = parent.shared->splits[r];
    if (other.color != color) continue;
    ++child->size;
    if (other.key < key || (other.key == key && r < parent.rank)) ++child->rank;
  }
  if (!parent.synchronize(parent.shared->on_hosts)) return kInternalError;
  if (color == kNoSplit) return kSuccess;
  if (!attach(*child, O_CREAT)) return kSystemError;
  child->open();
  if (child->error != kSuccess) {
    parent.last_error = child->last_error;
    return child->error;
  }
  *out = child.get();
  const std::lock_guard lock(comms_mutex);
  comms().push_back(child);
  return kSuccess;
}

}  // namespace

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

std::string interfaces;  // what NCCL has been told of them when it started; guarded by `comms_mutex`

EXPORT int ncclCommInitRankConfig(void** out, int size, UniqueId id, int rank, const Config* config) {
  {
    const std::lock_guard lock(comms_mutex);
    interfaces = text_of("NCCL_SOCKET_IFNAME", "");
  }
  if (size > kMaxRanks || rank < 0 || rank >= size) return refuse(kInvalidArgument, "fake: bad rank or size");
  const CommPtr comm = make_comm(config, rank, size, id.text);
  if (!comm) return refuse(kInvalidArgument, "fake: the config is wrong");
  if (!attach(*comm, 0)) return refuse(kSystemError, "fake: nobody has made this unique id");
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
  return open_group({comm});
}
EXPORT int ncclCommSplit(void* handle, int color, int key, void** out, const Config* config) {
  const CommPtr parent = find(handle);
  if (!parent) return refuse(kInvalidArgument, "fake: no such communicator");
  if (parent->error != kSuccess) return refuse(kInvalidUsage, "fake: the communicator is not ready");
  const std::string path = parent->path + "-" + std::to_string(++parent->n_splits) + "-" + std::to_string(color);
  const CommPtr child = make_comm(config, 0, 1, path);
  if (!child) return refuse(kInvalidArgument, "fake: the config is wrong");
  child->device = parent->device;
  if (parent->shares) child->aborted = parent->aborted;
  *out = nullptr;
  if (group_depth == 0 && siblings_of(*parent).size() > 1) {
    return refuse(kInvalidUsage, "fake: one thread splits several members of a clique outside a group");
  }
  const auto make = [=] {
    const int result = split(*parent, child, color, key, out);
    parent->error = result;
  };
  parent->error = kInProgress;
  parent->job.run(make);
  if (!parent->blocking) return kInProgress;
  if (group_depth > 0) std::abort();  // no caller does that
  parent->job.join();
  return parent->error;
}
EXPORT int ncclCommGetAsyncError(void* handle, int* out) {
  const CommPtr comm = find(handle);
  if (!comm) return kInvalidArgument;
  const Inside inside(comm);
  if (comm->error == kInProgress) --comm->polls_left;
  *out = comm->error;
  if (*out != kInProgress) comm->job.join();
  return kSuccess;
}
EXPORT int ncclCommAbort(void* handle) { return end(handle, /*abort=*/true); }
EXPORT int ncclCommFinalize(void* handle) { return find(handle) ? kSuccess : kInvalidArgument; }
EXPORT int ncclCommDestroy(void* handle) { return end(handle, /*abort=*/false); }

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
/// How often calls of this process that end a communicator have found that other ranks had not ended theirs.
EXPORT long fakeNcclLooksForEnds() { return n_looks_for_ends(); }
EXPORT const char* fakeNcclInterfaces() {
  const std::lock_guard lock(comms_mutex);
  return interfaces.c_str();
}
/// Communicators of this process that exist.
EXPORT long fakeNcclComms() {
  const std::lock_guard lock(comms_mutex);
  return static_cast<long>(comms().size());
}
