#pragma once

#include "communicator/communicator.h"
#include "floats.h"

namespace samestep {

// Collectives by name, and their arguments, for tests.

inline Deadline soon() { return Deadline::after(Seconds(60)); }
inline Buffer buffer(Floats& values) { return {values.data(), values.size(), DType::float32}; }
inline Shape shape(const Floats& values) { return Shape::flat(values.size()); }

using Counts = std::span<const std::uint64_t>;

inline auto allreduce(Communicator& group, ConstBuffer in, Buffer out, Reduction reduction, Shape shape) {
  return group.start({CollectiveType::allreduce, in, out, reduction, -1, shape});
}
inline auto reduce(Communicator& group, ConstBuffer in, Buffer out, Reduction reduction, int root, Shape shape) {
  return group.start({CollectiveType::reduce, in, out, reduction, root, shape});
}
inline auto reduce_scatter(Communicator& group, ConstBuffer in, Buffer out, Reduction reduction, Shape shape) {
  return group.start({CollectiveType::reduce_scatter, in, out, reduction, -1, shape});
}
inline auto bcast(Communicator& group, Buffer buffer, int root, Shape shape) {
  return group.start({CollectiveType::bcast, {}, buffer, {}, root, shape});
}
inline auto allgather(Communicator& group, ConstBuffer in, Buffer out, Shape shape) {
  return group.start({CollectiveType::allgather, in, out, {}, -1, shape});
}
inline auto allgatherv(Communicator& group, ConstBuffer in, Buffer out, Counts counts) {
  return group.start({CollectiveType::allgatherv, in, out, {}, -1, {}, counts});
}
inline auto gather(Communicator& group, ConstBuffer in, Buffer out, int root, Shape shape) {
  return group.start({CollectiveType::gather, in, out, {}, root, shape});
}
inline auto gatherv(Communicator& group, ConstBuffer in, Buffer out, Counts counts, int root) {
  return group.start({CollectiveType::gatherv, in, out, {}, root, {}, counts});
}
inline auto scatter(Communicator& group, ConstBuffer in, Buffer out, int root, Shape shape) {
  return group.start({CollectiveType::scatter, in, out, {}, root, shape});
}
inline auto scatterv(Communicator& group, ConstBuffer in, Counts counts, Buffer out, int root) {
  return group.start({CollectiveType::scatterv, in, out, {}, root, {}, counts});
}
inline auto alltoall(Communicator& group, ConstBuffer in, Buffer out, Shape shape) {
  return group.start({CollectiveType::alltoall, in, out, {}, -1, shape});
}
inline auto alltoallv(Communicator& group, ConstBuffer in, Counts sent, Buffer out, Counts received) {
  return group.start({CollectiveType::alltoallv, in, out, {}, -1, {}, sent, received});
}
inline auto barrier(Communicator& group) { return group.start({CollectiveType::barrier}); }

}  // namespace samestep
