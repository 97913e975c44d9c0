#include "nccl/nccl_library.h"

#include "core/error.h"
#include "core/format.h"

namespace samestep {
namespace {

constexpr int kOldest = 21800;  // the first with ncclCommSplit

std::string text_of(int version) {
  if (version < 10000) return str(version / 1000, ".", version / 100 % 10, ".", version % 100);  // before 2.9
  return str(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

/// `version`: so that the error can name it; "" if it is not known.
Symbol find_in(const OpenedLibrary& library, const char* name, const std::string& version) {
  if (void* const address = library.find(name)) return {address};
  throw UnavailableError(str(library.path(), version.empty() ? "" : " (NCCL " + version + ")", " has no ", name,
                             ": it is no complete NCCL or RCCL. Cure: pip install nvidia-nccl-cu13 (or "
                             "nvidia-nccl-cu12), or set SAMESTEP_NCCL_LIBRARY to another file"));
}

int version_of(const OpenedLibrary& library) {
  int (*const get_version)(int*) = find_in(library, "ncclGetVersion", "");
  const char* (*const get_error_string)(int) = find_in(library, "ncclGetErrorString", "");
  int version = 0;
  if (const int result = get_version(&version); result != nccl_abi::kSuccess) {
    throw UnavailableError(str(library.path(), ": ncclGetVersion failed: ", get_error_string(result)));
  }
  if (version >= kOldest) return version;
  throw UnavailableError(str("NCCL ", text_of(version), " (", library.path(),
                             ") is too old: 2.18 or newer is needed, whose operations can be interrupted. Cure: pip "
                             "install --upgrade nvidia-nccl-cu13 (or nvidia-nccl-cu12), or set SAMESTEP_NCCL_LIBRARY "
                             "to another file"));
}

}  // namespace

NcclLibrary::NcclLibrary(const OpenedLibrary& library) : library_(library), version_(version_of(library)) {}

std::shared_ptr<NcclLibrary> NcclLibrary::open(const std::string& path) {
  return std::shared_ptr<NcclLibrary>(new NcclLibrary(OpenedLibrary(path)));
}

Symbol NcclLibrary::find(const char* name) const { return find_in(library_, name, version_text()); }

std::string NcclLibrary::version_text() const { return text_of(version_); }

std::string NcclLibrary::explain(int result, Comm comm) const {
  // Result codes are coarse ("unhandled system error"); the last message of NCCL has the detail.
  const char* const last = get_last_error_(comm);
  return str(get_error_string_(result), last != nullptr && *last != '\0' ? str(" (", last, ")") : "");
}

void NcclLibrary::check(int result, const char* name) const {
  // A call of a nonblocking communicator may return before it is complete. `state` shows the result later.
  if (result == nccl_abi::kSuccess || result == nccl_abi::kInProgress) [[likely]]
    return;
  throw Error(str(name, " failed: ", explain(result, nullptr)));
}

nccl_abi::UniqueId NcclLibrary::unique_id() const {
  nccl_abi::UniqueId id;
  get_unique_id_(&id);
  return id;
}

void NcclLibrary::init(Comm& comm, int size, const nccl_abi::UniqueId& id, int rank) const {
  const nccl_abi::Config config;
  init_(&comm, size, id, rank, &config);
}

void NcclLibrary::split(Comm of, int rank, Comm& blocking) const {
  nccl_abi::Config config;
  config.blocking = 1;
  split_(of, /*color=*/0, /*key=*/rank, &blocking, &config);
}

int NcclLibrary::state(Comm comm) const {
  int state = nccl_abi::kSuccess;
  const int result = get_async_error_(comm, &state);
  return result == nccl_abi::kSuccess || result == nccl_abi::kInProgress ? state : result;
}

}  // namespace samestep
