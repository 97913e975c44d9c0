#include "nccl/nccl_library.h"

#include "core/error.h"
#include "core/format.h"
#include "os/dynamic_library.h"

namespace samestep {
namespace {

constexpr int kOldest = 21800;  // the first with ncclCommSplit

std::string text_of(int version) {
  if (version < 10000) return str(version / 1000, ".", version / 100 % 10, ".", version % 100);  // before 2.9
  return str(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace

std::shared_ptr<NcclLibrary> NcclLibrary::open(const std::string& path) {
  const OpenedLibrary library(path);
  std::shared_ptr<NcclLibrary> nccl(new NcclLibrary);
  nccl->path_ = path;
  const auto find = [&](const char* symbol, auto& function) {
    if (library.find(symbol, function)) return;
    throw UnavailableError(str(path, nccl->version_ ? " (NCCL " + nccl->version_text() + ")" : "", " has no ", symbol,
                               ": it is no complete NCCL or RCCL. Cure: pip install nvidia-nccl-cu13 (or "
                               "nvidia-nccl-cu12), or set SAMESTEP_NCCL_LIBRARY to another file"));
  };
  // The version comes first, so that later errors can name it.
  find("ncclGetVersion", nccl->get_version_);
  find("ncclGetErrorString", nccl->get_error_string_);
  if (const int result = nccl->get_version_(&nccl->version_); result != nccl_abi::kSuccess) {
    throw UnavailableError(str(path, ": ncclGetVersion failed: ", nccl->get_error_string_(result)));
  }
  if (nccl->version_ < kOldest) {
    throw UnavailableError(str("NCCL ", nccl->version_text(), " (", path,
                               ") is too old: 2.18 or newer is needed, "
                               "whose operations can be interrupted. Cure: pip install --upgrade nvidia-nccl-cu13 (or "
                               "nvidia-nccl-cu12), or set SAMESTEP_NCCL_LIBRARY to another file"));
  }
  find("ncclGetLastError", nccl->get_last_error_);
  find("ncclGetUniqueId", nccl->get_unique_id_);
  find("ncclCommInitRankConfig", nccl->init_);
  find("ncclCommSplit", nccl->split_);
  find("ncclCommGetAsyncError", nccl->get_async_error_);
  find("ncclCommAbort", nccl->abort_);
  find("ncclCommDestroy", nccl->destroy_);
  find("ncclGroupStart", nccl->group_start_);
  find("ncclGroupEnd", nccl->group_end_);
  find("ncclAllReduce", nccl->all_reduce_);
  find("ncclReduce", nccl->reduce_);
  find("ncclBroadcast", nccl->broadcast_);
  find("ncclAllGather", nccl->all_gather_);
  find("ncclReduceScatter", nccl->reduce_scatter_);
  find("ncclSend", nccl->send_);
  find("ncclRecv", nccl->recv_);
  find("ncclRedOpCreatePreMulSum", nccl->red_op_create_);
  find("ncclRedOpDestroy", nccl->red_op_destroy_);
  return nccl;
}

std::string NcclLibrary::version_text() const { return text_of(version_); }

std::string NcclLibrary::explain(int result, Comm comm) const {
  // Result codes are coarse ("unhandled system error"); the last message of NCCL has the detail.
  const char* const last = get_last_error_(comm);
  return str(get_error_string_(result), last != nullptr && *last != '\0' ? str(" (", last, ")") : "");
}

void NcclLibrary::check(int result, Comm comm, const char* call) const {
  // A call of a nonblocking communicator may return before it is complete. `state` shows the result later.
  if (result == nccl_abi::kSuccess || result == nccl_abi::kInProgress) [[likely]]
    return;
  throw Error(str(call, " failed: ", explain(result, comm)));
}

nccl_abi::UniqueId NcclLibrary::unique_id() const {
  nccl_abi::UniqueId id;
  check(get_unique_id_(&id), nullptr, "ncclGetUniqueId");
  return id;
}

void NcclLibrary::init(Comm& comm, int size, const nccl_abi::UniqueId& id, int rank) const {
  nccl_abi::Config config;
  check(init_(&comm, size, id, rank, &config), comm, "ncclCommInitRankConfig");
}

void NcclLibrary::split(Comm of, int rank, Comm& blocking) const {
  nccl_abi::Config config;
  config.blocking = 1;
  check(split_(of, /*color=*/0, /*key=*/rank, &blocking, &config), of, "ncclCommSplit");
}

int NcclLibrary::state(Comm comm) const {
  int state = nccl_abi::kSuccess;
  const int result = get_async_error_(comm, &state);
  return result == nccl_abi::kSuccess || result == nccl_abi::kInProgress ? state : result;
}

void NcclLibrary::group_start() const { check(group_start_(), nullptr, "ncclGroupStart"); }

void NcclLibrary::group_end(Comm comm) const { check(group_end_(), comm, "ncclGroupEnd"); }

void NcclLibrary::all_reduce(const void* in, void* out, std::size_t count, int type, int op, Comm comm,
                             Stream stream) const {
  check(all_reduce_(in, out, count, type, op, comm, stream), comm, "ncclAllReduce");
}

void NcclLibrary::reduce(const void* in, void* out, std::size_t count, int type, int op, int root, Comm comm,
                         Stream stream) const {
  check(reduce_(in, out, count, type, op, root, comm, stream), comm, "ncclReduce");
}

void NcclLibrary::broadcast(const void* in, void* out, std::size_t count, int type, int root, Comm comm,
                            Stream stream) const {
  check(broadcast_(in, out, count, type, root, comm, stream), comm, "ncclBroadcast");
}

void NcclLibrary::all_gather(const void* in, void* out, std::size_t count, int type, Comm comm, Stream stream) const {
  check(all_gather_(in, out, count, type, comm, stream), comm, "ncclAllGather");
}

void NcclLibrary::reduce_scatter(const void* in, void* out, std::size_t count, int type, int op, Comm comm,
                                 Stream stream) const {
  check(reduce_scatter_(in, out, count, type, op, comm, stream), comm, "ncclReduceScatter");
}

void NcclLibrary::send(const void* in, std::size_t count, int type, int peer, Comm comm, Stream stream) const {
  check(send_(in, count, type, peer, comm, stream), comm, "ncclSend");
}

void NcclLibrary::recv(void* out, std::size_t count, int type, int peer, Comm comm, Stream stream) const {
  check(recv_(out, count, type, peer, comm, stream), comm, "ncclRecv");
}

int NcclLibrary::make_scaled_sum(const void* factor, int type, Comm comm) const {
  int op = nccl_abi::kSum;
  check(red_op_create_(&op, factor, type, nccl_abi::kScalarOnHost, comm), comm, "ncclRedOpCreatePreMulSum");
  return op;
}

}  // namespace samestep
