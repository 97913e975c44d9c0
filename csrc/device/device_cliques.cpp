#include "device/device_cliques.h"

#include <algorithm>

#include "communicator/checks.h"
#include "core/error.h"
#include "core/format.h"
#include "device/overlap.h"
#include "gpu/capture.h"
#include "nccl/nccl_group.h"
#include "nccl/nccl_reduction.h"

namespace samestep {
namespace {

using nccl_calls::Calls;
using Comm = NcclLibrary::Comm;
using Stream = NcclLibrary::Stream;

/// Makes each member's calls on its device, all in one group.
Calls together(const NcclComm& channel, std::vector<Calls> calls) {
  nccl_calls::Digest connections;
  for (const Calls& of_member : calls) connections.add(of_member.connections);
  auto enqueue = [&channel, calls = std::move(calls)](Comm comm, Stream) {
    const std::vector<NcclMembers::Member>& members = channel.members().all();
    NcclGroup group(channel.nccl());
    for (std::size_t i = 0; i < members.size(); ++i) {
      const OnDevice on(channel.gpu(), members[i].device);
      calls[i].enqueue(members[i].comm, members[i].stream->get());
    }
    group.end(comm);
  };
  return {std::move(enqueue), connections.value()};
}

/// For what NCCL would overwrite while it reads it. Only arrays of one device can share memory.
[[noreturn]] void refuse_overlap(CollectiveType type, std::size_t i, std::string_view with) {
  throw InvalidArgumentError(
      str(name(type), ": array ", i, " of the list shares memory with ", with, "; pass a copy of one"));
}

/// Broadcasts from each member into a buffer of its own.
Calls gather_pieces(const NcclLibrary& nccl, int member, ConstBuffer in, std::vector<Buffer> outs) {
  auto enqueue = [&nccl, member, in, outs = std::move(outs)](Comm comm, Stream stream) {
    NcclGroup group(nccl);
    for (int root = 0; root < static_cast<int>(outs.size()); ++root) {
      void* const out = outs[static_cast<std::size_t>(root)].data;
      nccl.broadcast(root == member ? in.data : out, out, in.nbytes(), nccl_abi::kUint8, root, comm, stream);
    }
    group.end(comm);
  };
  return {std::move(enqueue), nccl_calls::connections_of_broadcasts()};
}

}  // namespace

// ---- lists of devices

DeviceCliques::DeviceCliques(std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> signature_check,
                             DeviceOptions options, std::shared_ptr<NcclComm> own)
    : host_(std::move(host)),
      signature_check_(std::move(signature_check)),
      own_(std::move(own)),
      options_(std::move(options)) {
  // The list of this rank's own device thus has number 1 on every rank, without another communicator.
  if (own_ != nullptr) cliques_.push_back({{options_.device}, own_});
}

std::shared_ptr<DeviceCliques> DeviceCliques::make(std::shared_ptr<Communicator> host,
                                                   std::shared_ptr<Communicator> signature_check, DeviceOptions options,
                                                   std::shared_ptr<NcclComm> own) {
  std::shared_ptr<DeviceCliques> made(
      new DeviceCliques(std::move(host), std::move(signature_check), std::move(options), std::move(own)));
  // Not in the constructor: the callback holds a weak pointer, which does not exist there yet.
  if (made->own_ != nullptr) made->watch_mismatches(*made->own_);
  return made;
}

void DeviceCliques::watch_mismatches(NcclComm& channel) {
  channel.set_on_mismatch([weak = weak_from_this()](const std::exception_ptr& error) {
    if (const auto self = weak.lock()) self->mismatch_error(error);
  });
}

// Ranks that differ in one call may have launched different things in any communicator, so none of them can be used any
// more.
void DeviceCliques::mismatch_error(const std::exception_ptr& error) {
  if (own_ != nullptr) own_->abandon(error);
  abandon(error);
}

int DeviceCliques::clique_id(std::span<const int> devices) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(cliques_.begin(), cliques_.end(),
                                  [&](const Clique& known) { return std::ranges::equal(known.devices, devices); });
  return found == cliques_.end() ? 0 : static_cast<int>(found - cliques_.begin()) + 1;
}

DeviceCliques::Clique DeviceCliques::clique(int number) const {
  const std::lock_guard lock(mutex_);
  if (number < 1 || number > static_cast<int>(cliques_.size())) {
    throw InvalidArgumentError(str("no list of devices has number ", number));
  }
  return cliques_[static_cast<std::size_t>(number) - 1];
}

std::vector<DeviceCliques::Clique> DeviceCliques::cliques() const {
  const std::lock_guard lock(mutex_);
  // Without the communicator of the rank's own device, which its owner closes.
  return {cliques_.begin() + (own_ != nullptr ? 1 : 0), cliques_.end()};
}

