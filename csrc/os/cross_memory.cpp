#include "os/cross_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
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
constexpr std::size_t kGateBytes = 4096;

/// `gate`: 0 if there is none to pass.
bool transfer(CollectiveArgs call, pid_t pid, std::uint64_t gate, std::span<const RemoteSegment> pieces) {
  std::array<iovec, kMaxSegments + 1> here, there;
  const std::size_t first = gate != 0 ? 1 : 0;
  std::byte pass{};
  here[0] = {&pass, 1};
  there[0] = {reinterpret_cast<void*>(gate), 1};
  std::size_t done = 0;  // bytes of the first piece
  while (!pieces.empty()) {
    const std::size_t n = std::min(pieces.size(), kMaxSegments);
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t skip = i == 0 ? done : 0;
      here[first + i] = {pieces[i].local + skip, pieces[i].nbytes - skip};
      there[first + i] = {reinterpret_cast<void*>(pieces[i].remote + skip), pieces[i].nbytes - skip};
    }
    // The kernel takes the pieces in order: it stores into the first before it looks for the pages of the next.
    const ssize_t moved = call(pid, here.data(), first + n, there.data(), first + n, 0);
    if (moved <= static_cast<ssize_t>(first)) return false;
    done += static_cast<std::size_t>(moved) - first;  // the kernel may stop after any page
    while (!pieces.empty() && done >= pieces.front().nbytes) {
      done -= pieces.front().nbytes;
      pieces = pieces.subspan(1);
    }
  }
  return true;
}

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

bool push_memory_by_file(pid_t pid, std::uint64_t gate, std::span<const RemoteSegment> pieces) {
  std::byte pass{};
  const RemoteSegment first{&pass, gate, 1};
  return (gate == 0 || transfer_by_file(pid, O_RDWR, {&first, 1}, ::pwrite)) &&
         transfer_by_file(pid, O_RDWR, pieces, ::pwrite);
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
  return transfer(&::process_vm_readv, pid, 0, pieces);
}

bool push_memory(pid_t pid, std::uint64_t gate, std::span<const RemoteSegment> pieces) {
  return transfer(&::process_vm_writev, pid, gate, pieces);
}

std::uint64_t open_gate() {
  void* const page = ::mmap(nullptr, kGateBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw_errno("cannot map a page");
  return reinterpret_cast<std::uintptr_t>(page);
}

void close_gate(std::uint64_t gate) noexcept {
  // Over the old mapping, at once: in between, another thread could map something there. Not a private mapping, into
  // which /proc/<pid>/mem writes whatever its protection is.
  constexpr int kFlags = MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  void* const page = reinterpret_cast<void*>(gate);
  // Without a mapping to spare, the page remains, but can no longer be written to.
  if (::mmap(page, kGateBytes, PROT_NONE, kFlags, -1, 0) == MAP_FAILED) ::mprotect(page, kGateBytes, PROT_NONE);
}

void free_gate(std::uint64_t gate) noexcept { ::munmap(reinterpret_cast<void*>(gate), kGateBytes); }

// Yama's mode 1 is the default of several distributions: a process may access only its descendants, and ranks are
// siblings.
void allow_memory_access() { ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }

}  // namespace samestep
