#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace samestep {

/// What mpi4py knows of the MPI library that it has loaded. Handles as mpi4py's `.handle` gives them.
struct MpiFacts {
  std::string module_path;  ///< file of the module mpi4py.MPI
  std::size_t comm_nbytes = 0;
  std::size_t status_nbytes = 0;
  std::uintptr_t comm_world = 0;
  std::uintptr_t request_null = 0;
  std::uintptr_t byte_type = 0;
  std::uintptr_t errors_return = 0;
  int any_source = 0;
  int tag_limit = 32767;  ///< the highest tag
};

/// The few calls of MPI that the package makes, through addresses looked up at run time, so that it is built
/// without any MPI and runs with every one. Handles travel as integers of pointer size; one implementation
/// for each binary interface turns them back.
///
/// Calls throw Error with MPI's own text. Sources of the interfaces: MPI 5.0 chapter 20 (standard ABI), the
/// MPICH ABI compatibility initiative, Open MPI's public mpi.h.
class MpiLibrary {
 public:
  using Handle = std::uintptr_t;
  struct Status {
    int source = -1;
    int tag = -1;
  };

  virtual ~MpiLibrary() = default;

  /// Finds the library that mpi4py uses, decides on its binary interface by the size of handles and
  /// statuses and the symbols it has. Throws UnavailableError where these contradict each other, or
  /// something is missing.
  static std::shared_ptr<MpiLibrary> open(const MpiFacts& facts);

  const std::string& path() const { return path_; }
  const MpiFacts& facts() const { return facts_; }

  virtual Handle send(Handle comm, const void* data, int nbytes, int dest, int tag) = 0;
  virtual Handle receive(Handle comm, void* data, int capacity, int source, int tag) = 0;
  /// MPI_Test: true at the end, `request` is then null.
  virtual bool test(Handle& request, Status& status) = 0;
  /// MPI_Cancel and MPI_Test: true if the receive was cancelled before a message matched it. False with `request` not
  /// null: a message is still arriving. Then only MPI may use the memory, and `test` must not be called: it would take
  /// a receive that MPI cancels later for one that has got a message.
  virtual bool cancel(Handle& request) = 0;
  virtual bool probe(Handle comm, int source, int tag, Status& status) = 0;

  virtual int rank(Handle comm) = 0;
  virtual int size(Handle comm) = 0;
  /// MPI_Comm_idup; `request` has to be tested before `comm` is used.
  virtual Handle duplicate(Handle comm, Handle& new_comm) = 0;
  /// MPI_Comm_create_group of these ranks, called by them.
  virtual Handle create_group(Handle comm, const std::vector<int>& ranks, int tag) = 0;
  virtual void return_errors(Handle comm) = 0;
  virtual void free(Handle comm) = 0;
  virtual bool finalized() = 0;

 protected:
  MpiFacts facts_;
  std::string path_;
};

}  // namespace samestep
