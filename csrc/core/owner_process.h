#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <string_view>

#include "core/error.h"
#include "core/format.h"

namespace samestep {

/// The process that has made an object. One that was forked from it has neither the object's threads nor the device.
class OwnerProcess {
 public:
  bool is_this() const { return ::getpid() == id_; }
  /// Throws NotInitializedError in another process.
  void require(int rank, std::string_view group) const {
    if (is_this()) return;
    throw NotInitializedError(str("this process was forked from rank ", rank, "; group '", group,
                                  "' can only be used in the original process"));
  }

 private:
  pid_t id_ = ::getpid();
};

}  // namespace samestep
