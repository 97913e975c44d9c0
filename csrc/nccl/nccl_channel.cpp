#include "nccl/nccl_channel.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "exchange/engine.h"
#include "exchange/waiting.h"

namespace samestep {
namespace {

constexpr std::chrono::milliseconds kLookEvery{2};
constexpr Seconds kLookAtPeersAfter{0.05};  // an operation that takes longer may wait for one that has gone
constexpr Seconds kGrace{1.0};  // for the host to learn who has gone, when NCCL only knows that somebody has

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown error";
  }
}

bool is_mismatch(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const MismatchError&) {
    return true;
  } catch (...) {
    return false;
  }
}

struct Invitation {
  nccl_abi::UniqueId id;
  std::array<char, 384> failed{};  // why there is no id
};

}  // namespace

std::exception_ptr NcclChannel::lost_peer() {
  agreement_->look_for_losses();
  for (const Communicator::WorkPtr& receive : alive_) {
    if (!receive->done() || !receive->error()) continue;
    const std::string text = text_of(receive->error()), about_receive = "): ";
    const std::size_t cut = text.find(about_receive);
    const std::string who = cut == std::string::npos ? text : text.substr(cut + about_receive.size());
    return std::make_exception_ptr(PeerLostError(str("device operations of group '", host_->name(), "': ", who)));
  }
  return nullptr;
}

struct NcclChannel::Operation {
  Operation(NcclLaunch launch, std::uint64_t number, const Deadline& until, std::unique_ptr<GpuEvent> at_end)
      : what(std::move(launch.what)),
        sequence(number),
        deadline(until),
        end(std::move(at_end)),
        agreement(std::move(launch.agreement)),
        memory(std::move(launch.memory)) {}

  std::string what;
  std::uint64_t sequence;
  Clock::time_point started = Clock::now();
  Deadline deadline;
  std::unique_ptr<GpuEvent> end;
  Communicator::WorkPtr agreement;
  std::vector<std::shared_ptr<void>> memory;
  std::exception_ptr error = nullptr;  // set before `ended`
  std::atomic<bool> ended = false;

  void finish(std::exception_ptr with) {
    if (ended) return;
    error = std::move(with);
    ended = true;
  }
};

std::exception_ptr NcclChannel::cause_on_host() {
  for (const auto& operation : under_way_) {
    const bool differs = operation->agreement && operation->agreement->done() && operation->agreement->error();
    if (differs) return operation->agreement->error();
  }
  return lost_peer();
}

class NcclChannel::NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclChannel> channel, std::shared_ptr<Operation> operation)
      : channel_(std::move(channel)), operation_(std::move(operation)) {}

  bool done() override {
    if (operation_->ended) return true;
    const std::unique_lock lock(channel_->mutex_, std::try_to_lock);
    if (!lock) return false;  // others look; whoever polls may hold the interpreter, which they may need
    channel_->trouble(*operation_, Clock::now());
    return operation_->ended;
  }

  void wait(const Deadline& deadline) override {
    Pause pause(/*oversubscribed=*/true);
    bool warned = false;
    while (!done()) {
      if (!pause.step()) continue;
      wait_hooks().interrupt();
      Engine::progress_everywhere();
      if (!warned && pause.waited().count() > wait_hooks().warn_after_s) {
        warned = true;
        wait_hooks().warn(operation_->what + " is still waited for");
      }
      if (deadline.passed() && !done()) throw_late(deadline);
    }
    if (operation_->error) std::rethrow_exception(operation_->error);
  }

  bool order_before(StreamHandle stream, const Deadline&) override {
    if (operation_->ended && operation_->error) std::rethrow_exception(operation_->error);
    const OnDevice on(channel_->gpu(), channel_->options_.device);
    operation_->end->hold(reinterpret_cast<GpuLibrary::Stream>(stream));
    return true;
  }

  std::exception_ptr error() const override { return operation_->ended ? operation_->error : nullptr; }

 private:
  [[noreturn]] void throw_late(const Deadline& deadline) const {
    std::string missing;
    if (operation_->agreement != nullptr && !operation_->agreement->done()) {
      try {
        operation_->agreement->wait(deadline);  // which has passed: it says who is missing
      } catch (const TimeoutError& error) {
        missing = str(": ", error.what());
      }
    }
    std::rethrow_exception(channel_->late(*operation_, deadline, missing));
  }

  std::shared_ptr<NcclChannel> channel_;
  std::shared_ptr<Operation> operation_;
};

