#include "device/host_path.h"

#include <algorithm>
#include <cstring>

#include "device/block_table.h"
#include "device/overlap.h"
#include "device/refusal.h"

namespace samestep {
namespace {

using Counts = std::vector<std::uint64_t>;

// Half of it is longer than what any transport sends before it is received; see ProgressEngine::segment_nbytes.
constexpr std::size_t kShortestMessageSegment = 2 << 20, kLongestMessageSegment = 1 << 30;

/// Bytes of a segment of a collective that moves `nbytes`: equal parts, four so that the copies of one overlap with the
/// host's work on another, but none so short that its start takes longer. All ranks know `nbytes`, and divide alike.
std::size_t segment_of(std::size_t nbytes, std::size_t longest) {
  constexpr std::size_t kSegments = 4, kShortest = 256 << 10, kPage = 4096;
  const std::size_t n =
      std::max({std::min(nbytes / kShortest, kSegments), (nbytes + longest - 1) / longest, std::size_t{1}});
  const std::size_t part = (nbytes + n - 1) / n;
  return std::min((part + kPage - 1) / kPage * kPage, longest);
}

/// The lengths of the blocks of a buffer. `counts`: those of a `v` form.
Counts blocks_of(std::size_t count, bool is_divided, std::span<const std::uint64_t> counts, std::size_t size) {
  if (!is_divided) return {count};
  if (!counts.empty()) return {counts.begin(), counts.end()};
  return Counts(size, count / size);
}
Counts blocks_of_input(const CollectiveArgs& args, std::size_t size) {
  using enum CollectiveType;
  const bool is_divided = args.type == reduce_scatter || args.type == scatter || args.type == scatterv ||
                          args.type == alltoall || args.type == alltoallv;
  return blocks_of(args.in.count, is_divided, args.counts, size);
}
Counts blocks_of_output(const CollectiveArgs& args, std::size_t size) {
  using enum CollectiveType;
  const bool is_divided = args.type == allgather || args.type == allgatherv || args.type == gather ||
                          args.type == gatherv || args.type == alltoall || args.type == alltoallv;
  return blocks_of(args.out.count, is_divided, args.type == alltoallv ? args.recv_counts : args.counts, size);
}

/// The `n` elements from `at` of each block, as far as it has them.
StagedRuns runs_of(const Counts& blocks, std::uint64_t at, std::uint64_t n, std::size_t item) {
  StagedRuns runs;
  std::uint64_t start = 0;
  for (const std::uint64_t block : blocks) {
    const StagedRun run{(start + at) * item, block > at ? std::min(block - at, n) * item : 0};
    start += block;
    if (run.nbytes == 0) continue;
    if (!runs.empty() && runs.back().offset + runs.back().nbytes == run.offset) {
      runs.back().nbytes += run.nbytes;
    } else {
      runs.push_back(run);
    }
  }
  return runs;
}

StagedOperation send_to(const SendArgs& args) {
  return {.type = StagedOperation::Type::send, .dest = args.dest, .tag = args.tag};
}
StagedOperation receive() { return {.type = StagedOperation::Type::receive}; }

bool has_blocks(CollectiveType type) {
  return type != CollectiveType::allreduce && type != CollectiveType::reduce && type != CollectiveType::bcast;
}

/// Nothing if not all ranks know them.
std::optional<BlockLengths> lengths_of(const CollectiveArgs& args, int size) {
  if (has_counts(args.type)) return args.lengths;
  const auto n_blocks = static_cast<std::uint64_t>(size);
  const std::uint64_t own = args.own().count, block = args.type == CollectiveType::alltoall ? own / n_blocks : own;
  if (!has_blocks(args.type)) return BlockLengths{own, own};
  return BlockLengths{block, block * n_blocks};
}

}  // namespace

/// A collective that starts once its elements are in host memory; it keeps its counts.
class DeviceCommunicator::HostPath::HostCall {
 public:
  HostCall(std::shared_ptr<Communicator> host, const CollectiveArgs& args)
      : host_(std::move(host)),
        args_(args),
        // Copied: the caller's counts are valid during the call only, and the operation starts later.
        counts_(args.counts.begin(), args.counts.end()),
        recv_counts_(args.recv_counts.begin(), args.recv_counts.end()) {
    args_.counts = counts_;
    args_.recv_counts = recv_counts_;
  }

