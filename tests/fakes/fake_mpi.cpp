// A stand-in of an MPI library, in MPICH's interface, for tests: its ranks are threads of one process. The handle of a
// communicator says which rank uses it, so each rank has a world of its own: kWorld + rank.

#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kWorld = 1000, kRanks = 2, kRanksAtMost = 100;  // a communicator is context * kRanksAtMost + rank
constexpr int kNull = 7, kAny = -2, kFailure = 1;

struct Status {
  int count_low, count_high_and_cancelled, source, tag, error;
};

struct Message {
  int context, source, dest, tag;
  std::vector<char> bytes;
};

struct Request {
  bool receives;
  int context, rank, source, tag;
  void* data;
  bool cancelled;
};

struct State {
  std::mutex mutex;
  std::list<Message> messages;
  std::map<int, Request> requests;
  std::map<int, int> duplicates;  // context -> calls so far, by which the ranks agree on the next one
  int next = 10'000, contexts = 20;
  int n_groups = 0;
  int tests_of_cancelled = 1;
  const char* failing = "";
};
State& state() {
  static auto& all = *new State;
  return all;
}

bool fails(const char* call) { return std::strstr(state().failing, call) != nullptr; }

bool same(int wanted, int is) { return wanted == kAny || wanted == is; }

// Null if no message has arrived.
bool complete(const Request& request, Status& status) {
  for (auto at = state().messages.begin(); at != state().messages.end(); ++at) {
    if (at->context != request.context || at->dest != request.rank) continue;
    if (!same(request.source, at->source) || !same(request.tag, at->tag)) continue;
    std::copy(at->bytes.begin(), at->bytes.end(), static_cast<char*>(request.data));
    status = {static_cast<int>(at->bytes.size()), 0, at->source, at->tag, 0};
    state().messages.erase(at);
    return true;
  }
  return false;
}

}  // namespace

// What tests ask for.

/// So many tests of a cancelled request tell that it has ended.
EXPORT void fakeMpiTestsOfCancelled(int n) {
  const std::lock_guard lock(state().mutex);
  state().tests_of_cancelled = n;
}
/// Calls whose name is in `names` fail.
EXPORT void fakeMpiFail(const char* names) {
  const std::lock_guard lock(state().mutex);
  state().failing = names;
}
EXPORT int fakeMpiGroups() {
  const std::lock_guard lock(state().mutex);
  return state().n_groups;
}

// What a library has.

EXPORT int MPI_Isend(const void* data, int nbytes, int, int dest, int tag, int comm, int* request) {
  const std::lock_guard lock(state().mutex);
  if (fails("MPI_Isend")) return kFailure;
  const auto* bytes = static_cast<const char*>(data);
  state().messages.push_back({comm / kRanksAtMost, comm % kRanksAtMost, dest, tag, {bytes, bytes + nbytes}});
  state().requests[*request = state().next++] = {};
  return 0;
}

EXPORT int MPI_Irecv(void* data, int, int, int source, int tag, int comm, int* request) {
  const std::lock_guard lock(state().mutex);
  if (fails("MPI_Irecv")) return kFailure;
  state().requests[*request = state().next++] = {true, comm / kRanksAtMost, comm % kRanksAtMost, source, tag, data,
                                                 false};
  return 0;
}

EXPORT int MPI_Test(int* handle, int* flag, void* status) {
  const std::lock_guard lock(state().mutex);
  if (fails("MPI_Test")) return kFailure;
  Request& request = state().requests.at(*handle);
  Status found{};
  if (request.cancelled) {
    *flag = state().tests_of_cancelled == 0 ? 1 : 0;
    found.count_high_and_cancelled = 1;
    found.source = kAny;
    if (*flag == 0) --state().tests_of_cancelled;
  } else {
    *flag = !request.receives || complete(request, found) ? 1 : 0;
  }
  if (*flag == 0) return 0;
  std::memcpy(status, &found, sizeof found);
  state().requests.erase(*handle);
  *handle = kNull;
  return 0;
}

EXPORT int MPI_Cancel(int* handle) {
  const std::lock_guard lock(state().mutex);
  state().requests.at(*handle).cancelled = true;
  return 0;
}

EXPORT int MPI_Test_cancelled(const void* status, int* flag) {
  Status found{};
  std::memcpy(&found, status, sizeof found);
  *flag = found.count_high_and_cancelled;
  return 0;
}

EXPORT int MPI_Iprobe(int source, int tag, int comm, int* flag, void* status) {
  const std::lock_guard lock(state().mutex);
  const auto& all = state().messages;
  const auto found = std::find_if(all.begin(), all.end(), [&](const Message& message) {
    return message.context == comm / kRanksAtMost && message.dest == comm % kRanksAtMost &&
           same(source, message.source) && same(tag, message.tag);
  });
  *flag = found != all.end() ? 1 : 0;
  if (*flag == 0) return 0;
  const Status answer{static_cast<int>(found->bytes.size()), 0, found->source, found->tag, 0};
  std::memcpy(status, &answer, sizeof answer);
  return 0;
}

EXPORT int MPI_Comm_rank(int comm, int* rank) {
  *rank = comm % kRanksAtMost;
  return 0;
}

EXPORT int MPI_Comm_size(int, int* size) {
  *size = kRanks;
  return 0;
}

EXPORT int MPI_Comm_idup(int comm, int* made, int* request) {
  const std::lock_guard lock(state().mutex);
  // The ranks call it equally often, so every second call begins a new context.
  const int n = state().duplicates[comm / kRanksAtMost]++;
  if (n % kRanks == 0) ++state().contexts;
  *made = state().contexts * kRanksAtMost + comm % kRanksAtMost;
  state().requests[*request = state().next++] = {};
  return 0;
}

EXPORT int MPI_Comm_group(int, int* group) {
  const std::lock_guard lock(state().mutex);
  if (fails("MPI_Comm_group")) return kFailure;
  *group = state().next++;
  ++state().n_groups;
  return 0;
}

EXPORT int MPI_Group_incl(int, int, const int*, int* group) {
  const std::lock_guard lock(state().mutex);
  if (fails("MPI_Group_incl")) return kFailure;
  *group = state().next++;
  ++state().n_groups;
  return 0;
}

EXPORT int MPI_Group_free(int*) {
  const std::lock_guard lock(state().mutex);
  --state().n_groups;
  return 0;
}

EXPORT int MPI_Comm_create_group(int comm, int, int, int* made) {
  if (fails("MPI_Comm_create_group")) return kFailure;
  *made = comm;
  return 0;
}

EXPORT int MPI_Comm_set_errhandler(int, int) { return 0; }
EXPORT int MPI_Comm_free(int*) { return 0; }
EXPORT int MPI_Finalized(int* flag) {
  *flag = 0;
  return 0;
}
EXPORT int MPI_Error_string(int, char* text, int* length) {
  std::strcpy(text, "the stand-in has to fail");
  *length = static_cast<int>(std::strlen(text));
  return 0;
}
