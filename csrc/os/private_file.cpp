#include "os/private_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "os/fd.h"

namespace samestep {
namespace {

bool is_private(const struct stat& facts) {
  return facts.st_uid == ::geteuid() && (facts.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/// The folder, opened so that what is looked at is what is used; empty if others may write it.
Fd open_folder(const std::string& path) {
  Fd folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat facts{};
  if (folder.get() < 0 || ::fstat(folder.get(), &facts) != 0 || !is_private(facts)) return Fd();
  return folder;
}

bool write_all(int fd, const std::vector<char>& bytes) {
  for (std::size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::write(fd, bytes.data() + at, bytes.size() - at);
    if (n <= 0) return false;
    at += static_cast<std::size_t>(n);
  }
  return true;
}

}  // namespace

std::optional<std::vector<char>> read_private_file(const std::string& folder, const std::string& name) {
  const Fd place = open_folder(folder);
  if (place.get() < 0) return std::nullopt;
  const Fd file(::openat(place.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  struct stat facts{};
  if (file.get() < 0 || ::fstat(file.get(), &facts) != 0 || !S_ISREG(facts.st_mode) || !is_private(facts)) {
    return std::nullopt;
  }
  std::vector<char> bytes(static_cast<std::size_t>(facts.st_size));
  for (std::size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::read(file.get(), bytes.data() + at, bytes.size() - at);
    if (n <= 0) return std::nullopt;
    at += static_cast<std::size_t>(n);
  }
  return bytes;
}

bool write_private_file(const std::string& folder, const std::string& name, const std::vector<char>& bytes) {
  std::error_code error;
  const std::filesystem::path path(folder);
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  ::mkdir(folder.c_str(), S_IRWXU);
  const Fd place = open_folder(folder);
  if (place.get() < 0) return false;
  const std::string part = name + "." + std::to_string(::getpid()) + ".part";
  ::unlinkat(place.get(), part.c_str(), 0);  // of a process that had this number before
  const Fd file(::openat(place.get(), part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (file.get() < 0) return false;
  const bool written =
      write_all(file.get(), bytes) && ::renameat(place.get(), part.c_str(), place.get(), name.c_str()) == 0;
  if (!written) ::unlinkat(place.get(), part.c_str(), 0);
  return written;
}

}  // namespace samestep