NcclChannel::NcclChannel(Options options, std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> agreement)
    : options_(std::move(options)), host_(std::move(host)), agreement_(std::move(agreement)) {
  const OnDevice on(gpu(), options_.device);
  stream_ = std::make_unique<GpuStream>(options_.gpu);
}

std::shared_ptr<NcclChannel> NcclChannel::open(Options options, std::shared_ptr<Communicator> host,
                                               std::shared_ptr<Communicator> agreement, const Deadline& deadline) {
  std::shared_ptr<NcclChannel> channel(new NcclChannel(std::move(options), std::move(host), std::move(agreement)));
  try {
    channel->begin(deadline);
  } catch (...) {
    channel->fail(std::current_exception(), /*tell=*/true);
    throw;
  }
  channel->watcher_ = std::thread([raw = channel.get()] { raw->watch(); });
  return channel;
}

void NcclChannel::begin(const Deadline& deadline) {
  const OnDevice on(gpu(), options_.device);
  for (int peer = 0; peer < host_->size(); ++peer) {
    if (peer != host_->rank()) alive_.push_back(agreement_->recv({&never_, 1, DType::uint8}, peer, 0));
  }
  Invitation invitation;
  if (host_->rank() == 0) {
    try {
      invitation.id = nccl().unique_id();
    } catch (const Error& error) {
      std::strncpy(invitation.failed.data(), error.what(), invitation.failed.size() - 1);
    }
  }
  const Buffer sent{&invitation, sizeof invitation, DType::uint8};
  agreement_->broadcast(sent, 0, Shape::flat(sent.count))->wait(deadline);
  if (invitation.failed[0] != '\0') throw Error(str("NCCL does not start on rank 0: ", invitation.failed.data()));
  comm_ = nccl().init(host_->size(), invitation.id, host_->rank());
  settle("start NCCL", deadline);
  agreement_->barrier()->wait(deadline);
}

void NcclChannel::settle(const char* act, const Deadline& deadline) {
  Pause pause(/*oversubscribed=*/true);
  for (int state = nccl().state(comm_); state != nccl_abi::kSuccess; state = nccl().state(comm_)) {
    if (state != nccl_abi::kInProgress) {
      if (const std::exception_ptr lost = lost_peer()) std::rethrow_exception(lost);
      throw Error(str(act, " in group '", host_->name(), "': ", nccl().explain(state, comm_)));
    }
    if (!pause.step()) continue;
    if (const std::exception_ptr lost = lost_peer()) std::rethrow_exception(lost);
    if (deadline.passed()) {
      throw TimeoutError(str(act, " in group '", host_->name(), "': NCCL has not come to an end after ",
                             deadline.timeout().count(), " s, on this or another rank"));
    }
    wait_hooks().interrupt();
  }
}

void NcclChannel::throw_if_broken() const {
  if (broken_) std::rethrow_exception(broken_);
  if (comm_ == nullptr) {
    throw NotInitializedError(
        str("group '", host_->name(), "' is closed: call samestep.initialize() again to start anew"));
  }
}

std::shared_ptr<Work> NcclChannel::launch(NcclLaunch launch) {
  const std::lock_guard lock(mutex_);
  throw_if_broken();
  const OnDevice on(gpu(), options_.device);
  const Deadline deadline = Deadline::after(options_.timeout);
  auto end = std::make_unique<GpuEvent>(options_.gpu);
  order_after(options_.gpu, stream_->get(), launch.after);
  try {
    launch.calls(comm_, stream_->get());
    settle(launch.what.c_str(), deadline);
    for (const auto& calls : launch.then) {
      calls(comm_, stream_->get());
      settle(launch.what.c_str(), deadline);
    }
  } catch (...) {  // other ranks may have begun it
    fail(std::current_exception(), /*tell=*/true);
    throw;
  }
  end->record(stream_->get());
  auto operation = std::make_shared<Operation>(std::move(launch), sequence_++, deadline, std::move(end));
  under_way_.push_back(operation);
  changed_.notify_all();
  return std::make_shared<NcclWork>(shared_from_this(), std::move(operation));
}

std::exception_ptr NcclChannel::late(const Operation& operation, const Deadline& deadline, const std::string& missing) {
  const std::string text = str(operation.what, " (device operation ", operation.sequence, " of group '", host_->name(),
                               "') has not ended after ", deadline.timeout().count(), " s: ");
  if (operation.agreement == nullptr) {
    return std::make_exception_ptr(TimeoutError(text + "the device has not finished it, or not all ranks have come"));
  }
  if (operation.agreement->done() && !operation.agreement->error()) {  // who waits for it may have given it up
    return std::make_exception_ptr(
        TimeoutError(text + "all ranks have started it, but the device has not finished it"));
  }
  return std::make_exception_ptr(TimeoutError(text + "not all ranks have come to it" + missing));
}

