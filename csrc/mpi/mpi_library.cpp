#include "mpi/mpi_library.h"

#include <array>
#include <memory>
#include <type_traits>

#include "core/error.h"
#include "core/format.h"
#include "mpi/mpi_abi.h"
#include "os/dynamic_library.h"

namespace samestep {
namespace {

/// How often a cancelled request is tested. MPI promises that a test succeeds in the end, but not which one, and a
/// message of which a sender that has died has sent a part never arrives.
constexpr int kTestsOfCancelled = 1000;

template <class Abi>
class MpiLibraryOf final : public MpiLibrary {
  using H = typename Abi::Handle;
  using AbiStatus = typename Abi::Status;

 public:
  MpiLibraryOf(const OpenedLibrary& library, const MpiFacts& facts)
      : library_(library), byte_(to(facts.byte_type)), errors_return_(to(facts.errors_return)) {
    facts_ = facts;
    path_ = OpenedLibrary::file_of(reinterpret_cast<const void*>(isend_));
  }

  // No call here waits for another rank except those that make and free communicators. The caller polls, so that every
  // wait has a deadline and reacts to Ctrl-C.
  Handle send(Handle comm, const void* data, int nbytes, int dest, int tag) override {
    H request;
    check(isend_(data, nbytes, byte_, dest, tag, to(comm), &request), "MPI_Isend");
    return from(request);
  }

  Handle receive(Handle comm, void* data, int capacity, int source, int tag) override {
    H request;
    check(irecv_(data, capacity, byte_, source, tag, to(comm), &request), "MPI_Irecv");
    return from(request);
  }

  bool test(Handle& request, Status& status) override {
    H handle = to(request);
    int flag = 0;
    AbiStatus abi_status;
    check(test_(&handle, &flag, &abi_status), "MPI_Test");
    request = from(handle);
    // MPI defines the status only if the flag is set.
    if (flag != 0) status = {abi_status.source, abi_status.tag};
    return flag != 0;
  }

  bool cancel(Handle& request) override {
    H handle = to(request);
    int cancelled = 0, flag = 0;
    AbiStatus abi_status;
    // MPI_Cancel only requests it, and a message may have matched already. MPI_Test then tells which of the two
    // has happened; MPI_Wait would block until that message has arrived.
    check(cancel_(&handle), "MPI_Cancel");
    for (int i = 0; i < kTestsOfCancelled && flag == 0; ++i) check(test_(&handle, &flag, &abi_status), "MPI_Test");
    request = from(handle);
    if (flag == 0) return false;  // a message is still arriving
    check(test_cancelled_(&abi_status, &cancelled), "MPI_Test_cancelled");
    return cancelled != 0;
  }

  bool probe(Handle comm, int source, int tag, Status& status) override {
    int flag = 0;
    AbiStatus abi_status;
    check(iprobe_(source, tag, to(comm), &flag, &abi_status), "MPI_Iprobe");
    if (flag != 0) status = {abi_status.source, abi_status.tag};
    return flag != 0;
  }

  int rank(Handle comm) override {
    int rank = -1;
    check(comm_rank_(to(comm), &rank), "MPI_Comm_rank");
    return rank;
  }

  int size(Handle comm) override {
    int size = 0;
    check(comm_size_(to(comm), &size), "MPI_Comm_size");
    return size;
  }

  Handle duplicate(Handle comm, Handle& new_comm) override {
    H request;
    // MPI stores the communicator when the request completes, so it needs the caller's variable, not a local one. MPICH
    // fills the lower half of it; `to` ignores the other half.
    static_assert(sizeof(H) <= sizeof(Handle));
    check(comm_idup_(to(comm), reinterpret_cast<H*>(&new_comm), &request), "MPI_Comm_idup");
    return from(request);
  }

  Handle create_group(Handle comm, const std::vector<int>& ranks, int tag) override {
    H all, some, made;
    check(comm_group_(to(comm), &all), "MPI_Comm_group");
    const GroupOwner owner_of_all(&all, group_free_);
    check(group_incl_(all, static_cast<int>(ranks.size()), ranks.data(), &some), "MPI_Group_incl");
    const GroupOwner owner_of_some(&some, group_free_);
    // Unlike MPI_Comm_create, this is called by the members of the new group alone (MPI 3.0).
    check(comm_create_group_(to(comm), some, tag, &made), "MPI_Comm_create_group");
    return from(made);
  }

  void return_errors(Handle comm) override {
    check(comm_set_errhandler_(to(comm), errors_return_), "MPI_Comm_set_errhandler");
  }

