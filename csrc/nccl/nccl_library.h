#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <memory>
#include <string>

#include "gpu/gpu_library.h"

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
 public:
  using Comm = void*;
  using Stream = GpuLibrary::Stream;

  /// Opens the library at `path`. Throws UnavailableError, naming the file and its version, if it does not load, lacks
  /// a symbol, or is older than 2.18, whose communicators cannot be split.
  static std::shared_ptr<NcclLibrary> open(const std::string& path);

  const std::string& path() const { return path_; }
  int version() const { return version_; }
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

  void group_start() const;
  /// Launches the calls since `group_start`.
  void group_end(Comm comm) const;

  void all_reduce(const void* in, void* out, std::size_t count, int type, int op, Comm comm, Stream stream) const;
  void reduce(const void* in, void* out, std::size_t count, int type, int op, int root, Comm comm, Stream stream) const;
  void broadcast(const void* in, void* out, std::size_t count, int type, int root, Comm comm, Stream stream) const;
  void all_gather(const void* in, void* out, std::size_t count, int type, Comm comm, Stream stream) const;
  /// `count` elements for each rank.
  void reduce_scatter(const void* in, void* out, std::size_t count, int type, int op, Comm comm, Stream stream) const;
  void send(const void* in, std::size_t count, int type, int peer, Comm comm, Stream stream) const;
  void recv(void* out, std::size_t count, int type, int peer, Comm comm, Stream stream) const;

  /// Makes an operator for the sum of factor * x. `factor`: one element of `type`.
  int make_scaled_sum(const void* factor, int type, Comm comm) const;
  void destroy_op(int op, Comm comm) const noexcept { red_op_destroy_(op, comm); }

 private:
  NcclLibrary() = default;
  void check(int result, Comm comm, const char* call) const;

  std::string path_;
  int version_ = 0;
  int (*get_version_)(int*) = nullptr;
  const char* (*get_error_string_)(int) = nullptr;
  const char* (*get_last_error_)(Comm) = nullptr;
  int (*get_unique_id_)(nccl_abi::UniqueId*) = nullptr;
  int (*init_)(Comm*, int, nccl_abi::UniqueId, int, const nccl_abi::Config*) = nullptr;
  int (*split_)(Comm, int, int, Comm*, const nccl_abi::Config*) = nullptr;
  int (*get_async_error_)(Comm, int*) = nullptr;
  int (*abort_)(Comm) = nullptr;
  int (*destroy_)(Comm) = nullptr;
  int (*group_start_)() = nullptr;
  int (*group_end_)() = nullptr;
  int (*all_reduce_)(const void*, void*, std::size_t, int, int, Comm, Stream) = nullptr;
  int (*reduce_)(const void*, void*, std::size_t, int, int, int, Comm, Stream) = nullptr;
  int (*broadcast_)(const void*, void*, std::size_t, int, int, Comm, Stream) = nullptr;
  int (*all_gather_)(const void*, void*, std::size_t, int, Comm, Stream) = nullptr;
  int (*reduce_scatter_)(const void*, void*, std::size_t, int, int, Comm, Stream) = nullptr;
  int (*send_)(const void*, std::size_t, int, int, Comm, Stream) = nullptr;
  int (*recv_)(void*, std::size_t, int, int, Comm, Stream) = nullptr;
  int (*red_op_create_)(int*, const void*, int, int, Comm) = nullptr;
  int (*red_op_destroy_)(int, Comm) = nullptr;
};

}  // namespace samestep