std::exception_ptr NcclChannel::trouble(Operation& operation, Clock::time_point now) {
  if (operation.ended || comm_ == nullptr) return operation.error;
  const bool agreed = operation.agreement == nullptr || operation.agreement->done();
  if (agreed && operation.agreement != nullptr && operation.agreement->error()) return operation.agreement->error();
  if (agreed && operation.end->happened()) {
    if (const int state = nccl().state(comm_); state == nccl_abi::kSuccess || state == nccl_abi::kInProgress) {
      operation.finish(nullptr);
    }
    return nullptr;
  }
  if (operation.deadline.passed()) return late(operation, operation.deadline, "");
  if (now - operation.started < kLookAtPeersAfter) return nullptr;
  return lost_peer();
}

void NcclChannel::look() {
  const std::lock_guard lock(mutex_);
  if (broken_ || comm_ == nullptr) return;
  const OnDevice on(gpu(), options_.device);
  const Clock::time_point now = Clock::now();
  try {
    if (const int state = nccl().state(comm_); state != nccl_abi::kSuccess && state != nccl_abi::kInProgress) {
      const std::string text = str("NCCL in group '", host_->name(), "': ", nccl().explain(state, comm_));
      // NCCL only knows that something is wrong; the host soon knows what.
      std::exception_ptr cause = cause_on_host();
      for (const Deadline grace = Deadline::after(kGrace); !cause && !grace.passed(); cause = cause_on_host()) {
        std::this_thread::sleep_for(kLookEvery);
      }
      fail(cause ? cause : std::make_exception_ptr(Error(text)), /*tell=*/!cause || !is_mismatch(cause));
      return;
    }
    for (const auto& operation : under_way_) {
      if (const std::exception_ptr error = trouble(*operation, now)) {
        fail(error, /*tell=*/!is_mismatch(error));
        return;
      }
    }
  } catch (const Error&) {  // of the runtime: the device is lost
    fail(std::current_exception(), /*tell=*/true);
    return;
  }
  under_way_.remove_if([](const auto& operation) { return operation->ended.load(); });
}

void NcclChannel::watch() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return ending_ || broken_ || !under_way_.empty(); });
      if (ending_ || broken_) break;
    }
    look();
    std::this_thread::sleep_for(kLookEvery);
  }
  NcclLibrary::Comm comm = nullptr;
  std::list<std::shared_ptr<Operation>> ended;
  {
    const std::lock_guard lock(mutex_);
    if (!broken_) return;
    std::swap(comm, comm_);
    std::swap(ended, under_way_);
  }
  if (comm != nullptr) nccl().abort(comm);
  for (const auto& operation : ended) operation->memory.clear();  // only now does the device use it no more
}

void NcclChannel::fail(std::exception_ptr error, bool tell) {
  if (broken_) return;
  broken_ = error;
  for (const auto& operation : under_way_) operation->finish(error);
  changed_.notify_all();
  if (!watcher_.joinable() && comm_ != nullptr) {
    nccl().abort(comm_);
    comm_ = nullptr;
  }
  if (!tell) return;
  const std::string reason = text_of(error);
  agreement_->abandon(error, reason);
  host_->abandon(error, reason);
}

void NcclChannel::abandon(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  fail(std::move(error), /*tell=*/false);
}

void NcclChannel::stop() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
}

void NcclChannel::close(const Deadline& deadline) {
  Pause pause(/*oversubscribed=*/true);
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (broken_ || comm_ == nullptr || under_way_.empty()) break;
    }
    if (deadline.passed()) throw TimeoutError(str("close: operations of group '", host_->name(), "' are under way"));
    if (pause.step()) wait_hooks().interrupt();
  }
  if (!broken_ && comm_ != nullptr) {
    try {
      agreement_->barrier()->wait(deadline);  // others may still need this rank's part
    } catch (const Error&) {
      abandon(std::current_exception());
    }
  }
  stop();
  const std::lock_guard lock(mutex_);
  for (const Communicator::WorkPtr& receive : alive_) agreement_->cancel(*receive);
  if (comm_ != nullptr && !broken_) nccl().destroy(comm_);
  comm_ = nullptr;
}

NcclChannel::~NcclChannel() {
  {
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr && !broken_) {
      fail(std::make_exception_ptr(NotInitializedError("the group was dropped")), /*tell=*/false);
    }
  }
  stop();
}

}  // namespace samestep
