#include <algorithm>
#include <array>

#include "communicator/checks.h"
#include "core/error.h"
#include "core/format.h"
#include "nccl/device_communicator.h"
#include "nccl/device_detail.h"
#include "nccl/nccl_calls.h"

namespace samestep {

// What NCCL does not have is made of its sends and receives, in one group.

using namespace device_detail;

Communicator::WorkPtr DeviceCommunicator::routed(std::string what, ConstBuffer in, std::vector<std::uint64_t> sent,
                                                 Buffer out, std::vector<std::uint64_t> received, WorkPtr agreement) {
  return on_device({std::move(what),
                    {in.stream, out.stream},
                    nccl_calls::messages(channel_->nccl(), in, std::move(sent), out, std::move(received)),
                    std::move(agreement),
                    {}},
                   std::max(in.nbytes(), out.nbytes()));
}

namespace {

std::vector<std::uint64_t> only(int size, int peer, std::uint64_t count) {
  std::vector<std::uint64_t> counts(static_cast<std::size_t>(size), 0);
  counts[static_cast<std::size_t>(peer)] = count;
  return counts;
}

}  // namespace

Communicator::WorkPtr DeviceCommunicator::all_gather_v(ConstBuffer in, Buffer out,
                                                       std::span<const std::uint64_t> counts) {
  if (on_host(in) && on_host(out)) return host_->all_gather_v(in, out, counts);
  check_here("allgatherv", in);
  check_here("allgatherv", out);
  checks::same_dtype("allgatherv", in, out);
  checks::counts_fill("allgatherv", "counts", counts, size(), out);
  checks::has_count("allgatherv", "the input", in, counts[static_cast<std::size_t>(rank())]);
  std::vector<std::uint64_t> all(counts.begin(), counts.end());
  if (channel_ == nullptr) {
    return moved(in, out, all, [host = through_host_, all](ConstBuffer from, Buffer to) {
      return host->all_gather_v(from, to, all);
    });
  }
  return on_device({describe("allgatherv", in),
                    {in.stream, out.stream},
                    nccl_calls::all_gather_v(channel_->nccl(), rank(), in, out, std::move(all)),
                    nullptr,
                    {}},
                   out.nbytes());
}

Communicator::WorkPtr DeviceCommunicator::gather(ConstBuffer in, Buffer out, int root, const Shape& shape) {
  if (on_host(in) && on_host(out)) return host_->gather(in, out, root, shape);
  checks::root_in_group("gather", root, size());
  check_here("gather", in);
  const bool at_root = rank() == root;
  if (at_root) {
    check_here("gather", out);
    checks::same_dtype("gather", in, out);
    checks::has_count("gather", "out", out, in.count * static_cast<std::uint64_t>(size()));
  } else {
    out = Buffer{nullptr, 0, in.dtype};
  }
  if (channel_ == nullptr) {
    return moved(in, out, std::array<std::uint64_t, 1>{in.count},
                 [host = through_host_, root, shape](ConstBuffer from, Buffer to) {
                   return host->gather(from, to, root, shape);
                 });
  }
  return routed(describe("gather", in), in, only(size(), root, in.count), out,
                std::vector<std::uint64_t>(static_cast<std::size_t>(size()), at_root ? in.count : 0),
                agreement_->gather(empty(in), nothing(in), root, shape));
}

Communicator::WorkPtr DeviceCommunicator::gather_v(ConstBuffer in, Buffer out, std::span<const std::uint64_t> counts,
                                                   int root) {
  if (on_host(in) && on_host(out)) return host_->gather_v(in, out, counts, root);
  checks::root_in_group("gatherv", root, size());
  check_here("gatherv", in);
  std::vector<std::uint64_t> all(counts.begin(), counts.end());
  if (rank() == root) {
    check_here("gatherv", out);
    checks::same_dtype("gatherv", in, out);
    checks::counts_fill("gatherv", "counts", counts, size(), out);
  } else {
    out = Buffer{nullptr, 0, in.dtype};
  }
  if (channel_ == nullptr) {
    const std::array<std::uint64_t, 1> mine{in.count};
    const std::span<const std::uint64_t> runs = rank() == root ? std::span<const std::uint64_t>(all) : mine;
    return moved(in, out, runs, [host = through_host_, root, all](ConstBuffer from, Buffer to) {
      return host->gather_v(from, to, all, root);
    });
  }
  if (rank() != root) all.assign(static_cast<std::size_t>(size()), 0);
  return routed(describe("gatherv", in), in, only(size(), root, in.count), out, std::move(all), nullptr);
}

Communicator::WorkPtr DeviceCommunicator::scatter(ConstBuffer in, Buffer out, int root, const Shape& shape) {
  if (on_host(out) && (rank() != root || on_host(in))) return host_->scatter(in, out, root, shape);
  checks::root_in_group("scatter", root, size());
  check_here("scatter", out);
  const bool at_root = rank() == root;
  if (at_root) {
    check_here("scatter", in);
    checks::same_dtype("scatter", in, out);
    checks::has_count("scatter", "the input", in, out.count * static_cast<std::uint64_t>(size()));
  } else {
    in = ConstBuffer{nullptr, 0, out.dtype};
  }
  if (channel_ == nullptr) {
    return moved(in, out, std::array<std::uint64_t, 1>{out.count},
                 [host = through_host_, root, shape](ConstBuffer from, Buffer to) {
                   return host->scatter(from, to, root, shape);
                 });
  }
  return routed(describe("scatter", out), in,
                std::vector<std::uint64_t>(static_cast<std::size_t>(size()), at_root ? out.count : 0), out,
                only(size(), root, out.count), agreement_->scatter(empty(out), nothing(out), root, shape));
}

Communicator::WorkPtr DeviceCommunicator::scatter_v(ConstBuffer in, std::span<const std::uint64_t> counts, Buffer out,
                                                    int root) {
  if (on_host(out) && (rank() != root || on_host(in))) return host_->scatter_v(in, counts, out, root);
  checks::root_in_group("scatterv", root, size());
  check_here("scatterv", out);
  std::vector<std::uint64_t> all(counts.begin(), counts.end());
  if (rank() == root) {
    check_here("scatterv", in);
    checks::same_dtype("scatterv", in, out);
    checks::counts_fill("scatterv", "counts", counts, size(), in);
  } else {
    in = ConstBuffer{nullptr, 0, out.dtype};
  }
  if (channel_ == nullptr) {
    const std::array<std::uint64_t, 1> mine{out.count};
    const std::span<const std::uint64_t> runs = rank() == root ? std::span<const std::uint64_t>(all) : mine;
    return moved(in, out, runs, [host = through_host_, root, all](ConstBuffer from, Buffer to) {
      return host->scatter_v(from, all, to, root);
    });
  }
  if (rank() != root) all.assign(static_cast<std::size_t>(size()), 0);
  return routed(describe("scatterv", out), in, std::move(all), out, only(size(), root, out.count), nullptr);
}

Communicator::WorkPtr DeviceCommunicator::all_to_all(ConstBuffer in, Buffer out, const Shape& shape) {
  if (on_host(in) && on_host(out)) return host_->all_to_all(in, out, shape);
  check_here("alltoall", in);
  check_here("alltoall", out);
  checks::same_dtype("alltoall", in, out);
  checks::has_count("alltoall", "out", out, in.count);
  const auto n_ranks = static_cast<std::uint64_t>(size());
  if (in.count % n_ranks != 0) {
    throw InvalidArgumentError(
        str("alltoall: ", in.count, " elements are no whole number of blocks for ", size(), " ranks"));
  }
  if (channel_ == nullptr) {
    return moved(in, out, std::array{in.count / n_ranks}, [host = through_host_, shape](ConstBuffer from, Buffer to) {
      return host->all_to_all(from, to, shape);
    });
  }
  const std::vector<std::uint64_t> counts(static_cast<std::size_t>(size()), in.count / n_ranks);
  return routed(describe("alltoall", in), in, counts, out, counts,
                agreement_->all_to_all(empty(in), nothing(out), shape));
}

Communicator::WorkPtr DeviceCommunicator::all_to_all_v(ConstBuffer in, std::span<const std::uint64_t> send_counts,
                                                       Buffer out, std::span<const std::uint64_t> receive_counts) {
  if (on_host(in) && on_host(out)) return host_->all_to_all_v(in, send_counts, out, receive_counts);
  check_here("alltoallv", in);
  check_here("alltoallv", out);
  checks::same_dtype("alltoallv", in, out);
  checks::counts_fill("alltoallv", "send counts", send_counts, size(), in);
  checks::counts_fill("alltoallv", "receive counts", receive_counts, size(), out);
  std::vector<std::uint64_t> sent(send_counts.begin(), send_counts.end());
  std::vector<std::uint64_t> received(receive_counts.begin(), receive_counts.end());
  if (channel_ == nullptr) {
    std::vector<std::uint64_t> runs = sent;
    runs.insert(runs.end(), received.begin(), received.end());
    return moved(in, out, runs, [host = through_host_, sent, received](ConstBuffer from, Buffer to) {
      return host->all_to_all_v(from, sent, to, received);
    });
  }
  return routed(describe("alltoallv", in), in, std::move(sent), out, std::move(received), nullptr);
}

}  // namespace samestep