  void free(Handle comm) override {
    H handle = to(comm);
    check(comm_free_(&handle), "MPI_Comm_free");
  }

  bool finalized() override {
    int flag = 0;
    check(finalized_(&flag), "MPI_Finalized");
    return flag != 0;
  }

 private:
  /// Frees a group of MPI, also where a later call fails.
  using GroupOwner = std::unique_ptr<H, int (*)(H*)>;

  /// At once, with the members below: what is missing is reported before a rank communicates, not in the middle of a
  /// run.
  Symbol find(const char* name) const {
    void* const address = library_.find(name);
    if (address == nullptr) throw UnavailableError(str("the MPI library that mpi4py loads has no ", name));
    return {address};
  }

  static H to(Handle handle) {
    if constexpr (std::is_pointer_v<H>) {
      return reinterpret_cast<H>(handle);
    } else {
      return static_cast<H>(handle);  // may be sign-extended
    }
  }
  static Handle from(H handle) {
    if constexpr (std::is_pointer_v<H>) {
      return reinterpret_cast<Handle>(handle);
    } else {
      // Without the sign, so that the upper half is always zero and equal handles compare equal.
      return static_cast<Handle>(static_cast<unsigned>(handle));
    }
  }

  void check(int code, const char* call) {
    if (code == 0) [[likely]]
      return;
    std::array<char, 8192> text{};  // the standard ABI's longest; other libraries' are shorter
    int length = 0;
    error_string_(code, text.data(), &length);
    throw Error(str(call, " failed: ", text.data()));
  }

  const OpenedLibrary library_;
  H byte_, errors_return_;
  int (*isend_)(const void*, int, H, int, int, H, H*) = find("MPI_Isend");
  int (*irecv_)(void*, int, H, int, int, H, H*) = find("MPI_Irecv");
  int (*test_)(H*, int*, AbiStatus*) = find("MPI_Test");
  int (*cancel_)(H*) = find("MPI_Cancel");
  int (*test_cancelled_)(const AbiStatus*, int*) = find("MPI_Test_cancelled");
  int (*iprobe_)(int, int, H, int*, AbiStatus*) = find("MPI_Iprobe");
  int (*comm_rank_)(H, int*) = find("MPI_Comm_rank");
  int (*comm_size_)(H, int*) = find("MPI_Comm_size");
  int (*comm_idup_)(H, H*, H*) = find("MPI_Comm_idup");
  int (*comm_group_)(H, H*) = find("MPI_Comm_group");
  int (*group_incl_)(H, int, const int*, H*) = find("MPI_Group_incl");
  int (*group_free_)(H*) = find("MPI_Group_free");
  int (*comm_create_group_)(H, H, int, H*) = find("MPI_Comm_create_group");
  int (*comm_set_errhandler_)(H, H) = find("MPI_Comm_set_errhandler");
  int (*comm_free_)(H*) = find("MPI_Comm_free");
  int (*finalized_)(int*) = find("MPI_Finalized");
  int (*error_string_)(int, char*, int*) = find("MPI_Error_string");
};

}  // namespace

std::shared_ptr<MpiLibrary> MpiLibrary::open(const MpiFacts& facts) {
  const OpenedLibrary library = OpenedLibrary::loaded(facts.module_path);
  const bool has_open_mpi = library.find("ompi_mpi_comm_world") != nullptr;
  // MPICH 5 answers MPI_Abi_get_version in its own interface too: the size of a handle decides.
  if (facts.comm_nbytes == sizeof(int) && facts.status_nbytes == sizeof(mpi_abi::Mpich::Status)) {
    return std::make_shared<MpiLibraryOf<mpi_abi::Mpich>>(library, facts);
  }
  // Two interfaces have handles of pointer size. The size of a status tells them from each other; the symbol confirms
  // it, since a wrong guess would corrupt memory.
  if (facts.comm_nbytes == sizeof(void*) && facts.status_nbytes == sizeof(mpi_abi::OpenMpi::Status) && has_open_mpi) {
    return std::make_shared<MpiLibraryOf<mpi_abi::OpenMpi>>(library, facts);
  }
  if (facts.comm_nbytes == sizeof(void*) && facts.status_nbytes == sizeof(mpi_abi::Standard::Status)) {
    return std::make_shared<MpiLibraryOf<mpi_abi::Standard>>(library, facts);
  }
  throw UnavailableError(str("the MPI library that mpi4py loads (", facts.module_path, ") has handles of ",
                             facts.comm_nbytes, " and statuses of ", facts.status_nbytes,
                             " bytes: neither Open MPI, MPICH nor the MPI standard ABI"));
}

}  // namespace samestep
