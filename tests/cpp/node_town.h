#pragma once

#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "contributions.h"
#include "node/node_communicator.h"
#include "thread_host.h"

namespace samestep {

inline Deadline soon_enough() { return Deadline::after(Seconds(60)); }

/// A host of `size` threads; each joins once.
struct NodeTown {
  NodeTown(int n_ranks, Reach how, bool crowded = true)
      : size(n_ranks), reach(how), oversubscribed(crowded), house(std::make_shared<ThreadHost::House>()) {}
  std::shared_ptr<Communicator> join(int rank) {
    host = std::make_shared<ThreadHost>(house, rank, size, reach);
    return join(host);
  }
  std::shared_ptr<Communicator> join(std::shared_ptr<ThreadHost> as) const {
    std::vector<int> members(static_cast<std::size_t>(size));
    std::iota(members.begin(), members.end(), 0);
    ExchangeOptions options;
    options.oversubscribed = oversubscribed;
    return NodeCommunicator::open(std::move(as), members, options, soon_enough());
  }
  int size;
  Reach reach;
  bool oversubscribed;
  std::shared_ptr<ThreadHost::House> house;
  static inline thread_local std::shared_ptr<ThreadHost> host;  // of the rank that runs
};

inline Buffer buffer_of(Floats& values) { return {values.data(), values.size(), DType::float32}; }
inline Shape shape_of(const Floats& values) { return Shape::flat(values.size()); }

}  // namespace samestep
