#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace samestep {

/// Copies between this process's memory and another's through the kernel (process_vm_readv, Linux 3.2). False
/// with errno where the kernel refuses: another user, ptrace not allowed, the process or its memory gone.
bool pull_memory(pid_t pid, void* to, std::uint64_t from, std::size_t nbytes);
bool push_memory(pid_t pid, std::uint64_t to, const void* from, std::size_t nbytes);

/// Lets every process of this user do so, where only ancestors are allowed to (Yama).
void allow_memory_access();

}  // namespace samestep