int DeviceCliques::add(std::vector<int> devices, const Deadline& deadline) {
  if (own_ == nullptr || devices.empty()) throw InvalidArgumentError("a list of devices needs NCCL, and a device");
  NcclComm::Options options{options_.gpu, options_.nccl, devices[0], options_.timeout};
  options.extra.assign(devices.begin() + 1, devices.end());
  // Without the mutex, since this waits for all ranks. The number is the same everywhere, because all ranks add a list
  // at the same point of their order of calls.
  auto channel = NcclComm::open(std::move(options), host_, signature_check_, deadline);
  watch_mismatches(*channel);
  const std::lock_guard lock(mutex_);
  cliques_.push_back({std::move(devices), std::move(channel)});
  return static_cast<int>(cliques_.size());
}

Communicator::WorkPtr DeviceCliques::check_signature(const CliqueArgs& args) {
  // A collective of the host without elements: its header alone is exchanged.
  const ConstBuffer in{nullptr, 0, args.dtype};
  const Buffer out{nullptr, 0, args.dtype};
  const ListShape list{args.length, args.count, static_cast<std::uint64_t>(args.number),
                       static_cast<std::uint64_t>(args.detail)};
  signature_check_->progress();
  if (has_counts(args.type) || args.type > CollectiveType::allgather) {
    throw InvalidArgumentError(str(name(args.type), " is not for lists of arrays"));
  }
  return signature_check_->start({.type = args.type,
                                  .in = in,
                                  .out = out,
                                  .reduction = args.reduction,
                                  .root = has_root(args.type) ? args.root : -1,
                                  .shape = list.shape()});
}

// ---- operations

void DeviceCliques::check(const Clique& clique, const CliqueArgs& args, std::size_t i, const ConstBuffer& buffer,
                          std::size_t times) const {
  if (args.length != clique.devices.size()) {
    throw InvalidArgumentError(
        str(name(args.type), ": ", args.length, " arrays for a list of ", clique.devices.size(), " devices"));
  }
  const int device = buffer.device.index >= 0 ? buffer.device.index : options_.gpu->device_of(buffer.data);
  if (buffer.device.kind != options_.gpu->kind() || device != clique.devices[i]) {
    throw InvalidArgumentError(
        str(name(args.type), ": array ", i, " of the list is not on device ", clique.devices[i]));
  }
  // Before anything is enqueued or compared: the other ranks must not wait for an operation that this rank refuses.
  refuse_capture(name(args.type), *options_.gpu, buffer);
  if (buffer.dtype != args.dtype || buffer.count != args.count * times) {
    throw InvalidArgumentError(str(name(args.type), ": array ", i, " has ", buffer.count, " ",
                                   samestep::name(buffer.dtype), " where ", args.count * times, " ",
                                   samestep::name(args.dtype), " are needed"));
  }
}

int DeviceCliques::size_of(const Clique& clique) const {
  return static_cast<int>(clique.devices.size()) * host_->size();
}

int DeviceCliques::member(const Clique& clique, int root, int root_array) const {
  const int n_here = static_cast<int>(clique.devices.size());
  checks::root_in_group("a list of arrays", root, host_->size());
  if (root_array < 0 || root_array >= n_here) {
    throw InvalidArgumentError(str("root_array ", root_array, " is outside the list of ", n_here, " arrays"));
  }
  return root * n_here + root_array;
}

Communicator::WorkPtr DeviceCliques::launch(const Clique& clique, const CliqueArgs& args, std::vector<Part> parts,
                                            std::size_t nbytes) {
  if (parts.size() != clique.devices.size()) throw InvalidArgumentError(str(name(args.type), ": an empty list"));
  NcclLaunch launch;
  launch.what = str(name(args.type), " of ", args.count, " ", samestep::name(args.dtype), " on each of ", args.length,
                    " devices of every rank");
  std::vector<Calls> calls;
  for (Part& part : parts) {
    launch.after.push_back(std::move(part.after));
    calls.push_back(std::move(part.calls));
  }
  NcclComm& channel = *clique.channel;
  channel.prepare();
  launch.calls = together(channel, std::move(calls));
  launch.signature_check = check_signature(args);
  ++n_launched_;
  n_launched_bytes_ += nbytes;
  return channel.launch(std::move(launch));
}

Communicator::WorkPtr DeviceCliques::allreduce(int number, std::span<const InOut> buffers, const Reduction& reduction) {
  const Clique on = clique(number);
  const ConstBuffer first = buffers.empty() ? ConstBuffer{} : buffers[0].in;
  const CliqueArgs args{CollectiveType::allreduce, first.dtype, reduction, 0, buffers.size(), first.count, number};
  require_reducible(first.dtype, reduction);
  const auto form = to_nccl_reduction(first.dtype, reduction, size_of(on));
  if (!form) throw InvalidArgumentError("allreduce: NCCL has no such reduction");
  std::vector<Part> parts;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    check(on, args, i, buffers[i].in);
    check(on, args, i, buffers[i].out);
    const bool overlaps = overwrites_input({.type = args.type, .in = buffers[i].in, .out = buffers[i].out}, 0);
    if (overlaps) refuse_overlap(args.type, i, "its output");
    parts.push_back({{buffers[i].in.stream, buffers[i].out.stream},
                     nccl_calls::all_reduce(on.channel->nccl(), *form, reduction, {buffers[i]})});
  }
  return launch(on, args, std::move(parts), first.nbytes() * buffers.size());
}

