#pragma once

#include "core/error.h"
#include "nccl/nccl_library.h"

namespace samestep {

/// An NCCL group: the calls between construction and `end` are launched together. May be nested; the outermost group
/// launches.
class NcclGroup {
 public:
  explicit NcclGroup(const NcclLibrary& nccl) : nccl_(nccl) { nccl_.group_start(); }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  void end() {
    ended_ = true;
    nccl_.group_end();
  }
  ~NcclGroup() {
    if (ended_) return;
    try {
      nccl_.group_end();
    } catch (const Error&) {  // another exception is being thrown
    }
  }

 private:
  const NcclLibrary& nccl_;
  bool ended_ = false;
};

}  // namespace samestep
