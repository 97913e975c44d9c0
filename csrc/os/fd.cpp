#include "os/fd.h"

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/format.h"

namespace samestep {

void throw_errno(std::string_view act) {
  // First: making the text may change it.
  const int number = errno;
  throw UnavailableError(str(act, ": ", std::strerror(number), " (errno ", number, ")"));
}

Fd checked(int fd, std::string_view act) {
  if (fd < 0) throw_errno(act);
  return Fd(fd);
}

}  // namespace samestep
