#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/remote_segment.h"

namespace samestep {

/// Copies from another process's memory by CMA (process_vm_readv, Linux 3.2); remote addresses are those of
/// that process. False with errno if the kernel refuses: another user, ptrace not allowed, process or memory gone.
bool pull_memory(pid_t pid, std::span<const RemoteSegment> pieces);
/// Copies to it; nothing if `gate`, an address there, is that of a closed gate.
bool push_memory(pid_t pid, std::uint64_t gate, std::span<const RemoteSegment> pieces);

/// The same through /proc/<pid>/mem, for systems where a seccomp filter forbids process_vm_readv.
bool pull_memory_by_file(pid_t pid, std::span<const RemoteSegment> pieces);
/// Passes the gate in a call of its own: a process that is stopped between the two calls is not refused.
bool push_memory_by_file(pid_t pid, std::uint64_t gate, std::span<const RemoteSegment> pieces);

/// A page of this process into which each `push_memory` of others stores a byte before it stores anything else. A call
/// that begins after the gate is closed fails. Returns its address. Throws Error.
std::uint64_t open_gate();
/// For good: nothing else is ever mapped at that address.
void close_gate(std::uint64_t gate) noexcept;
/// Frees a gate that nobody will pass any more.
void free_gate(std::uint64_t gate) noexcept;

/// Whether this process, number `self`, can use `pull_memory`, and other processes of its user can use it on these
/// buffers, at most 8 of them. False while the process is not dumpable, for memory that the kernel cannot read
/// (memfd_secret), and under a filter that forbids it. Two system calls, of which each takes about a microsecond in
/// virtual machines.
bool is_open_to_others(pid_t self, std::span<const std::span<const std::byte>> buffers);

/// Allows it to every process of this user, where Yama restricts it to ancestors.
void allow_memory_access();

}  // namespace samestep
