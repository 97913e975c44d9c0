#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <memory>
#include <string>

#include "gpu/gpu_library.h"
#include "os/dynamic_library.h"

namespace samestep {

/// Constants of the NCCL API, which RCCL shares. tests/fakes/check_header.cpp compares them with a real nccl.h.
namespace nccl_abi {
enum Result : int {
  kSuccess = 0,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
enum Type : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};
enum Op : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };
inline constexpr int kScalarOnHost = 1;

inline constexpr int kUndefined = INT_MIN;

/// The part of ncclConfig_t that exists since 2.18; newer versions use defaults for what follows, older ones read less.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;
  int cga_cluster_size = kUndefined, min_ctas = kUndefined, max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = 1;
};
struct UniqueId {
  std::array<char, 128> bytes{};
};
}  // namespace nccl_abi

/// The functions of NCCL or RCCL that the package uses, looked up at run time. A call that is still in progress is not
/// an error.
class NcclLibrary {
  /// A function of the library. Throws Error, with NCCL's text, if a call fails.
  template <class... Args>
  using Function = LibraryFunction<NcclLibrary, Args...>;
  template <class, class...>
  friend class LibraryFunction;

  const OpenedLibrary library_;
  const int version_;

 public:
  using Comm = void*;
  using Stream = GpuLibrary::Stream;

  /// Opens the library at `path`. Throws UnavailableError, naming the file and its version, if it does not load, lacks
  /// a symbol, or is older than 2.18, whose communicators cannot be split.
  static std::shared_ptr<NcclLibrary> open(const std::string& path);

  const std::string& path() const { return library_.path(); }
  /// "2.28.9"
  std::string version_text() const;

  nccl_abi::UniqueId unique_id() const;
  /// Starts to make `comm`, which is non-blocking. It must not move until `state` reports completion, because NCCL
  /// accesses it meanwhile.
  void init(Comm& comm, int size, const nccl_abi::UniqueId& id, int rank) const;
  /// Starts to make `blocking` of the same ranks as `of`, whose resources it shares. The state of `of` reports
  /// completion; until then `blocking` must not move. To abort `of` interrupts calls on `blocking`, too.
  void split(Comm of, int rank, Comm& blocking) const;
  /// kSuccess, kInProgress, or an error.
  int state(Comm comm) const;
  /// The text of a result, with NCCL's last message.
  std::string explain(int result, Comm comm) const;
  void abort(Comm comm) const noexcept { abort_(comm); }
  void destroy(Comm comm) const noexcept { destroy_(comm); }
  void destroy_op(int op, Comm comm) const noexcept { destroy_op_(op, comm); }

  // As nccl.h has them; types and operators are those of nccl_abi.
  const Function<> group_start{*this, "ncclGroupStart"}, group_end{*this, "ncclGroupEnd"};
  const Function<const void*, void*, std::size_t, int, int, Comm, Stream> all_reduce{*this, "ncclAllReduce"};
  const Function<const void*, void*, std::size_t, int, int, int, Comm, Stream> reduce{*this, "ncclReduce"};
  const Function<const void*, void*, std::size_t, int, int, Comm, Stream> broadcast{*this, "ncclBroadcast"};
  const Function<const void*, void*, std::size_t, int, Comm, Stream> all_gather{*this, "ncclAllGather"};
  const Function<const void*, void*, std::size_t, int, int, Comm, Stream> reduce_scatter{*this, "ncclReduceScatter"};
  const Function<const void*, std::size_t, int, int, Comm, Stream> send{*this, "ncclSend"};
  const Function<void*, std::size_t, int, int, Comm, Stream> recv{*this, "ncclRecv"};
  const Function<int*, const void*, int, int, Comm> make_scaled_sum{*this, "ncclRedOpCreatePreMulSum"};

 private:
  explicit NcclLibrary(const OpenedLibrary& library);
  Symbol find(const char* name) const;
  void check(int result, const char* name) const;

  const char* (*get_error_string_)(int) = find("ncclGetErrorString");
  const char* (*get_last_error_)(Comm) = find("ncclGetLastError");
  int (*get_async_error_)(Comm, int*) = find("ncclCommGetAsyncError");
  int (*abort_)(Comm) = find("ncclCommAbort");
  int (*destroy_)(Comm) = find("ncclCommDestroy");
  int (*destroy_op_)(int, Comm) = find("ncclRedOpDestroy");
  const Function<nccl_abi::UniqueId*> get_unique_id_{*this, "ncclGetUniqueId"};
  const Function<Comm*, int, nccl_abi::UniqueId, int, const nccl_abi::Config*> init_{*this, "ncclCommInitRankConfig"};
  const Function<Comm, int, int, Comm*, const nccl_abi::Config*> split_{*this, "ncclCommSplit"};
};

}  // namespace samestep
