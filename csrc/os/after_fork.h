#pragma once

namespace samestep {

/// In processes that this one makes by fork, this descriptor shall not keep its connection open: the peer would not
/// see that this process has ended. There it reads as ended.
void close_in_forks(int fd);
void forget_in_forks(int fd);

}  // namespace samestep
