// The functions of MPI that XLA calls, over groups of samestep. Each returns MPI_SUCCESS, or MPI_ERR_OTHER with a text
// that MPI_Error_string gives to the thread that called.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "jax/device_ranks.h"
#include "jax/mpi_abi.h"
#include "jax/python_ranks.h"

namespace samestep::mpi_abi {
namespace {

constexpr int kSuccess = 0, kErrOther = 1;
constexpr std::size_t kMaxErrorString = 1024, kMaxLibraryVersionString = 8192;  // as MPItrampoline has them

thread_local std::string last_error;
std::atomic<bool> initialized{false}, finalized{false};  // only reported: nothing is read by way of them
std::unique_ptr<DeviceRanks> ranks;  // never freed: XLA's threads may use them until the process has ended
std::string no_ranks = "MPI_Init_thread has not been called";

/// Exceptions must not cross the C interface. The text is kept by thread, because XLA asks for it by MPI_Error_string
/// in the thread whose call has failed.
template <class Function>
int guarded(Function call) {
  try {
    call();
    return kSuccess;
  } catch (const std::exception& error) {
    last_error = error.what();
    return kErrOther;
  }
}

void print_text(const std::string& text, std::size_t room, char* out, int* length) {
  const std::size_t n = std::min(text.size(), room - 1);
  std::memcpy(out, text.data(), n);
  out[n] = '\0';
  *length = static_cast<int>(n);
}

DeviceRanks& world() {
  if (ranks == nullptr) throw UnavailableError(no_ranks);
  return *ranks;
}

Communicator& group_of(Handle comm) {
  // XLA's collectives run on communicators that it has split off. Of the world it only asks rank and size.
  if (comm == kNull || comm == kWorld) throw InvalidArgumentError("JAX uses a communicator that it did not make");
  return reinterpret_cast<const DeviceGroup*>(comm)->get();
}

std::size_t to_count(int count) {
  if (count < 0) throw InvalidArgumentError(str("JAX passes a count of ", count));
  return static_cast<std::size_t>(count);
}

ConstBuffer input(const void* data, std::size_t count, Handle dtype) { return {data, count, to_dtype(dtype)}; }

/// XLA allocates the results of a program anew for each run, so the collective is the first to write to them, and
/// faults in every page. Faults of huge pages cost a third of that. A hint, whose failure changes nothing.
void advise_huge_pages(void* data, std::size_t nbytes) {
  constexpr std::uintptr_t kHugePage = 2 << 20;
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = (address + kHugePage - 1) & ~(kHugePage - 1),
                       end = (address + nbytes) & ~(kHugePage - 1);
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

Buffer output(void* data, std::size_t count, Handle dtype) {
  const Buffer made{data, count, to_dtype(dtype)};
  advise_huge_pages(data, made.nbytes());
  return made;
}

/// XLA reduces and gathers between arrays that are the same or do not overlap, as Communicator wants it.
void run(Handle comm, const CollectiveArgs& call) { world().run(group_of(comm), call); }

void wait_for(Handle* request) {
  if (*request == kNull) return;
  // MPI_Wait leaves a null request in any case, so that a request whose wait fails is not waited for again.
  const std::unique_ptr<DeviceRequest> waited(reinterpret_cast<DeviceRequest*>(*request));
  *request = kNull;
  world().wait(*waited->communicator, waited->work);
}

void remember(Handle comm, Communicator::WorkPtr work, Handle* request) {
  const auto& group = *reinterpret_cast<const DeviceGroup*>(comm);
  *request = reinterpret_cast<Handle>(new DeviceRequest{group.communicator, std::move(work)});
}

}  // namespace
}  // namespace samestep::mpi_abi

using namespace samestep;           // NOLINT: from here on this file is MPI's
using namespace samestep::mpi_abi;  // NOLINT

SAMESTEP_EXPORT int MPIABI_Init_thread(int*, char***, int, int* provided) {
  *provided = 3;  // MPI_THREAD_MULTIPLE
  initialized = true;
  const int result = guarded([] { ranks = open_device_ranks(); });
  if (result != kSuccess) {  // XLA does not look at the result. The first collective fails with this text.
    no_ranks = last_error;
    std::fprintf(stderr, "%s\n", no_ranks.c_str());
  }
  return result;
}

SAMESTEP_EXPORT int MPIABI_Finalize() {
  finalized = true;
  if (ranks != nullptr) ranks->close();
  return kSuccess;
}

SAMESTEP_EXPORT int MPIABI_Initialized(int* flag) {
  *flag = initialized;
  return kSuccess;
}

SAMESTEP_EXPORT int MPIABI_Finalized(int* flag) {
  *flag = finalized;
  return kSuccess;
}

/// Always: any thread may make communicators, and XLA asks before it does.
SAMESTEP_EXPORT int MPIABI_Is_thread_main(int* flag) {
  *flag = 1;
  return kSuccess;
}

SAMESTEP_EXPORT int MPIABI_Get_library_version(char* version, int* length) {
  print_text("samestep", kMaxLibraryVersionString, version, length);
  return kSuccess;
}

SAMESTEP_EXPORT int MPIABI_Error_string(int, char* text, int* length) {
  print_text(last_error, kMaxErrorString, text, length);
  return kSuccess;
}

/// XLA does not look at the result of this and the next two: the calls of the group report what went wrong.
SAMESTEP_EXPORT int MPIABI_Comm_rank(Handle comm, int* rank) {
  *rank = 0;
  return guarded([&] { *rank = comm == kWorld ? world().rank() : group_of(comm).rank(); });
}

SAMESTEP_EXPORT int MPIABI_Comm_size(Handle comm, int* size) {
  *size = 1;
  return guarded([&] { *size = comm == kWorld ? world().size() : group_of(comm).size(); });
}

SAMESTEP_EXPORT int MPIABI_Comm_split(Handle comm, int color, int key, Handle* made) {
  auto group = std::make_unique<DeviceGroup>();
  const int result = guarded([&] {
    if (comm != kWorld) throw InvalidArgumentError("JAX splits another communicator than MPI_COMM_WORLD");
    if (const std::string problem = problem_of_programs(); !problem.empty()) {
      world().leave_world(problem);
      throw UnavailableError(problem);
    }
    group->communicator = world().split(color, key);
  });
  // A handle is made even then: XLA does not look at the result, and later calls report the problem.
  if (result != kSuccess) group->problem = last_error;
  *made = reinterpret_cast<Handle>(group.release());
  return result;
}

SAMESTEP_EXPORT int MPIABI_Comm_free(Handle* comm) {
  if (*comm != kNull && *comm != kWorld) delete reinterpret_cast<DeviceGroup*>(*comm);
  *comm = kNull;
  return kSuccess;
}

SAMESTEP_EXPORT int MPIABI_Allreduce(const void* in, void* out, int count, Handle dtype, Handle op, Handle comm) {
  return guarded([&] {
    const std::size_t n = to_count(count);
    const void* const from = in == reinterpret_cast<void*>(kInPlace) ? out : in;
    run(comm,
        {CollectiveType::allreduce, input(from, n, dtype), output(out, n, dtype), {to_op(op)}, -1, Shape::flat(n)});
  });
}

SAMESTEP_EXPORT int MPIABI_Reduce_scatter(const void* in, void* out, const int* counts, Handle dtype, Handle op,
                                          Handle comm) {
  return guarded([&] {
    const auto size = static_cast<std::size_t>(group_of(comm).size());
    const std::size_t n = to_count(counts[0]);
    // Communicator has no reduce_scatter of unequal blocks, and XLA splits evenly.
    if (std::any_of(counts, counts + size, [&](int count) { return count != counts[0]; })) {
      throw InvalidArgumentError("JAX scatters blocks of unlike sizes");
    }
    run(comm, {CollectiveType::reduce_scatter,
               input(in, n * size, dtype),
               output(out, n, dtype),
               {to_op(op)},
               -1,
               Shape::flat(n)});
  });
}

SAMESTEP_EXPORT int MPIABI_Allgather(const void* in, int count, Handle dtype, void* out, int, Handle, Handle comm) {
  return guarded([&] {
    const std::size_t n = to_count(count), size = static_cast<std::size_t>(group_of(comm).size());
    run(comm, {CollectiveType::allgather, input(in, n, dtype), output(out, n * size, dtype), {}, -1, Shape::flat(n)});
  });
}

SAMESTEP_EXPORT int MPIABI_Alltoall(const void* in, int count, Handle dtype, void* out, int, Handle, Handle comm) {
  return guarded([&] {
    const std::size_t n = to_count(count), all = n * static_cast<std::size_t>(group_of(comm).size());
    run(comm, {CollectiveType::alltoall, input(in, all, dtype), output(out, all, dtype), {}, -1, Shape::flat(all)});
  });
}

SAMESTEP_EXPORT int MPIABI_Bcast(void* data, int count, Handle dtype, int root, Handle comm) {
  return guarded([&] {
    const std::size_t n = to_count(count);
    run(comm, {CollectiveType::bcast, {}, output(data, n, dtype), {}, root, Shape::flat(n)});
  });
}

SAMESTEP_EXPORT int MPIABI_Barrier(Handle comm) {
  return guarded([&] { run(comm, {CollectiveType::barrier}); });
}

SAMESTEP_EXPORT int MPIABI_Isend(const void* in, int count, Handle dtype, int dest, int tag, Handle comm,
                                 Handle* request) {
  return guarded(
      [&] { remember(comm, world().send(group_of(comm), {input(in, to_count(count), dtype), dest, tag}), request); });
}

SAMESTEP_EXPORT int MPIABI_Irecv(void* out, int count, Handle dtype, int source, int tag, Handle comm,
                                 Handle* request) {
  return guarded([&] {
    remember(comm, world().recv(group_of(comm), {output(out, to_count(count), dtype), source, tag, Fit::exactly}),
             request);
  });
}

SAMESTEP_EXPORT int MPIABI_Wait(Handle* request, void*) {
  return guarded([&] { wait_for(request); });
}

SAMESTEP_EXPORT int MPIABI_Waitall(int count, Handle* requests, void*) {
  return guarded([&] { std::for_each_n(requests, count, [](Handle& request) { wait_for(&request); }); });
}

SAMESTEP_EXPORT int MPIABI_Sendrecv(const void* in, int in_count, Handle in_dtype, int dest, int in_tag, void* out,
                                    int out_count, Handle out_dtype, int source, int out_tag, Handle comm, void*) {
  return guarded([&] {
    Communicator& group = group_of(comm);
    const auto receiving =
        world().recv(group, {output(out, to_count(out_count), out_dtype), source, out_tag, Fit::exactly});
    const auto sending = world().send(group, {input(in, to_count(in_count), in_dtype), dest, in_tag});
    world().wait(group, receiving);
    world().wait(group, sending);
  });
}
