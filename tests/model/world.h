#pragma once

#include <array>
#include <memory>
#include <vector>

#include "engine/operation.h"
#include "explorer.h"
#include "node/node_communicator.h"

namespace model {

using Floats = std::span<float>;

/// How the ranks of a test reach each other's buffers.
enum class Reach { none, cma, shared };

/// The ranks of a host as the Explorer runs them, made anew for each execution. Users' buffers lie in the memory that
/// the Explorer watches.
class World {
 public:
  World(int size, Reach reach) : size_(size), reach_(reach) {}

  void set_up();
  void tear_down();

  int size() const { return size_; }
  samestep::Communicator& group(int rank) { return *members_[static_cast<std::size_t>(rank)].group; }
  samestep::ProgressEngine& engine(int rank) { return *members_[static_cast<std::size_t>(rank)].progress_engine; }

  /// A buffer of this rank for this execution.
  Floats buffer(int rank, std::size_t count);
  /// One that holds what this rank contributes, different in each execution.
  Floats contribution(int rank, std::size_t count);
  /// Checks that it is the sum of all ranks' contributions.
  void expect_sum(Floats values) const;

  /// Waits as ProgressEngine::wait does. With `polls_failures` it also polls for ranks that have left.
  void wait(int rank, const samestep::Communicator::WorkPtr& work, bool polls_failures = false);
  /// The same with a deadline that may pass at any moment. Then the rank leaves and withdraws its buffers, and the
  /// result is false.
  bool wait_or_leave(int rank, const samestep::Communicator::WorkPtr& work);
  void leave(int rank);

  /// Forgets how the rank reached this point. To be called while no operation is pending, with a number for the point.
  void forget_history(int rank, std::uint64_t place);

  /// A blocking allreduce on the fast path.
  void all_reduce_inline(int rank, Floats in, Floats out);
  samestep::Communicator::WorkPtr all_reduce(int rank, Floats in, Floats out);

 private:
  struct Member {
    std::shared_ptr<samestep::ProgressEngine> progress_engine;
    std::shared_ptr<samestep::NodeCommunicator> group;
    std::vector<Floats> buffers;
  };
  float first_element(int rank) const { return static_cast<float>((execution_ % 1000) * 100 + unsigned(rank)); }
  Member& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }

  int size_;
  Reach reach_;
  std::vector<Member> members_;
  std::size_t used_ = 0;
  unsigned execution_ = 0;
};

inline samestep::Buffer as_buffer(Floats values) { return {values.data(), values.size(), samestep::DType::float32}; }
inline samestep::Shape shape_of(Floats values) { return samestep::Shape::flat(values.size()); }

}  // namespace model
