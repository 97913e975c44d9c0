#pragma once

#include <cstddef>

#include "os/fd.h"

namespace samestep {

/// Memory that several processes map: a memfd, so /dev/shm and its limits play no part and nothing is left behind
/// however a process ends. Unmapped at destruction.
class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  /// New memory, zero, of a size that nobody can change. `name` is seen in /proc/<pid>/maps.
  static SharedMemory make(const char* name, std::size_t nbytes);
  /// What another process has made.
  static SharedMemory open(Fd fd);

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  const Fd& fd() const { return fd_; }
  /// Once nobody else will be given the memory, and no page of it will be given back.
  void close_fd() { fd_ = Fd(); }

  /// Gives pages back to the system; they are zero afterwards, for everybody. False if the system does not take them.
  bool release(std::size_t offset, std::size_t nbytes) const;
  /// Maps a part of the memory a second time, in place of the pages at `at`. Offset, size and `at` are whole pages.
  /// False if the system refuses; then the pages at `at` are as they were.
  bool map_over(std::size_t offset, std::size_t nbytes, void* at) const;
  /// From now on what this process writes stays its own; other processes' writes to pages that it has not written are
  /// still seen. For a child after fork, so nothing is thrown: where it fails the memory becomes read-only.
  void make_private() noexcept;
  explicit operator bool() const { return data_ != nullptr; }

 private:
  SharedMemory(Fd fd, std::size_t nbytes);

  Fd fd_;
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
};

/// Makes the pages of a range present for this process now, so that no later access pays for it. False if the system
/// has no memory for them.
bool populate(void* data, std::size_t nbytes);

}  // namespace samestep