Communicator::WorkPtr DeviceCliques::reduce(int number, std::span<const ConstBuffer> in, Buffer out,
                                            const Reduction& reduction, int root, int root_array) {
  const Clique on = clique(number);
  const ConstBuffer first = in.empty() ? ConstBuffer{} : in[0];
  const CliqueArgs args{
      CollectiveType::reduce, first.dtype, reduction, root, in.size(), first.count, number, root_array};
  require_reducible(first.dtype, reduction);
  const auto form = to_nccl_reduction(first.dtype, reduction, size_of(on));
  if (!form) throw InvalidArgumentError("reduce: NCCL has no such reduction");
  const int to = member(on, root, root_array);
  std::vector<Part> parts;
  for (std::size_t i = 0; i < in.size(); ++i) {
    check(on, args, i, in[i]);
    // Off root NCCL ignores the output, and the caller need not have one.
    const bool gets = root == host_->rank() && i == static_cast<std::size_t>(root_array);
    const Buffer into = gets ? out : Buffer{};
    if (gets) {
      check(on, args, i, into);
      if (overwrites_input({.type = args.type, .in = in[i], .out = into, .root = 0}, 0)) {
        refuse_overlap(args.type, i, "the output");
      }
    }
    parts.push_back(
        {{in[i].stream, into.stream}, nccl_calls::reduce(on.channel->nccl(), *form, reduction, in[i], into, to)});
  }
  return launch(on, args, std::move(parts), first.nbytes() * in.size());
}

Communicator::WorkPtr DeviceCliques::bcast(int number, std::span<const Buffer> buffers, int root, int root_array) {
  const Clique on = clique(number);
  const Buffer first = buffers.empty() ? Buffer{} : buffers[0];
  const CliqueArgs args{CollectiveType::bcast, first.dtype, {}, root, buffers.size(), first.count, number, root_array};
  const int from = member(on, root, root_array);
  std::vector<Part> parts;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    check(on, args, i, buffers[i]);
    parts.push_back({{buffers[i].stream}, nccl_calls::broadcast(on.channel->nccl(), std::vector{buffers[i]}, from)});
  }
  return launch(on, args, std::move(parts), first.nbytes() * buffers.size());
}

Communicator::WorkPtr DeviceCliques::allgather(int number, std::span<const ConstBuffer> in,
                                               std::span<const std::vector<Buffer>> outs) {
  const Clique on = clique(number);
  const ConstBuffer first = in.empty() ? ConstBuffer{} : in[0];
  const auto n_members = static_cast<std::size_t>(size_of(on));
  const std::size_t n_pieces = outs.empty() ? 0 : outs[0].size();
  const CliqueArgs args{CollectiveType::allgather, first.dtype, {}, 0, in.size(), first.count, number,
                        static_cast<int>(n_pieces)};
  if (outs.size() != in.size() || (n_pieces != 1 && n_pieces != n_members)) {
    throw InvalidArgumentError(str("allgather: results are received in one buffer or ", n_members));
  }
  std::vector<Part> parts;
  for (std::size_t i = 0; i < in.size(); ++i) {
    check(on, args, i, in[i]);
    std::vector<StreamHandle> after{in[i].stream};
    for (const Buffer& out : outs[i]) {
      check(on, args, i, out, n_members / n_pieces);
      after.push_back(out.stream);
    }
    const NcclLibrary& nccl = on.channel->nccl();
    const int mine = member(on, host_->rank(), static_cast<int>(i));
    if (n_pieces == 1) {
      if (overwrites_input({.type = args.type, .in = in[i], .out = outs[i][0]}, mine)) {
        refuse_overlap(args.type, i, "its output");
      }
    } else {
      std::vector<MemoryRange> used;
      for (const Buffer& out : outs[i]) used.push_back({out.data, out.nbytes()});
      const bool in_place = in[i].data == outs[i][static_cast<std::size_t>(mine)].data;
      if (!in_place) used.push_back({in[i].data, in[i].nbytes(), /*written=*/false});
      if (find_conflict(used)) refuse_overlap(args.type, i, "its outputs, or these with each other");
    }
    parts.push_back({std::move(after), n_pieces == 1 ? nccl_calls::all_gather(nccl, in[i], outs[i][0])
                                                     : gather_pieces(nccl, mine, in[i], outs[i])});
  }
  return launch(on, args, std::move(parts), first.nbytes() * n_members * in.size());
}

// ---- the end

void DeviceCliques::close(const Deadline& deadline) {
  for (const Clique& open : cliques()) open.channel->close(deadline);
}

void DeviceCliques::abandon(const std::exception_ptr& error) {
  for (const Clique& open : cliques()) open.channel->abandon(error);
}

void DeviceCliques::wait_for_device(const Deadline& deadline) const {
  for (const Clique& open : cliques()) open.channel->wait_for_device(deadline);
}

}  // namespace samestep
