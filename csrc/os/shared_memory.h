#pragma once

#include <cstddef>

#include "os/fd.h"

namespace samestep {

/// Memory that several processes map. It is a memfd, so the limits of /dev/shm do not apply, and nothing is left behind
/// however a process ends. Unmapped at destruction.
class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  /// New zero-filled memory of a sealed size. `name` appears in /proc/<pid>/maps.
  static SharedMemory make(const char* name, std::size_t nbytes);
  /// Maps memory that another process has created.
  static SharedMemory open(Fd fd);

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  const Fd& fd() const { return fd_; }
  /// Closes the descriptor. To be called when the memory will not be passed on, and no page of it will be released.
  void close_fd() { fd_ = Fd(); }

  /// Releases pages to the system; they read as zero afterwards, in all processes. False on failure.
  bool release(std::size_t offset, std::size_t nbytes) const;
  /// Makes whole pages of the mapping private: writes of this process are no longer visible to others, and it still
  /// sees their writes to pages that it has not written. For a child after fork, so it does not throw: on failure the
  /// pages become read-only.
  void make_private(std::size_t offset, std::size_t nbytes) noexcept;
  /// Replaces whole pages by copies of this process's own, which hold what the pages held. Other threads may read and
  /// write them meanwhile. False, without effect, if the system has no mapping left.
  bool take_out(std::size_t offset, std::size_t nbytes) noexcept;
  explicit operator bool() const { return data_ != nullptr; }

 private:
  SharedMemory(Fd fd, std::size_t nbytes);
  bool map_private(std::size_t offset, std::size_t nbytes) noexcept;

  Fd fd_;
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
};

/// Populates the pages of a range, so that later accesses cause no page faults. False if the system has no memory for
/// them.
bool populate(void* data, std::size_t nbytes);

}  // namespace samestep
