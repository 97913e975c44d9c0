#pragma once

#include "core/error.h"
#include "nccl/nccl_library.h"

namespace samestep {

/// What is called of NCCL between the beginning of the scope and `end` begins together. May be nested: the outermost
/// counts.
class NcclGroup {
 public:
  explicit NcclGroup(const NcclLibrary& nccl) : nccl_(nccl) { nccl_.group_start(); }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  void end(NcclLibrary::Comm comm) {
    ended_ = true;
    nccl_.group_end(comm);
  }
  ~NcclGroup() {
    if (ended_) return;
    try {
      nccl_.group_end(nullptr);
    } catch (const Error&) {  // what went wrong is being told
    }
  }

 private:
  const NcclLibrary& nccl_;
  bool ended_ = false;
};

}  // namespace samestep