  WorkPtr start_whole(const ConstBuffer& in, const Buffer& out) const {
    return start(in, out, args_.shape, counts_, recv_counts_);
  }
  /// The `n` elements from `at` of each block.
  WorkPtr start_window(const ConstBuffer& in, const Buffer& out, std::uint64_t at, std::uint64_t n) const {
    // Ranks compare their calls in the operation of the first window.
    const Shape& shape = at == 0 ? args_.shape : Shape::flat(n);
    return start(in, out, shape, window_of(counts_, at, n), window_of(recv_counts_, at, n));
  }
  const CollectiveArgs& args() const { return args_; }
  int n_ranks() const { return host_->size(); }
  std::vector<PeerTransfer> transfers() const {
    std::vector<PeerTransfer> planned(static_cast<std::size_t>(host_->size()));
    plan_transfers(args_, host_->rank(), planned);
    return planned;
  }

 private:
  WorkPtr start(const ConstBuffer& in, const Buffer& out, const Shape& shape, const Counts& counts,
                const Counts& recv_counts) const {
    CollectiveArgs args = args_;
    args.in = in;
    args.out = out;
    if (args.type == CollectiveType::bcast && in.data != nullptr) {
      args.out = {const_cast<void*>(in.data), in.count, in.dtype};
    }
    args.shape = shape;
    args.counts = counts;
    args.recv_counts = recv_counts;
    return host_->start(args);
  }
  static Counts window_of(Counts counts, std::uint64_t at, std::uint64_t n) {
    for (std::uint64_t& count : counts) count = count > at ? std::min(count - at, n) : 0;
    return counts;
  }

