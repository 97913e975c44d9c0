#pragma once

#include <sys/types.h>

#include <span>

#include "core/piece.h"

namespace samestep {

/// Copies between this process's memory and another's, at addresses there, through the kernel (process_vm_readv, Linux
/// 3.2). False with errno where the kernel refuses: another user, ptrace not allowed, the process or its memory gone.
bool pull_memory(pid_t pid, std::span<const Piece> pieces);
bool push_memory(pid_t pid, std::span<const Piece> pieces);

/// Lets every process of this user do so, where only ancestors are allowed to (Yama).
void allow_memory_access();

}  // namespace samestep
