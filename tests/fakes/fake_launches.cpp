// How operations of the stand-in of NCCL begin; see fake_nccl.cpp.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <mutex>

#include "fake_nccl.h"

using namespace fake;

namespace {

std::atomic<long>& n_threads() {
  static std::atomic<long> n{0};
  return n;
}
std::atomic<long>& n_calls() {
  static std::atomic<long> n{0};
  return n;
}

struct Launches {
  std::mutex mutex;  // of the thread that launches
  /// Of the device, where all run one after the other: as with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), or
  /// where there is no room for a second one.
  Kernels kernels;
};
Launches& launches_of(int device) {
  static auto& all = *new std::vector<Launches>(64);
  return all[static_cast<std::size_t>(device)];
}

void run_in_turn(const CommPtr& comm, const std::vector<Task>& tasks, long first, Kernels& kernels, long ticket) {
  bool is_served = false;
  {
    const Stuck stuck([comm, &kernels, ticket] { return *comm->aborted || kernels.serves(ticket); });
    is_served = comm->wait([&] { return kernels.serves(ticket); });
  }
  if (is_served) comm->run(tasks, first);
  kernels.give_up(ticket);
}

int start(const CommPtr& comm, void* stream, std::vector<Task> tasks) {
  Launches& launches = launches_of(comm->device);
  const std::unique_lock alone(launches.mutex, std::try_to_lock);
  if (!alone && text_of("NCCL_LAUNCH_ORDER_IMPLICIT", "0") == "1" && text_of("NCCL_LAUNCH_RACE_FATAL", "1") == "1") {
    return refuse(kInvalidUsage, "fake: two threads launch operations of one device");
  }
  const long first = comm->n_operations;
  comm->n_operations += static_cast<long>(tasks.size());
  bool is_of_device = false;
  // Those of a communicator run in the order of their launches, whatever their streams; those of a graph when it does.
  if (comm->size > 1 && !is_captured(stream)) {
    Kernels& kernels = text_of("FAKE_NCCL_ONE_AT_A_TIME", "0") == "1" ? launches.kernels : comm->kernels;
    const long ticket = kernels.take_ticket();
    is_of_device = enqueue(stream, comm->device, [comm, tasks, first, &kernels, ticket, held = comm->in_streams] {
      run_in_turn(comm, tasks, first, kernels, ticket);
    });
    if (!is_of_device) kernels.give_up(ticket);
  } else {
    is_of_device =
        enqueue(stream, comm->device, [comm, tasks, first, held = comm->in_streams] { comm->run(tasks, first); });
  }
  return is_of_device ? kSuccess : refuse(kInvalidArgument, "fake: the stream is not one of the communicator's device");
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
bool has_overlaps(const Comm& comm, std::vector<Task> tasks) {
  for (Task& task : tasks) {  // a root that sends what lies in place only reads it
    if (task.kind == Kind::broadcast && task.root == comm.rank && task.in == task.out) task.out = nullptr;
  }
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

/// What one communicator has in a group, in one stream.
struct Part {
  CommPtr comm;
  void* stream;
  std::vector<Task> tasks;
  std::vector<std::function<bool()>> connected;
};

/// Waits until it is connected, and puts its operations into the stream.
int begin(const Part& part) {
  Comm& comm = *part.comm;
  const Inside inside(part.comm);
  const bool in_time = comm.wait([&] {
    for (const auto& connected : part.connected) {
      if (!connected()) return false;
    }
    return comm.blocking ? --comm.polls_left <= 0 : comm.polls_left <= 0;
  });
  if (!in_time) return kInternalError;
  const int result = start(part.comm, part.stream, part.tasks);
  if (result != kSuccess) comm.last_error = last_error;
  return result;
}

int begin_here(const std::vector<Part>& parts) {
  int result = kSuccess;
  for (const Part& part : parts) {
    if (const int ended = begin(part); ended != kSuccess) result = ended;
  }
  return result;
}

int begin_in_threads(const std::vector<Part>& parts) {
  ++n_threads();
  for (const Part& part : parts) part.comm->error = kInProgress;
  for (const Part& part : parts) {
    part.comm->job.run([part] {
      const int result = begin(part);
      int expected = kInProgress;  // an operation that runs already may have failed
      part.comm->error.compare_exchange_strong(expected, result);
    });
  }
  return kInProgress;
}

/// How many elements NCCL's kernel for one rank multiplies. Each of its blocks, at most 32 and one for each 16 KiB,
/// takes count / blocks elements, rounded down and then up to 16 bytes (2.28.9, src/device/onerank.cu); what is left
/// over after the last block stays as it was.
std::size_t scaled_alone(std::size_t count, std::size_t item) {
  const std::size_t block = std::size_t{16} << 10, pack = 16 / item;
  const std::size_t n_blocks = std::min<std::size_t>(32, (count * item + block - 1) / block);
  if (n_blocks == 0) return 0;
  return std::min(count, n_blocks * ((count / n_blocks + pack - 1) / pack * pack));
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
  const Inside inside(comm);
  if (comm->size == 1 && kind != Kind::send && kind != Kind::receive) {  // a copy, whatever the group
    const bool scales = task.scaled || (op == avg && type >= float16 && type <= bfloat16);
    if (scales) task.count = scaled_alone(count, size_of(type));
    if (has_overlaps(*comm, {task})) return refuse(kInvalidArgument, "fake: buffers of one launch overlap");
    return start(comm, stream, {task});
  }
  group.push_back({comm, stream, task});
  return group_depth > 0 ? kSuccess : launch_group();
}

}  // namespace

int fake::launch_group() {
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
  std::vector<Part> parts;
  for (const auto& [key, tasks] : by_comm) {
    const auto& [comm, stream] = key;
    if (has_overlaps(*comm, tasks)) return refuse(kInvalidArgument, "fake: buffers of one launch overlap");
    if (comm->blocking != by_comm[0].first.first->blocking) {
      return refuse(kInvalidArgument, "fake: blocking and non-blocking communicators in one group");
    }
    parts.push_back({comm, stream, tasks, {}});
  }
  if (parts.empty()) return kSuccess;
  for (Part& part : parts) {  // all, before one of them waits
    Comm& comm = *part.comm;
    part.connected = comm.connections.come_for(part.tasks, comm.shared->connections, comm.rank, comm.size);
    comm.polls_left = std::atoi(text_of("FAKE_NCCL_IN_PROGRESS", "0").c_str());
  }
  return parts[0].comm->blocking ? begin_here(parts) : begin_in_threads(parts);
}

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
/// Threads that calls of this process have started to launch operations.
EXPORT long fakeNcclThreads() { return n_threads(); }
