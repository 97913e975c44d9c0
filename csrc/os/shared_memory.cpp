#include "os/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <utility>

namespace samestep {
namespace {

constexpr std::uintptr_t kPage = 4096;

/// Other processes and threads may write concurrently.
void write_each_page(std::byte* data, std::size_t nbytes) {
  for (std::size_t at = 0; at < nbytes; at += kPage) {
    // relaxed: publishes nothing; the kernel provides the page
    __atomic_fetch_add(reinterpret_cast<unsigned char*>(data + at), 0, __ATOMIC_RELAXED);
  }
}

}  // namespace

SharedMemory::SharedMemory(Fd fd, std::size_t nbytes) : fd_(std::move(fd)), nbytes_(nbytes) {
  void* const data = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (data == MAP_FAILED) throw_errno("cannot map shared memory");
  data_ = static_cast<std::byte*>(data);
  // Core files of all ranks would each contain the memory of all.
  ::madvise(data_, nbytes_, MADV_DONTDUMP);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, nbytes_);
}

SharedMemory SharedMemory::make(const char* name, std::size_t nbytes) {
  Fd fd = checked(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING), "memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(nbytes)) != 0) {
    throw_errno(errno == EFBIG ? "cannot size shared memory, for `ulimit -f` counts it as a file"
                               : "cannot size shared memory");
  }
  // A rank that shrank the memory would end the others by SIGBUS at their next access.
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) throw_errno("cannot seal it");
  return SharedMemory(std::move(fd), nbytes);
}

SharedMemory SharedMemory::open(Fd fd) {
  struct stat facts{};
  if (::fstat(fd.get(), &facts) != 0) throw_errno("cannot ask for the size of shared memory");
  return SharedMemory(std::move(fd), static_cast<std::size_t>(facts.st_size));
}

bool SharedMemory::release(std::size_t offset, std::size_t nbytes) const {
  // A hole in the file, not MADV_DONTNEED, which would unmap the pages in this process only and free none of them.
  constexpr int kMode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  return ::fallocate(fd_.get(), kMode, static_cast<off_t>(offset), static_cast<off_t>(nbytes)) == 0;
}

bool SharedMemory::map_private(std::size_t offset, std::size_t nbytes) noexcept {
  // At the same address, so that pointers stay valid. Without reserving swap space, of which most pages of a child will
  // need none.
  constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  return ::mmap(data_ + offset, nbytes, PROT_READ | PROT_WRITE, kFlags, fd_.get(), static_cast<off_t>(offset)) !=
         MAP_FAILED;
}

void SharedMemory::make_private(std::size_t offset, std::size_t nbytes) noexcept {
  if (nbytes != 0 && !map_private(offset, nbytes)) ::mprotect(data_ + offset, nbytes, PROT_READ);
}

bool SharedMemory::take_out(std::size_t offset, std::size_t nbytes) noexcept {
  if (!map_private(offset, nbytes)) return false;
  // The first write to a page of a private mapping makes the kernel copy it.
  if (!populate(data_ + offset, nbytes)) write_each_page(data_ + offset, nbytes);
  return true;
}

bool populate(void* data, std::size_t nbytes) {
#ifndef MADV_POPULATE_WRITE
  constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14
#endif
  const auto begin = reinterpret_cast<std::uintptr_t>(data) & ~(kPage - 1);
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + nbytes + kPage - 1) & ~(kPage - 1);
  if (::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
  write_each_page(reinterpret_cast<std::byte*>(begin), end - begin);  // for older kernels
  return true;
}

}  // namespace samestep
