#pragma once

namespace samestep {

/// Prevents processes forked from this one from keeping the connection of this descriptor open, which would hide this
/// process's end from the peer. In the child the descriptor reads as end of file.
void close_in_forks(int fd);
void forget_in_forks(int fd);

}  // namespace samestep
