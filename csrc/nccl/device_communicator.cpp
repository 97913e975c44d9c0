#include "nccl/device_communicator.h"

#include <numeric>

#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "exchange/waiting.h"
#include "nccl/device_cliques.h"
#include "nccl/device_detail.h"

namespace samestep {

namespace {

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
  if (made->options_.gpu_aware) made->reach_memory_by_address();
  made->packing_ = std::make_unique<DevicePacking>(made->options_.gpu, made->options_.device, made->options_.packer,
                                                   made->options_.pack_below);
  if (made->options_.nccl != nullptr) {
    NcclChannel::Options channel{made->options_.gpu, made->options_.nccl, made->options_.device,
                                 made->options_.timeout};
    made->channel_ = NcclChannel::open(std::move(channel), made->host_, made->agreement_, deadline);
  }
  if (made->channel_ != nullptr && made->options_.compare_first) {
    made->compared_ = ComparedLaunches::make(made->channel_);
  }
  made->cliques_ = DeviceCliques::make(made->host_, made->agreement_, made->options_, made->channel_, made->compared_);
  return made;
}

DeviceCommunicator::~DeviceCommunicator() = default;

// ---- what is where

void DeviceCommunicator::check_here(std::string_view verb, ConstBuffer& buffer) const {
  if (buffer.device.kind != options_.gpu->kind()) {
    if (device_detail::on_host(buffer)) {
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

Communicator::WorkPtr DeviceCommunicator::on_device(NcclLaunch launch, std::size_t nbytes) {
  agreement_->progress();
  ++n_launched_;
  if (size() > 1) n_launched_bytes_ += nbytes;
  return compared_ != nullptr ? compared_->add(std::move(launch)) : channel_->launch(std::move(launch));
}

Communicator::Counters DeviceCommunicator::counters() const {
  Counters sum = host_->counters();
  const Counters staged = through_host_->counters();
  sum.operations += staged.operations + n_launched_ + cliques_->n_launched();
  sum.messages += staged.messages;
  sum.bytes += staged.bytes + n_launched_bytes_ + cliques_->n_launched_bytes();
  return sum;
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
  if (compared_ != nullptr) compared_->advance();
  host_->progress();
}

void DeviceCommunicator::close(const Deadline& deadline) {
  Pause pause(/*oversubscribed=*/true);
  while (!stager_->idle() || (compared_ != nullptr && !compared_->idle())) {
    if (deadline.passed()) throw TimeoutError(str("close: operations of group '", name(), "' are under way"));
    if (pause.step()) wait_hooks().interrupt();
  }
  cliques_->close(deadline);
  if (channel_ != nullptr) channel_->close(deadline);
  agreement_->close(deadline);
  through_host_->close(deadline);
  host_->close(deadline);
}

void DeviceCommunicator::abandon(std::exception_ptr error, const std::string& reason) {
  cliques_->abandon(error);
  if (channel_ != nullptr) channel_->abandon(error);
  if (compared_ != nullptr) compared_->abandon(error);
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
