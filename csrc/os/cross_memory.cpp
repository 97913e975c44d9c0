#include "os/cross_memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>

namespace samestep {
namespace {

using Call = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);

constexpr std::size_t kMostAtOnce = 256;  // the kernel takes 1024

bool transfer(Call call, pid_t pid, std::span<const Piece> pieces) {
  std::array<iovec, kMostAtOnce> here, there;
  std::size_t done = 0;  // bytes of the first piece
  while (!pieces.empty()) {
    const std::size_t n = std::min(pieces.size(), kMostAtOnce);
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t skip = i == 0 ? done : 0;
      here[i] = {pieces[i].mine + skip, pieces[i].nbytes - skip};
      there[i] = {reinterpret_cast<void*>(pieces[i].theirs + skip), pieces[i].nbytes - skip};
    }
    const ssize_t moved = call(pid, here.data(), n, there.data(), n, 0);
    if (moved <= 0) return false;
    done += static_cast<std::size_t>(moved);  // it may stop short after any page
    while (!pieces.empty() && done >= pieces.front().nbytes) {
      done -= pieces.front().nbytes;
      pieces = pieces.subspan(1);
    }
  }
  return true;
}

}  // namespace

bool pull_memory(pid_t pid, std::span<const Piece> pieces) { return transfer(&::process_vm_readv, pid, pieces); }

bool push_memory(pid_t pid, std::span<const Piece> pieces) { return transfer(&::process_vm_writev, pid, pieces); }

void allow_memory_access() { ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }

}  // namespace samestep
