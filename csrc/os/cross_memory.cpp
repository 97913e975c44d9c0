#include "os/cross_memory.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "os/fd.h"

namespace samestep {
namespace {

using CollectiveArgs = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);

constexpr std::size_t kMaxSegments = 256;  // the kernel allows 1024 (UIO_MAXIOV)

bool transfer(CollectiveArgs call, pid_t pid, std::span<const RemoteSegment> pieces) {
  std::array<iovec, kMaxSegments> here, there;
  std::size_t done = 0;  // bytes of the first piece
  while (!pieces.empty()) {
    const std::size_t n = std::min(pieces.size(), kMaxSegments);
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t skip = i == 0 ? done : 0;
      here[i] = {pieces[i].local + skip, pieces[i].nbytes - skip};
      there[i] = {reinterpret_cast<void*>(pieces[i].remote + skip), pieces[i].nbytes - skip};
    }
    const ssize_t moved = call(pid, here.data(), n, there.data(), n, 0);
    if (moved <= 0) return false;
    done += static_cast<std::size_t>(moved);  // the kernel may stop after any page
    while (!pieces.empty() && done >= pieces.front().nbytes) {
      done -= pieces.front().nbytes;
      pieces = pieces.subspan(1);
    }
  }
  return true;
}

}  // namespace

namespace {

template <class Function>
bool transfer_by_file(pid_t pid, int flags, std::span<const RemoteSegment> pieces, Function call) {
  std::array<char, 32> path;
  // The offset in this file is the address in that process.
  std::snprintf(path.data(), path.size(), "/proc/%d/mem", static_cast<int>(pid));
  const Fd fd(::open(path.data(), flags | O_CLOEXEC));
  if (!fd) return false;
  for (const RemoteSegment& piece : pieces) {
    for (std::size_t done = 0; done < piece.nbytes;) {
      const ssize_t moved =
          call(fd.get(), piece.local + done, piece.nbytes - done, static_cast<off_t>(piece.remote + done));
      if (moved <= 0) return false;
      done += static_cast<std::size_t>(moved);
    }
  }
  return true;
}

}  // namespace

bool pull_memory_by_file(pid_t pid, std::span<const RemoteSegment> pieces) {
  return transfer_by_file(pid, O_RDONLY, pieces, ::pread);
}

bool push_memory_by_file(pid_t pid, std::span<const RemoteSegment> pieces) {
  return transfer_by_file(pid, O_RDWR, pieces, ::pwrite);
}

bool is_open_to_others(pid_t self, std::span<const std::span<const std::byte>> buffers) {
  constexpr std::size_t kMaxBuffers = 8;
  std::byte byte;
  std::array<RemoteSegment, kMaxBuffers> first;
  std::size_t n = 0;
  for (const std::span<const std::byte> buffer : buffers.first(std::min(buffers.size(), kMaxBuffers))) {
    // The first byte stands for the buffer, because each more takes a quarter of a microsecond.
    if (!buffer.empty()) first[n++] = {&byte, reinterpret_cast<std::uintptr_t>(buffer.data()), 1};
  }
  // A process can always access itself, so whether others can is asked for separately.
  return n == 0 || (::prctl(PR_GET_DUMPABLE) == 1 && pull_memory(self, std::span(first).first(n)));
}

bool pull_memory(pid_t pid, std::span<const RemoteSegment> pieces) {
  return transfer(&::process_vm_readv, pid, pieces);
}

bool push_memory(pid_t pid, std::span<const RemoteSegment> pieces) {
  return transfer(&::process_vm_writev, pid, pieces);
}

// Yama's mode 1 is the default of several distributions: a process may access only its descendants, and ranks are
// siblings.
void allow_memory_access() { ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }

}  // namespace samestep