  std::shared_ptr<Communicator> host_;
  CollectiveArgs args_;
  Counts counts_, recv_counts_;
};

DeviceCommunicator::HostPath::HostPath(std::shared_ptr<Communicator> messages,
                                       std::shared_ptr<Communicator> collectives, const DeviceOptions& options)
    : messages_(std::move(messages)),
      collectives_(std::move(collectives)),
      segmented_(std::dynamic_pointer_cast<ExchangeCommunicator>(messages_)),
      gpu_(options.gpu),
      longest_segment_(options.staging_bytes),
      some_are_gpu_aware_(options.some_are_gpu_aware),
      staging_(std::make_shared<HostStaging>(gpu_, options.device, messages_, collectives_)) {
  GroupSettings settings;
  // Also of messages of host arrays, which others may receive on their devices. Shorter segments would be sent before
  // they are received, copied once more, and kept in memory.
  settings.message_segment = std::clamp(longest_segment_, kShortestMessageSegment, kLongestMessageSegment);
  messages_->configure(settings);
  if (!options.gpu_aware || messages_->transport() != "mpi") return;
  // Shorter ones travel with their header, which the host writes and reads. Collectives read and write up to
  // `max_inline` bytes by the CPU, which cannot access device memory.
  direct_from_ = 4 << 10;
  segment_direct_from_ = std::max(direct_from_, collectives_->max_inline() + 1);
  copy_local_on_device();
}

Communicator::WorkPtr DeviceCommunicator::HostPath::start(const CollectiveArgs& args) {
  ++n_called_;
  CollectiveArgs own = args;
  if (args.type == CollectiveType::bcast) {
    // Root only reads its array and the others only write theirs: half of the copies are left out.
    own.in = args.out;
    if (collectives_->rank() == args.root) {
      own.out.data = nullptr;
    } else {
      own.in.data = nullptr;
    }
  }
  const auto call = std::make_shared<const HostCall>(collectives_, own);
  const bool overlaps = overwrites_input(args, collectives_->rank());
  // All ranks must divide into the same windows. A rank that hands the whole array to MPI does not divide at all. What
  // the CPU reduces is always divided, and MPI gets the windows of a bcast.
  if (!some_are_gpu_aware_ || reduces(args.type) || !has_blocks(args.type)) return in_windows(call, overlaps);
  const auto start_whole = [call](const ConstBuffer& in, const Buffer& out) { return call->start_whole(in, out); };
  // The whole input is on the host before the first element is copied back.
  return overlaps ? whole(args.in, args.out, /*direct=*/false, start_whole)
                  : exchange(args.in, args.out, call->transfers(), start_whole);
}

Communicator::WorkPtr DeviceCommunicator::HostPath::start_refusal() {
  ++n_called_;
  StagedSegment part;
  part.start = [group = collectives_](std::byte*, std::byte*) { return group->start(refusal::args()); };
  return start_part(std::move(part), {});
}

Communicator::WorkPtr DeviceCommunicator::HostPath::start(const SendArgs& args) {
  const ConstBuffer in = args.in;
  const bool direct = in.nbytes() >= direct_from_;
  if (!direct && is_segmented(in)) return in_segments(args);
  const auto start = [host = messages_, dest = args.dest, tag = args.tag](const ConstBuffer& from, const Buffer&) {
    return host->send(from, dest, tag);
  };
  return whole(in, Buffer{nullptr, 0, in.dtype}, direct, start, send_to(args));
}

Communicator::WorkPtr DeviceCommunicator::HostPath::start_behind(const SendArgs& args) {
  StagedSegment part;
  part.start = [host = messages_, args](std::byte*, std::byte*) { return Inner{*host}.start_send(args); };
  return start_part(std::move(part), send_to(args));
}

Communicator::WorkPtr DeviceCommunicator::HostPath::start(const RecvArgs& args) {
  const Buffer out = args.out;
  const bool direct = out.nbytes() >= direct_from_;
  if (!direct && is_segmented(out)) return in_segments(args);
  const auto start = [host = messages_, args, direct](const ConstBuffer&, const Buffer& to) {
    RecvArgs here = args;
    here.out = to;
    // The group of messages must know that MPI gets a device pointer, which its own code may not read.
    if (direct) here.out.device = args.out.device;
    return Inner{*host}.start_recv(here);
  };
  return whole(ConstBuffer{nullptr, 0, out.dtype}, out, direct, start, receive());
}

// ---- staged

bool DeviceCommunicator::HostPath::is_segmented(const ConstBuffer& buffer) const {
  return segmented_ != nullptr && segmented_->segment_nbytes(buffer.nbytes()) < buffer.nbytes();
}

Communicator::WorkPtr DeviceCommunicator::HostPath::in_segments(const SendArgs& args) {
  const ConstBuffer in = args.in;
  const auto body = std::make_shared<MessageBody>();
  const std::size_t segment = segmented_->segment_nbytes(in.nbytes());
  StagedOperation call = send_to(args);
  call.after = {in.stream};
  for (std::size_t at = 0; at < in.nbytes(); at += segment) {
    StagedSegment part;
    part.in = static_cast<const std::byte*>(in.data);
    part.in_runs = {{at, std::min(segment, in.nbytes() - at)}};
    if (at == 0) {
      part.start = [host = segmented_, args, body](std::byte* from, std::byte*) {
        SendArgs first = args;
        first.in = {from, args.in.count, args.in.dtype};
        return host->send_first(first, body);
      };
    } else {
      part.start = [host = segmented_, body, at](std::byte* from, std::byte*) {
        return host->send_segment(*body, at, from);
      };
    }
    call.parts.push_back(std::move(part));
  }
  return staging_->start(std::move(call));
}

Communicator::WorkPtr DeviceCommunicator::HostPath::in_segments(const RecvArgs& args) {
  const auto body = std::make_shared<MessageBody>();
  auto* const out = static_cast<std::byte*>(args.out.data);
  const std::size_t most = segmented_->max_inline_message();
  StagedOperation call = receive();
  call.after = {args.out.stream};
  StagedSegment header;
  header.out = out;
  header.out_runs = {{0, std::min(most, args.out.nbytes())}};
  header.start = [host = segmented_, args, body](std::byte*, std::byte* to) {
    RecvArgs here = args;
    here.out = {to, args.out.count, args.out.dtype};
    return host->receive_header(here, body);
  };
  header.n_written = [body, item = itemsize(args.out.dtype)](const Work& work) {
    return body->nbytes == 0 ? work.status().count * item : 0;
  };
  call.parts.push_back(std::move(header));
  call.then = [host = segmented_, body, out] {
    std::vector<StagedSegment> parts;
    for (std::size_t at = 0; at < body->nbytes; at += body->segment_nbytes) {
      StagedSegment part;
      part.out = out;
      part.out_runs = {{at, std::min(body->segment_nbytes, body->nbytes - at)}};
      part.start = [host, body, at](std::byte*, std::byte* to) { return host->receive_segment(*body, at, to); };
      parts.push_back(std::move(part));
    }
    return parts;
  };
  return staging_->start(std::move(call));
}

Communicator::WorkPtr DeviceCommunicator::HostPath::in_windows(const std::shared_ptr<const HostCall>& call,
                                                               bool copies_in_first) {
  const CollectiveArgs& args = call->args();
  StagedOperation staged;
  staged.after = {args.in.stream, args.out.stream};
  staged.copies_in_first = copies_in_first;
  if (const std::optional<BlockLengths> known = lengths_of(args, collectives_->size())) {
    staged.parts = windows(call, *known, longest_segment_, segment_direct_from_);
    return staging_->start(std::move(staged));
  }
  const auto table = std::make_shared<BlockTable>(call->transfers());
  StagedSegment exchange;
  exchange.start = [table, group = collectives_, as = args.signature()](std::byte*, std::byte*) {
    return table->exchange(*group, as);
  };
  staged.parts.push_back(std::move(exchange));
  const std::string verb = staged.called.empty() ? std::string(samestep::name(args.type)) : staged.called;
  staged.then = [table, call, verb, group = collectives_->name(), longest = longest_segment_] {
    return windows(call, table->lengths(verb, group, itemsize(call->args().own().dtype)), longest, SIZE_MAX);
  };
  return staging_->start(std::move(staged));
}

std::vector<StagedSegment> DeviceCommunicator::HostPath::windows(const std::shared_ptr<const HostCall>& call,
                                                                 const BlockLengths& lengths,
                                                                 std::size_t longest_segment, std::size_t direct_from) {
  const CollectiveArgs& args = call->args();
  const bool divides = has_blocks(args.type);
  // In large groups a segment that is split among all ranks would become many tiny copies.
  const std::size_t shortest_run = divides ? 4 << 10 : 1;
  const auto size = static_cast<std::size_t>(call->n_ranks());
  const DType dtype = args.own().dtype;
  const std::size_t item = itemsize(dtype);
  // The busiest rank has about one segment in each window.
  const std::uint64_t segment = segment_of(lengths.busiest * item, longest_segment);
  const std::uint64_t nbytes = segment * lengths.longest / std::max<std::uint64_t>(lengths.busiest, 1);
  const std::uint64_t window = std::max(std::max<std::uint64_t>(nbytes, shortest_run) / item, std::uint64_t{1});
  const Counts in_blocks = blocks_of_input(args, size), out_blocks = blocks_of_output(args, size);
  std::vector<StagedSegment> parts;
  for (std::uint64_t at = 0; at < lengths.longest || at == 0; at += window) {
    const std::uint64_t n = std::min(window, lengths.longest - at);
    StagedSegment part;
    part.in = static_cast<const std::byte*>(args.in.data);
    part.out = static_cast<std::byte*>(args.out.data);
    part.in_place = !divides;
    // The CPU reduces, so only what is merely moved can stay on the device.
    part.gpu_direct = args.type == CollectiveType::bcast && n * item >= direct_from;
    if (part.gpu_direct) {
      const std::byte* const lies = (part.in != nullptr ? part.in : part.out) + at * item;
      part.start = [call, at, n, dtype, lies](std::byte*, std::byte*) {
        return call->start_window({lies, n, dtype}, {nullptr, 0, dtype}, at, n);
      };
    } else {
      if (part.in != nullptr) part.in_runs = runs_of(in_blocks, at, window, item);
      if (part.out != nullptr) part.out_runs = runs_of(out_blocks, at, window, item);
      part.start = [call, at, n, dtype, n_in = total_nbytes(part.in_runs) / item,
                    n_out = total_nbytes(part.out_runs) / item](std::byte* from, std::byte* to) {
        return call->start_window({n_in != 0 ? from : nullptr, n_in, dtype}, {n_out != 0 ? to : nullptr, n_out, dtype},
                                  at, n);
      };
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

Communicator::WorkPtr DeviceCommunicator::HostPath::start_part(StagedSegment part, StagedOperation call) {
  call.parts.push_back(std::move(part));
  return staging_->start(std::move(call));
}

Communicator::WorkPtr DeviceCommunicator::HostPath::whole(ConstBuffer in, Buffer out, bool direct, Start start,
                                                          StagedOperation call) {
  StagedSegment part;
  part.in = static_cast<const std::byte*>(in.data);
  part.in_runs = {{0, direct ? 0 : in.nbytes()}};
  part.out = static_cast<std::byte*>(out.data);
  part.out_runs = {{0, out.nbytes()}};  // if direct, of a message that comes with its header
  part.gpu_direct = direct;
  part.start = [start = std::move(start), in, out, direct](std::byte* from, std::byte* to) {
    const void* const input = direct ? in.data : from;
    void* const output = direct ? out.data : to;
    return start({in.count != 0 ? input : nullptr, in.count, in.dtype},
                 {out.count != 0 ? output : nullptr, out.count, out.dtype});
  };
  // A message may be shorter than the buffer; then only what has arrived is copied back.
  if (call.type == StagedOperation::Type::receive) {
    part.n_written = [item = itemsize(out.dtype)](const Work& work) { return work.status().count * item; };
  }
  // A direct receive writes when MPI pleases, so it too begins after what its memory is still used for.
  call.after = {in.stream, out.stream};
  return start_part(std::move(part), std::move(call));
}

// ---- GPU-direct: MPI gets device pointers

void DeviceCommunicator::HostPath::copy_local_on_device() {
  GroupSettings settings;
  // Weak: the staging holds the group that keeps this function.
  settings.copy_local = [staging = std::weak_ptr(staging_), gpu = gpu_](std::byte* to, const std::byte* from,
                                                                        std::size_t nbytes) {
    if (gpu->device_of(from) < 0) {
      std::memmove(to, from, nbytes);  // staged
    } else if (const auto copier = staging.lock()) {
      copier->copy_local(to, from, nbytes);
    }
  };
  collectives_->configure(settings);
}

Communicator::WorkPtr DeviceCommunicator::HostPath::exchange(ConstBuffer in, Buffer out,
                                                             std::span<const PeerTransfer> transfers, Start start) {
  const auto is_direct = [this](std::size_t nbytes) { return nbytes == 0 || nbytes >= segment_direct_from_; };
  bool any = false, all_long = true;
  for (const PeerTransfer& transfer : transfers) {
    any = any || transfer.out_nbytes != 0 || transfer.in_nbytes != 0;
    all_long = all_long && is_direct(transfer.out_nbytes) && is_direct(transfer.in_nbytes);
  }
  // One short transfer suffices: it would travel with its header, by the CPU.
  return whole(in, out, /*direct=*/any && all_long, std::move(start));
}

}  // namespace samestep
