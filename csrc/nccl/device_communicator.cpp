#include "nccl/device_communicator.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "communicator/checks.h"
#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "exchange/waiting.h"
#include "nccl/nccl_calls.h"
#include "nccl/nccl_form.h"

namespace samestep {
namespace {

bool on_host(const ConstBuffer& buffer) { return buffer.device.kind == DeviceKind::cpu; }

/// Without elements, for what the host is to compare.
ConstBuffer empty(const ConstBuffer& buffer) { return {nullptr, 0, buffer.dtype}; }
Buffer nothing(const ConstBuffer& buffer) { return {nullptr, 0, buffer.dtype}; }

std::string describe(std::string_view verb, const ConstBuffer& buffer) {
  return str(verb, " of ", buffer.count, " ", name(buffer.dtype), " on the device");
}

std::vector<int> all_ranks(const Communicator& of) {
  std::vector<int> ranks(static_cast<std::size_t>(of.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

std::shared_ptr<DeviceCommunicator> DeviceCommunicator::open(std::shared_ptr<Communicator> host, DeviceOptions options,
                                                             const Deadline& deadline) {
  std::shared_ptr<DeviceCommunicator> made(new DeviceCommunicator(std::move(host), std::move(options)));
  const std::vector<int> ranks = all_ranks(*made->host_);
  made->through_host_ = made->host_->group(ranks, deadline);
  made->agreement_ = made->host_->group(ranks, deadline);
  made->stager_ = Stager::make(made->options_.gpu, made->options_.device, made->host_, made->through_host_);
  made->packing_ = std::make_unique<DevicePacking>(made->options_.gpu, made->options_.device, made->options_.packer,
                                                   made->options_.pack_below);
  if (made->options_.nccl != nullptr) {
    NcclChannel::Options channel{made->options_.gpu, made->options_.nccl, made->options_.device,
                                 made->options_.timeout};
    made->channel_ = NcclChannel::open(std::move(channel), made->host_, made->agreement_, deadline);
  }
  return made;
}

DeviceCommunicator::~DeviceCommunicator() = default;

// ---- what is where

void DeviceCommunicator::check_here(std::string_view verb, ConstBuffer& buffer) const {
  if (buffer.device.kind != options_.gpu->kind()) {
    if (on_host(buffer)) {
      throw InvalidArgumentError(
          str(verb, ": one array is in host memory and the other in device memory; move one of them to the other's"));
    }
    throw UnavailableError(str(verb, ": the array is not on a device that this group reaches with ",
                               options_.gpu->path(), "; move it to host memory first"));
  }
  if (buffer.device.index < 0)
    buffer.device.index = buffer.count == 0 ? options_.device : options_.gpu->device_of(buffer.data);
  if (buffer.device.index < 0) {
    throw InvalidArgumentError(str(verb, ": the array says that it is in device memory, but ", options_.gpu->path(),
                                   " does not know its address"));
  }
  if (buffer.device.index != options_.device) {
    throw InvalidArgumentError(str(verb, ": the array is on device ", buffer.device.index, ", but rank ", rank(),
                                   " of group '", name(), "' uses device ", options_.device,
                                   "; make it there, or choose devices in initialize()"));
  }
}

void DeviceCommunicator::check_here(std::string_view verb, Buffer& buffer) const {
  ConstBuffer same = buffer;
  check_here(verb, same);
  buffer.device = same.device;
}

Communicator::WorkPtr DeviceCommunicator::agreed(WorkPtr agreement) const {
  if (options_.compare_first) agreement->wait(Deadline::after(options_.timeout));
  return agreement;
}

Communicator::WorkPtr DeviceCommunicator::on_device(NcclLaunch launch, std::size_t nbytes) {
  agreement_->progress();
  ++n_launched_;
  if (size() > 1) n_launched_bytes_ += nbytes;
  return channel_->launch(std::move(launch));
}

Communicator::Counters DeviceCommunicator::counters() const {
  Counters sum = host_->counters();
  const Counters staged = through_host_->counters();
  sum.operations += staged.operations + n_launched_;
  sum.messages += staged.messages;
  sum.bytes += staged.bytes + n_launched_bytes_;
  return sum;
}

// ---- through the host

Communicator::WorkPtr DeviceCommunicator::staged_pieces(
    ConstBuffer in, Buffer out, const Shape& shape, std::function<WorkPtr(ConstBuffer, Buffer, const Shape&)> start) {
  const std::size_t item = itemsize(in.dtype), count = std::max(in.count, out.count);
  const std::size_t longest = std::max(options_.piece / item, std::size_t{1});
  StagedCall call;
  call.after = {in.stream, out.stream};
  for (std::size_t at = 0; at < count || at == 0; at += longest) {
    const std::size_t n = std::min(longest, count - at);
    StagedPart part;
    if (in.data != nullptr) part.in = static_cast<const std::byte*>(in.data) + at * item;
    if (out.data != nullptr) part.out = static_cast<std::byte*>(out.data) + at * item;
    part.in_nbytes = part.out_nbytes = n * item;
    part.in_place = true;
    const Shape described = at == 0 ? shape : Shape::flat(n);  // ranks are compared at the first piece
    const bool writes = out.data != nullptr;
    part.start = [start, described, n, dtype = in.dtype, writes](std::byte* memory, std::byte*) {
      return start({memory, n, dtype}, writes ? Buffer{memory, n, dtype} : Buffer{}, described);
    };
    call.parts.push_back(std::move(part));
  }
  return stager_->start(std::move(call));
}

Communicator::WorkPtr DeviceCommunicator::staged_whole(ConstBuffer in, Buffer out,
                                                       std::function<WorkPtr(ConstBuffer, Buffer)> start,
                                                       bool message) {
  StagedPart part;
  part.in = static_cast<const std::byte*>(in.data);
  part.in_nbytes = in.nbytes();
  part.out = static_cast<std::byte*>(out.data);
  part.out_nbytes = out.nbytes();
  part.start = [start = std::move(start), in, out](std::byte* from, std::byte* to) {
    return start({in.count != 0 ? from : nullptr, in.count, in.dtype},
                 {out.count != 0 ? to : nullptr, out.count, out.dtype});
  };
  StagedCall call;
  call.after = {in.stream, out.stream};
  call.message = message;
  call.parts.push_back(std::move(part));
  return stager_->start(std::move(call));
}

// ---- verbs

Communicator::WorkPtr DeviceCommunicator::all_reduce(ConstBuffer in, Buffer out, const Reduction& reduction,
                                                     const Shape& shape) {
  if (on_host(in) && on_host(out)) return host_->all_reduce(in, out, reduction, shape);
  check_here("allreduce", in);
  check_here("allreduce", out);
  checks::same_dtype("allreduce", in, out);
  checks::has_count("allreduce", "out", out, in.count);
  require_reducible(in.dtype, reduction);
  const auto form = nccl_form(in.dtype, reduction);
  if (channel_ == nullptr || !form) {
    return staged_pieces(in, out, shape,
                         [host = through_host_, reduction](ConstBuffer from, Buffer to, const Shape& s) {
                           return host->all_reduce(from, to, reduction, s);
                         });
  }
  WorkPtr agreement = agreed(agreement_->all_reduce(empty(in), nothing(out), reduction, shape));
  return on_device({describe("allreduce", in),
                    {in.stream, out.stream},
                    nccl_calls::all_reduce(channel_->nccl(), *form, reduction, {{in, out}}),
                    std::move(agreement),
                    {}},
                   in.nbytes());
}

Communicator::WorkPtr DeviceCommunicator::reduce(ConstBuffer in, Buffer out, const Reduction& reduction, int root,
                                                 const Shape& shape) {
  if (on_host(in) && on_host(out)) return host_->reduce(in, out, reduction, root, shape);
  checks::root_in_group("reduce", root, size());
  check_here("reduce", in);
  if (rank() == root) {
    check_here("reduce", out);
    checks::same_dtype("reduce", in, out);
    checks::has_count("reduce", "out", out, in.count);
  } else {
    out = {};
  }
  require_reducible(in.dtype, reduction);
  const auto form = nccl_form(in.dtype, reduction);
  if (channel_ == nullptr || !form) {
    return staged_pieces(in, out, shape,
                         [host = through_host_, reduction, root](ConstBuffer from, Buffer to, const Shape& s) {
                           return host->reduce(from, to, reduction, root, s);
                         });
  }
  WorkPtr agreement = agreed(agreement_->reduce(empty(in), nothing(in), reduction, root, shape));
  return on_device({describe("reduce", in),
                    {in.stream, out.stream},
                    nccl_calls::reduce(channel_->nccl(), *form, reduction, in, out, root),
                    std::move(agreement),
                    {}},
                   in.nbytes());
}

Communicator::WorkPtr DeviceCommunicator::broadcast(Buffer buffer, int root, const Shape& shape) {
  if (on_host(buffer)) return host_->broadcast(buffer, root, shape);
  checks::root_in_group("bcast", root, size());
  check_here("bcast", buffer);
  if (channel_ == nullptr) {
    const bool at_root = rank() == root;
    const ConstBuffer in =
        at_root ? ConstBuffer(buffer) : ConstBuffer{nullptr, buffer.count, buffer.dtype, buffer.device, buffer.stream};
    const Buffer out = at_root ? Buffer{nullptr, 0, buffer.dtype, buffer.device, buffer.stream} : buffer;
    return staged_pieces(in, out, shape, [host = through_host_, root](ConstBuffer from, Buffer, const Shape& s) {
      return host->broadcast({const_cast<void*>(from.data), from.count, from.dtype}, root, s);
    });
  }
  WorkPtr agreement = agreed(agreement_->broadcast(nothing(buffer), root, shape));
  return on_device({describe("bcast", buffer),
                    {buffer.stream},
                    nccl_calls::broadcast(channel_->nccl(), std::vector{buffer}, root),
                    std::move(agreement),
                    {}},
                   buffer.nbytes());
}

Communicator::WorkPtr DeviceCommunicator::all_gather(ConstBuffer in, Buffer out, const Shape& shape) {
  if (on_host(in) && on_host(out)) return host_->all_gather(in, out, shape);
  check_here("allgather", in);
  check_here("allgather", out);
  checks::same_dtype("allgather", in, out);
  checks::has_count("allgather", "out", out, in.count * static_cast<std::uint64_t>(size()));
  if (channel_ == nullptr) {
    return staged_whole(in, out, [host = through_host_, shape](ConstBuffer from, Buffer to) {
      return host->all_gather(from, to, shape);
    });
  }
  WorkPtr agreement = agreed(agreement_->all_gather(empty(in), nothing(out), shape));
  return on_device({describe("allgather", in),
                    {in.stream, out.stream},
                    nccl_calls::all_gather(channel_->nccl(), in, out),
                    std::move(agreement),
                    {}},
                   out.nbytes());
}

Communicator::WorkPtr DeviceCommunicator::reduce_scatter(ConstBuffer in, Buffer out, const Reduction& reduction,
                                                         const Shape& shape) {
  if (on_host(in) && on_host(out)) return host_->reduce_scatter(in, out, reduction, shape);
  check_here("reduce_scatter", in);
  check_here("reduce_scatter", out);
  checks::same_dtype("reduce_scatter", in, out);
  checks::has_count("reduce_scatter", "the input", in, out.count * static_cast<std::uint64_t>(size()));
  require_reducible(in.dtype, reduction);
  const auto form = nccl_form(in.dtype, reduction);
  if (channel_ == nullptr || !form) {
    return staged_whole(in, out, [host = through_host_, reduction, shape](ConstBuffer from, Buffer to) {
      return host->reduce_scatter(from, to, reduction, shape);
    });
  }
  WorkPtr agreement = agreed(agreement_->reduce_scatter(empty(in), nothing(out), reduction, shape));
  return on_device({describe("reduce_scatter", in),
                    {in.stream, out.stream},
                    nccl_calls::reduce_scatter(channel_->nccl(), *form, reduction, in, out),
                    std::move(agreement),
                    {}},
                   in.nbytes());
}

// What NCCL does not have is made of its sends and receives, in one group.

Communicator::WorkPtr DeviceCommunicator::routed(std::string what, ConstBuffer in, std::vector<std::uint64_t> sent,
                                                 Buffer out, std::vector<std::uint64_t> received, WorkPtr agreement) {
  if (agreement != nullptr) agreement = agreed(std::move(agreement));
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
    return staged_whole(in, out, [host = through_host_, all](ConstBuffer from, Buffer to) {
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
    return staged_whole(in, out, [host = through_host_, root, shape](ConstBuffer from, Buffer to) {
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
    return staged_whole(in, out, [host = through_host_, root, all](ConstBuffer from, Buffer to) {
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
    return staged_whole(in, out, [host = through_host_, root, shape](ConstBuffer from, Buffer to) {
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
    return staged_whole(in, out, [host = through_host_, root, all](ConstBuffer from, Buffer to) {
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
    return staged_whole(in, out, [host = through_host_, shape](ConstBuffer from, Buffer to) {
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
    return staged_whole(in, out, [host = through_host_, sent, received](ConstBuffer from, Buffer to) {
      return host->all_to_all_v(from, sent, to, received);
    });
  }
  return routed(describe("alltoallv", in), in, std::move(sent), out, std::move(received), nullptr);
}

Communicator::WorkPtr DeviceCommunicator::now(const Call& call) {
  if (on_host(call.in) && on_host(call.out)) return host_->now(call);
  return begin(call);
}

// ---- many buffers at once

namespace {

std::size_t nbytes_of(std::span<const Buffer> buffers) {
  std::size_t nbytes = 0;
  for (const Buffer& buffer : buffers) nbytes += buffer.nbytes();
  return nbytes;
}

/// For ranks to compare: how many buffers, and a digest of their lengths.
Shape shape_of_all(std::span<const Buffer> buffers) {
  Shape shape = Shape::flat(buffers.size());
  shape.n_dims = 2;
  for (const Buffer& buffer : buffers) shape.extents[1] = shape.extents[1] * 31 + buffer.count + 1;
  return shape;
}

std::vector<std::size_t> sizes_of(std::span<const Buffer> buffers) {
  std::vector<std::size_t> sizes;
  for (const Buffer& buffer : buffers) sizes.push_back(buffer.nbytes());
  return sizes;
}

}  // namespace

NcclLaunch DeviceCommunicator::packed_or_apart(
    std::span<const std::size_t> nbytes,
    const std::function<std::vector<nccl_calls::Calls>(nccl_calls::Packing)>& packed,
    const std::function<nccl_calls::Calls()>& apart) {
  NcclLaunch launch;
  std::optional<nccl_calls::Packing> packing;
  try {
    packing = packing_->plan(nbytes, *agreement_, Deadline::after(options_.timeout));
  } catch (const Error&) {  // peers go on to another operation, or have gone
    if (!options_.compare_first) channel_->abandon(std::current_exception());
    throw;
  }
  if (!packing) {
    launch.calls = apart();
    return launch;
  }
  launch.memory.push_back(packing->bucket);
  launch.then = packed(std::move(*packing));
  launch.calls = std::move(launch.then.front());
  launch.then.erase(launch.then.begin());
  return launch;
}

Communicator::WorkPtr DeviceCommunicator::all_reduce_many(std::span<const InOut> given, const Reduction& reduction) {
  std::vector<InOut> buffers(given.begin(), given.end());
  std::vector<Buffer> outs;
  std::vector<StreamHandle> after;
  const auto form = given.empty() ? std::nullopt : nccl_form(given[0].in.dtype, reduction);
  if (channel_ == nullptr || !form) throw InvalidArgumentError("all_reduce_many: not for NCCL");
  const ConstBuffer first = given[0].in;
  for (auto& [in, out] : buffers) {
    check_here("allreduce", in);
    check_here("allreduce", out);
    checks::same_dtype("allreduce", in, out);
    checks::same_dtype("allreduce", first, out);
    checks::has_count("allreduce", "out", out, in.count);
    outs.push_back(out);
    after.insert(after.end(), {in.stream, out.stream});
  }
  NcclLaunch launch = packed_or_apart(
      sizes_of(outs),
      [&](nccl_calls::Packing packing) {
        return nccl_calls::packed_all_reduce(channel_->nccl(), *form, reduction, buffers, std::move(packing));
      },
      [&] { return nccl_calls::all_reduce(channel_->nccl(), *form, reduction, buffers); });
  launch.what = str("allreduce of ", given.size(), " arrays of ", samestep::name(first.dtype), " on the device");
  launch.after = std::move(after);
  launch.agreement = agreed(agreement_->all_reduce(empty(first), nothing(first), reduction, shape_of_all(outs)));
  return on_device(std::move(launch), nbytes_of(outs));
}

Communicator::WorkPtr DeviceCommunicator::broadcast_many(std::span<const Buffer> given, int root) {
  checks::root_in_group("bcast", root, size());
  if (channel_ == nullptr || given.empty()) throw InvalidArgumentError("broadcast_many: not for NCCL");
  std::vector<Buffer> buffers(given.begin(), given.end());
  std::vector<StreamHandle> after;
  for (Buffer& buffer : buffers) {
    check_here("bcast", buffer);
    after.push_back(buffer.stream);
  }
  NcclLaunch launch = packed_or_apart(
      sizes_of(given),
      [&](nccl_calls::Packing packing) {
        return nccl_calls::packed_broadcast(channel_->nccl(), buffers, root, rank() == root, std::move(packing));
      },
      [&] { return nccl_calls::broadcast(channel_->nccl(), buffers, root); });
  launch.what = str("bcast of ", given.size(), " arrays on the device");
  launch.after = std::move(after);
  launch.agreement = agreed(agreement_->broadcast(nothing(given[0]), root, shape_of_all(given)));
  return on_device(std::move(launch), nbytes_of(given));
}

// ---- messages

bool DeviceCommunicator::by_address(std::size_t nbytes) const {
  // Shorter ones travel with their header, which the host writes and reads.
  constexpr std::size_t kShortest = 4 << 10;
  return options_.gpu_aware && host_->engine() == "mpi" && nbytes >= kShortest;
}

Communicator::WorkPtr DeviceCommunicator::message_by_address(const ConstBuffer& buffer, bool sends,
                                                             std::function<WorkPtr()> start) {
  StagedPart part;
  part.in = sends ? static_cast<const std::byte*>(buffer.data) : nullptr;
  part.by_address = true;
  part.start = [start = std::move(start)](std::byte*, std::byte*) { return start(); };
  // A receive writes when MPI pleases, so it too begins after what its memory is still used for.
  StagedCall call;
  call.after = {buffer.stream};
  call.message = true;
  call.parts.push_back(std::move(part));
  return stager_->start(std::move(call));
}

Communicator::WorkPtr DeviceCommunicator::send(ConstBuffer in, int dest, int tag) {
  if (on_host(in)) return host_->send(in, dest, tag);
  check_here("send", in);
  checks::peer_in_group("send", "dest", dest, size());
  checks::tag_is_valid("send", tag);
  if (by_address(in.nbytes())) {
    const ConstBuffer as_it_lies{in.data, in.count, in.dtype};
    return message_by_address(in, /*sends=*/true,
                              [host = host_, as_it_lies, dest, tag] { return host->send(as_it_lies, dest, tag); });
  }
  return staged_whole(
      in, Buffer{nullptr, 0, in.dtype},
      [host = host_, dest, tag](ConstBuffer from, Buffer) { return host->send(from, dest, tag); }, /*message=*/true);
}

Communicator::WorkPtr DeviceCommunicator::recv(Buffer out, int source, int tag) {
  if (on_host(out)) return host_->recv(out, source, tag);
  check_here("recv", out);
  if (source != kAnySource) checks::peer_in_group("recv", "source", source, size());
  if (tag != kAnyTag) checks::tag_is_valid("recv", tag);
  if (by_address(out.nbytes())) {
    const Buffer as_it_lies{out.data, out.count, out.dtype};
    return message_by_address(out, /*sends=*/false,
                              [host = host_, as_it_lies, source, tag] { return host->recv(as_it_lies, source, tag); });
  }
  return staged_whole(
      ConstBuffer{nullptr, 0, out.dtype}, out,
      [host = host_, source, tag](ConstBuffer, Buffer to) { return host->recv(to, source, tag); }, /*message=*/true);
}

Communicator::WorkPtr DeviceCommunicator::send_now(ConstBuffer in, int dest, int tag) {
  return on_host(in) ? host_->send_now(in, dest, tag) : send(in, dest, tag);
}

Communicator::WorkPtr DeviceCommunicator::recv_now(Buffer out, int source, int tag, Status& status) {
  return on_host(out) ? host_->recv_now(out, source, tag, status) : recv(out, source, tag);
}

// ---- groups, and the end

std::shared_ptr<Communicator> DeviceCommunicator::wrap(std::shared_ptr<Communicator> child,
                                                       const Deadline& deadline) const {
  return child == nullptr ? nullptr : open(std::move(child), options_, deadline);
}

std::shared_ptr<Communicator> DeviceCommunicator::split(int color, int key, const Deadline& deadline) {
  return wrap(host_->split(color, key, deadline), deadline);
}

std::shared_ptr<Communicator> DeviceCommunicator::group(std::span<const int> ranks, const Deadline& deadline) {
  return wrap(host_->group(ranks, deadline), deadline);
}

void DeviceCommunicator::progress() {
  stager_->progress();
  host_->progress();
}

void DeviceCommunicator::close(const Deadline& deadline) {
  Pause pause(/*oversubscribed=*/true);
  while (!stager_->idle()) {
    if (deadline.passed()) throw TimeoutError(str("close: operations of group '", name(), "' are under way"));
    if (pause.step()) wait_hooks().interrupt();
  }
  if (channel_ != nullptr) channel_->close(deadline);
  agreement_->close(deadline);
  through_host_->close(deadline);
  host_->close(deadline);
}

void DeviceCommunicator::abandon(std::exception_ptr error, const std::string& reason) {
  if (channel_ != nullptr) channel_->abandon(error);
  stager_->abandon(error);
  agreement_->abandon(error, reason);
  through_host_->abandon(error, reason);
  host_->abandon(error, reason);
}

void DeviceCommunicator::set_oversubscribed(bool oversubscribed) {
  host_->set_oversubscribed(oversubscribed);
  through_host_->set_oversubscribed(oversubscribed);
  agreement_->set_oversubscribed(oversubscribed);
}

}  // namespace samestep
