#pragma once

#include <pthread.h>

#include <atomic>
#include <string_view>

#include "core/error.h"
#include "core/format.h"

namespace samestep {

/// The process that has made an object. One that was forked from it has neither the object's threads nor the device.
/// Processes are told apart by the number of forks between them: to ask for the process's id is a system call.
class OwnerProcess {
 public:
  // relaxed: a child of a fork has one thread, which counts before it does anything else
  bool is_this() const { return forks.load(std::memory_order_relaxed) == id_; }
  /// Throws NotInitializedError in another process.
  void require(int rank, std::string_view group) const {
    if (is_this()) return;
    throw NotInitializedError(str("this process was forked from rank ", rank, "; group '", group,
                                  "' can only be used in the original process"));
  }

 private:
  inline static std::atomic<unsigned> forks = 0;
  inline static const int is_counted = ::pthread_atfork(nullptr, nullptr, [] { ++forks; });

  unsigned id_ = forks;
};

}  // namespace samestep
