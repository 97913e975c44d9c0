#include "os/cross_memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>

namespace samestep {
namespace {

using Call = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);

bool transfer(Call call, pid_t pid, void* local, std::uint64_t remote, std::size_t nbytes) {
  auto* at = static_cast<std::byte*>(local);
  while (nbytes != 0) {
    const iovec here{at, nbytes};
    const iovec there{reinterpret_cast<void*>(remote), nbytes};
    const ssize_t moved = call(pid, &here, 1, &there, 1, 0);
    if (moved <= 0) return false;
    at += moved;
    remote += static_cast<std::uint64_t>(moved);
    nbytes -= static_cast<std::size_t>(moved);
  }
  return true;
}

}  // namespace

bool pull_memory(pid_t pid, void* to, std::uint64_t from, std::size_t nbytes) {
  return transfer(&::process_vm_readv, pid, to, from, nbytes);
}

bool push_memory(pid_t pid, std::uint64_t to, const void* from, std::size_t nbytes) {
  return transfer(&::process_vm_writev, pid, const_cast<void*>(from), to, nbytes);
}

void allow_memory_access() { ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }

}  // namespace samestep
