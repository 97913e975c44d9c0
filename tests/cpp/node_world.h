#pragma once

#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "collective_calls.h"
#include "contributions.h"
#include "node/node_communicator.h"
#include "thread_peers.h"

namespace samestep {

/// A host of `size` threads; each joins once.
struct NodeWorld {
  NodeWorld(int n_ranks, Reach how, bool crowded = true)
      : size(n_ranks), reach(how), oversubscribed(crowded), state(std::make_shared<ThreadPeers::SharedState>()) {}
  std::shared_ptr<Communicator> join(int rank) {
    host = std::make_shared<ThreadPeers>(state, rank, size, reach);
    return join(host);
  }
  std::shared_ptr<Communicator> join(std::shared_ptr<ThreadPeers> as) const {
    std::vector<int> members(static_cast<std::size_t>(size));
    std::iota(members.begin(), members.end(), 0);
    ExchangeOptions options;
    options.oversubscribed = oversubscribed;
    return NodeCommunicator::open(std::move(as), members, options, soon());
  }
  int size;
  Reach reach;
  bool oversubscribed;
  std::shared_ptr<ThreadPeers::SharedState> state;
  static inline thread_local std::shared_ptr<ThreadPeers> host;  // of the rank that runs
};

}  // namespace samestep
