#include "device/device_communicator.h"

#include <numeric>
#include <tuple>
#include <utility>

#include "communicator/checks.h"
#include "core/error.h"
#include "core/format.h"
#include "device/host_path.h"
#include "device/nccl_path.h"
#include "device/refusal.h"
#include "gpu/capture.h"
#include "process/user_call.h"
#include "waiting/await.h"

namespace samestep {

namespace {

constexpr Seconds kForDevice{1.0};  // to leave memory of operations that have been given up

bool in_host_memory(const ConstBuffer& buffer) { return buffer.device.kind == DeviceKind::cpu; }

/// Checks the arrays of an operation and starts it without the GIL: a call of the GPU runtime may block, as one that
/// enqueues does while the device's queue is full. Once for both, since another thread may keep the GIL for long.
template <class Start>
Communicator::WorkPtr without_gil(Start start) {
  Communicator::WorkPtr work;
  wait_hooks().run_without_gil([&] { work = start(); });
  return work;
}

}  // namespace

DeviceCommunicator::DeviceCommunicator(std::shared_ptr<Communicator> host, DeviceOptions options)
    : Communicator({host->rank(), host->size(), host->name(), host->transport(), host->oversubscribed(),
                    host->max_inline(), /*needs_host_memory=*/false}),
      host_(std::move(host)),
      options_(std::move(options)) {}

DeviceCommunicator::~DeviceCommunicator() = default;

std::shared_ptr<DeviceCommunicator> DeviceCommunicator::open(std::shared_ptr<Communicator> host, DeviceOptions options,
                                                             const Deadline& deadline, NcclStart start) {
  // A process that was forked from this one has none of its threads, nor the device: it drops the group as it is.
  const auto destroy = [](const DeviceCommunicator* dropped) {
    if (dropped->owner_.is_this()) delete dropped;
  };
  std::shared_ptr<DeviceCommunicator> made(new DeviceCommunicator(std::move(host), std::move(options)), destroy);
  std::vector<int> ranks(static_cast<std::size_t>(made->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  // Staged collectives start on the host later than they are called. In the group of host arrays their order among the
  // other collectives would differ between ranks, so they have a group of their own, as comparisons beside NCCL have.
  // To the user all three are one group.
  made->through_host_ = made->host_->group(ranks, deadline, made->host_->name());
  made->signature_check_ = made->host_->group(ranks, deadline, made->host_->name());
  // Ranks may be set up differently. Whether any of them hands device memory to MPI decides into how many operations
  // all of them divide a call, so they agree on it here.
  std::uint8_t gpu_aware = made->options_.gpu_aware ? 1 : 0;
  if (made->host_->transport() == "mpi") {
    const Buffer flag{&gpu_aware, 1, DType::uint8};
    made->signature_check_
        ->start({.type = CollectiveType::allreduce,
                 .in = flag,
                 .out = flag,
                 .reduction = {ReduceOp::max, 1.0},
                 .shape = Shape::flat(1)})
        ->wait(deadline);
  }
  made->options_.some_are_gpu_aware = gpu_aware != 0;
  made->staged_ = std::make_unique<HostPath>(made->host_, made->through_host_, made->options_);
  std::shared_ptr<NcclComm> comm;
  if (made->options_.nccl != nullptr) {
    NcclComm::Options of{made->options_.gpu, made->options_.nccl, made->options_.device, made->options_.timeout, made};
    comm = start == NcclStart::now ? NcclComm::open(std::move(of), made->host_, made->signature_check_, deadline)
                                   : NcclComm::make(std::move(of), made->host_, made->signature_check_);
    made->nccl_ = std::make_unique<NcclPath>(comm, made->rank(), made->size());
  }
  if (made->size() > 1) {
    made->mixed_.emplace(made->signature_check_);
    register_progress_source(made);
  }
  return made;
}

// ---- which memory

Device DeviceCommunicator::check_here(std::string_view verb, ConstBuffer buffer, CallStreams& streams) const {
  if (buffer.device.kind != options_.gpu->kind()) {
    if (in_host_memory(buffer)) {
      throw InvalidArgumentError(
          str(verb, ": one array is in host memory and the other in device memory; move one of them to the other's"));
    }
    throw UnavailableError(str(verb, ": the array is not on a device that this group reaches with ",
                               options_.gpu->path(), "; move it to host memory first"));
  }
  // An array without elements has no address to ask about.
  if (buffer.device.index < 0)
    buffer.device.index = buffer.count == 0 ? options_.device : require_device(verb, *options_.gpu, buffer);
  if (buffer.device.index != options_.device) {
    throw InvalidArgumentError(str(verb, ": the array is on device ", buffer.device.index, ", but rank ", rank(),
                                   " of group '", name(), "' uses device ", options_.device,
                                   "; make it there, or choose devices in initialize()"));
  }
  streams.add(buffer);
  return buffer.device;
}

void DeviceCommunicator::check_arrays(std::span<const std::string> verbs, std::span<const ConstBuffer> buffers) const {
  CallStreams streams(*options_.gpu);
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    check_here(verbs[i], buffers[i], streams);
    streams.refuse_capture(verbs[i], nccl_ != nullptr);
  }
}

NcclLaunch::Where DeviceCommunicator::where_of(const CallStreams& streams) {
  return streams.captured() ? NcclLaunch::Where::captured : NcclLaunch::Where::own_stream;
}

bool DeviceCommunicator::is_on_host(const CollectiveArgs& args) const {
  return (!args.uses_in(rank()) || in_host_memory(args.in)) && (!args.uses_out(rank()) || in_host_memory(args.out));
}

// ---- operations

// The choice depends on type, dtype and operator alone. Where ranks agree on those, all make the same choice.
bool DeviceCommunicator::takes_nccl(const CollectiveArgs& args) const { return nccl_ != nullptr && nccl_->has(args); }

CallStreams DeviceCommunicator::check_used(CollectiveArgs& args, bool joins) {
  const std::string_view verb = samestep::name(args.type);
  const DType dtype = args.own().dtype;
  CallStreams streams(*options_.gpu);
  const auto check = [&](auto& buffer, bool used) {
    // What the caller passed where it is not used is ignored, but what ranks compare needs the dtype.
    if (!used) buffer = {nullptr, 0, dtype};
    if (used) buffer.device = check_here(verb, buffer, streams);
  };
  check_or_tell(args, [&] {
    check(args.in, args.uses_in(rank()));
    check(args.out, args.uses_out(rank()));
    streams.refuse_capture(verb, joins);
  });
  return streams;
}

Communicator::WorkPtr DeviceCommunicator::start_collective(const CollectiveArgs& given) {
  if (is_on_host(given)) return Inner{*host_}.start_collective(given);
  return without_gil([&] {
    CollectiveArgs args = given;
    const bool by_nccl = takes_nccl(args);
    const CallStreams streams = check_used(args, /*joins=*/by_nccl);
    return by_nccl ? nccl_->start(args, where_of(streams)) : staged_->start(args);
  });
}

bool DeviceCommunicator::run_collective_in_stream(const CollectiveArgs& given, WorkPtr& launching) {
  if (is_on_host(given) || !takes_nccl(given)) return false;
  bool runs = false;
  wait_hooks().run_without_gil([&] {
    CollectiveArgs args = given;
    const CallStreams streams = check_used(args, /*joins=*/true);
    runs = streams.is_one();
    if (!runs) return;
    launching = nccl_->run(args, streams.captured() ? NcclLaunch::Where::captured : NcclLaunch::Where::in_stream);
  });
  return runs;
}

template <class Check>
void DeviceCommunicator::check_or_tell(const CollectiveArgs& args, Check check) {
  try {
    check();
  } catch (const Error& error) {
    const std::exception_ptr kind = std::current_exception();
    if (is_a<InvalidArgumentError>(kind) || is_a<UnavailableError>(kind))
      tell_refusal(args, samestep::name(args.type), error.what());
    throw;
  }
}

void DeviceCommunicator::tell_refusal(const CollectiveArgs& args, std::string_view verb, std::string_view why) {
  if (size() == 1 || !owner_.is_this()) return;
  refusal::tell(refusal::text(verb, why),
                [&](auto& works) { takes_nccl(args) ? nccl_->refuse() : works.push_back(staged_->start_refusal()); });
}

Communicator::WorkPtr DeviceCommunicator::run_collective(const CollectiveArgs& args) {
  return is_on_host(args) ? Inner{*host_}.run_collective(args) : start_collective(args);
}

Communicator::WorkPtr DeviceCommunicator::start_send(const SendArgs& args) {
  // `Inner`, because the arguments have been checked already.
  WorkPtr staged = start_unless_on_host(args);
  return staged != nullptr ? staged : Inner{*host_}.start_send(args);
}

template <class Message, class Elements>
Communicator::WorkPtr DeviceCommunicator::start_staged(std::string_view verb, Message args,
                                                       Elements Message::* elements) {
  return without_gil([&] {
    CallStreams streams(*options_.gpu);
    (args.*elements).device = check_here(verb, args.*elements, streams);
    streams.refuse_capture(verb);
    return staged_->start(args);
  });
}

Communicator::WorkPtr DeviceCommunicator::start_unless_on_host(const SendArgs& args) {
  if (!args.is_object && !in_host_memory(args.in)) return start_staged("send", args, &SendArgs::in);
  // A message of device memory starts once it is on the host, and one of host memory must not overtake it.
  // In a process that was forked the host's group raises the error.
  if (!staged_->staging().sends_are_pending() || !owner_.is_this()) return nullptr;
  return without_gil([&]() -> WorkPtr {
    return staged_->staging().has_unstarted_send(args.dest, args.tag) ? staged_->start_behind(args) : nullptr;
  });
}

Communicator::WorkPtr DeviceCommunicator::start_recv(const RecvArgs& args) {
  return in_host_memory(args.out) ? Inner{*host_}.start_recv(args) : start_staged("recv", args, &RecvArgs::out);
}

Communicator::WorkPtr DeviceCommunicator::run_send(const SendArgs& args) {
  WorkPtr staged = start_unless_on_host(args);
  return staged != nullptr ? staged : Inner{*host_}.run_send(args);
}

Communicator::WorkPtr DeviceCommunicator::run_recv(const RecvArgs& args, Status& status) {
  return in_host_memory(args.out) ? Inner{*host_}.run_recv(args, status) : start_recv(args);
}

Communicator::WorkPtr DeviceCommunicator::start_many(CollectiveArgs args, std::vector<InOut> buffers) {
  const std::string_view verb = samestep::name(args.type);
  if (args.type == CollectiveType::bcast) checks::root_in_group(verb, args.root, size());
  if (!buffers.empty()) std::tie(args.in, args.out) = std::tie(buffers[0].in, buffers[0].out);
  if (buffers.empty() || !takes_nccl(args)) throw InvalidArgumentError(str(verb, "_many: not for NCCL"));
  return without_gil([&] {
    CallStreams streams(*options_.gpu);
    check_or_tell(args, [&] {
      for (auto& [in, out] : buffers) {
        out.device = check_here(verb, out, streams);
        if (!reduces(args.type)) continue;
        in.device = check_here(verb, in, streams);
        checks::same_dtype(verb, in, out);
        checks::same_dtype(verb, args.in, out);
        checks::has_count(verb, "out", out, in.count);
      }
      streams.refuse_capture(verb, /*joins=*/true);
    });
    return nccl_->start_many(args, std::move(buffers), where_of(streams));
  });
}

Communicator::Counters DeviceCommunicator::counters() const {
  Counters sum = host_->counters();
  const Counters staged = through_host_->counters();
  sum.operations += staged.operations;
  sum.messages += staged.messages;
  sum.bytes += staged.bytes;
  if (nccl_ != nullptr) {
    sum.operations += nccl_->n_launched();
    sum.bytes += nccl_->n_launched_bytes();
  }
  return sum;
}

// ---- groups, and the end

std::shared_ptr<Communicator> DeviceCommunicator::wrap(std::shared_ptr<Communicator> child,
                                                       const Deadline& deadline) const {
  return child == nullptr ? nullptr : open(std::move(child), options_, deadline, NcclStart::at_first_use);
}

std::shared_ptr<Communicator> DeviceCommunicator::split(int color, int key, const Deadline& deadline,
                                                        const std::string& called) {
  return wrap(host_->split(color, key, deadline, called), deadline);
}

std::shared_ptr<Communicator> DeviceCommunicator::group(std::span<const int> ranks, const Deadline& deadline,
                                                        const std::string& called) {
  return wrap(host_->group(ranks, deadline, called), deadline);
}

void DeviceCommunicator::advance() {
  if (!mixed_ || !owner_.is_this() || is_looking_.exchange(true)) return;
  const std::unique_ptr<std::atomic<bool>, void (*)(std::atomic<bool>*)> looking(&is_looking_,
                                                                                 [](auto* flag) { *flag = false; });
  try {
    const auto called = [this] {
      MixedCalls::Counts counts{host_->counters().collectives, staged_->n_called()};
      if (nccl_ != nullptr)
        counts[MixedCalls::nccl] = nccl_->comm()->is_over() ? MixedCalls::kEnded : nccl_->n_launched();
      counts[MixedCalls::close] = has_been_closed_ ? 1 : 0;
      return counts;
    };
    const std::optional<MixedCalls::Found> found = mixed_->look(called());
    if (!found) return;
    // In the place of what only others have called. So all learn of it as of a refusal, and where groups go on, this
    // one does.
    refusal::tell(found->text, [&](auto& works) {
      const MixedCalls::Counts now = called();
      const auto behind = [&](MixedCalls::Path path) {
        return found->most[path] - std::min(now[path], found->most[path]);
      };
      for (auto n = behind(MixedCalls::host); n > 0; --n) works.push_back(host_->start(refusal::args()));
      for (auto n = behind(MixedCalls::staged); n > 0; --n) works.push_back(staged_->start_refusal());
      for (auto n = behind(MixedCalls::nccl); n > 0; --n) nccl_->refuse();
    });
  } catch (const Error&) {  // the group ends: whoever waits in it throws that
  }
}

void DeviceCommunicator::close(const Deadline& deadline) {
  has_been_closed_ = true;
  // Staged operations have no thread: they end only because this loop advances them.
  await([this] { return staged_->staging().idle(); },
        [&](Seconds) {
          if (deadline.passed()) throw TimeoutError(str("close: operations of group '", name(), "' are pending"));
        });
  // NCCL communicators first: they meet the other ranks in `signature_check_` before they are destroyed.
  if (nccl_ != nullptr) nccl_->comm()->close(deadline);
  // Before the others: a rank that was refused alone, in a staged operation, learns there that nobody makes its call.
  through_host_->close(deadline);
  signature_check_->close(deadline);
  host_->close(deadline);
  if (nccl_ == nullptr) return;
  if (const std::exception_ptr error = nccl_->comm()->unheard()) std::rethrow_exception(error);
}

void DeviceCommunicator::abandon_devices(const std::exception_ptr& error) {
  if (nccl_ != nullptr) nccl_->comm()->abandon(error);
  staged_->staging().abandon(error);
}

void DeviceCommunicator::abandon(std::exception_ptr error, const std::string& reason) {
  // First, so that pending operations on devices end with this error, not with what they would notice of the groups'
  // end.
  abandon_devices(error);
  for (const auto& group : {signature_check_, through_host_, host_}) group->abandon(error, reason);
}

void DeviceCommunicator::revoke(const std::string& why, std::uint64_t block) {
  abandon_devices(std::make_exception_ptr(StepError(why)));
  for (const auto& group : {signature_check_, through_host_, host_}) group->membership().revoke(why, block);
}

/// The signature-check group holds no caller memory, so we need not wait for it.
bool DeviceCommunicator::discard() {
  signature_check_->membership().discard();
  const bool collectives = through_host_->membership().discard();
  const bool messages = host_->membership().discard();
  if (!collectives || !messages) return false;
  staged_->staging().release_retained();
  wait_hooks().run_without_gil([this] {
    const Deadline deadline = Deadline::after(kForDevice);
    if (nccl_ != nullptr) nccl_->comm()->wait_for_device(deadline);
  });
  return true;
}

bool DeviceCommunicator::is_discarded() const {
  return host_->membership().is_discarded() && through_host_->membership().is_discarded();
}

void DeviceCommunicator::announce_block_end(std::uint64_t block) {
  // To all: a rank may wait for this one in a collective of host arrays, in a staged one, or in one of NCCL.
  for (const auto& group : {signature_check_, through_host_, host_}) group->membership().announce_block_end(block);
}

void DeviceCommunicator::apply(const GroupSettings& settings) {
  for (const auto& group : {host_, through_host_, signature_check_}) group->configure(settings);
}

}  // namespace samestep
