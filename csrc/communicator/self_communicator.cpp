#include "communicator/self_communicator.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include "communicator/checks.h"
#include "communicator/tag_matcher.h"
#include "core/error.h"
#include "core/format.h"
#include "kernels/reduce.h"
#include "kernels/stream.h"
#include "process/progress_source.h"
#include "process/wait_hooks.h"

namespace samestep {
namespace {

/// An operation that has ended before it is returned.
class Finished final : public Work {
 public:
  bool done() override { return true; }
  void wait(const Deadline&) override {}
  std::exception_ptr error() const override { return nullptr; }
};

struct Message {
  int source, tag;
  DType dtype;
  std::uint64_t count;
  bool is_object;
  std::vector<std::byte> elements;
  std::uint64_t number = 0;
};

/// Unexpected messages and posted receives.
struct SelfMessages;

class SelfReceive final : public Work, public std::enable_shared_from_this<SelfReceive> {
 public:
  SelfReceive(std::shared_ptr<SelfMessages> messages, const RecvArgs& args)
      : messages_(std::move(messages)), args_(args) {}

  bool done() override { return finished_; }
  void wait(const Deadline& deadline) override;
  std::exception_ptr error() const override { return error_; }
  Status status() const override { return status_; }
  std::span<const std::byte> object() const override { return object_; }
  bool cancel() override;
  bool give_back() override;
  bool probes() const { return args_.fit == Fit::probe; }
  void take(const Message& message);
  void fail(std::exception_ptr error) {
    error_ = std::move(error);
    finished_ = true;
  }
  std::string describe() const {
    const std::string what = probes()                   ? "probe for a message"
                             : args_.fit == Fit::object ? "recv_object"
                                                        : str("recv of ", args_.out.count, " ", name(args_.out.dtype));
    return str(what, args_.tag == kAnyTag ? "" : str(" with tag ", args_.tag), " in a group of one rank");
  }

 private:
  std::shared_ptr<SelfMessages> messages_;
  RecvArgs args_;
  std::vector<std::byte> object_;
  Status status_;
  std::uint64_t number_ = 0;  // of the message
  bool is_object_ = false;
  std::exception_ptr error_;
  std::atomic<bool> finished_ = false;  // stored last: it publishes `status_`, `object_` and `error_`
};

struct SelfMessages {
  std::mutex mutex;
  std::uint64_t n_sent = 0;
  TagMatcher<std::shared_ptr<SelfReceive>, Message> matcher;

  /// To the receive that waits for it, or to the messages that nobody has received. Requires the mutex held.
  void hand_over(Message message) {
    // Probes do not consume the message, so it passes to all of them and then to the first receive.
    while (const auto receive = matcher.match(0, message.tag)) {
      receive->take(message);
      if (!receive->probes()) return;
    }
    const std::uint64_t number = message.number;
    matcher.keep_before(std::move(message), [number](const Message& kept) { return kept.number > number; });
  }
};

void SelfReceive::take(const Message& message) {
  status_ = {0, message.tag, message.count};
  number_ = message.number;
  is_object_ = message.is_object;
  if (!probes()) {
    if (args_.fit == Fit::object && message.is_object) {
      object_ = message.elements;
    } else if (fits(message.count, message.dtype, message.is_object, args_.out, args_.fit)) {
      kernels::copy(args_.out.data, message.elements.data(), message.elements.size());
    } else {
      error_ = std::make_exception_ptr(
          MismatchError(unfit_text(describe(), status_, message.dtype, message.is_object, args_.fit)));
    }
  }
  finished_ = true;
}

void SelfReceive::wait(const Deadline& deadline) {
  while (!finished_) {
    if (deadline.passed()) {
      throw TimeoutError(str(describe(), " has waited ", deadline.timeout().count(), " s for rank 0 to send"));
    }
    // The message can come from another thread of this process only, or from an operation that a progress source
    // advances. There is no device or peer to wake this thread, so it polls.
    wait_hooks().interrupt();
    progress_all();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (error_) std::rethrow_exception(error_);
}

bool SelfReceive::cancel() {
  const std::lock_guard lock(messages_->mutex);
  // Not posted any more: a message has matched, or the group has ended.
  if (!messages_->matcher.withdraw(shared_from_this())) return false;
  fail(std::make_exception_ptr(TimeoutError(describe() + ": given up")));
  return true;
}

bool SelfReceive::give_back() {
  if (cancel()) return true;
  const std::lock_guard lock(messages_->mutex);
  if (!finished_ || error_ || probes()) return false;
  const DType dtype = is_object_ ? DType::uint8 : args_.out.dtype;
  const auto* const elements = is_object_ ? object_.data() : static_cast<const std::byte*>(args_.out.data);
  Message message{0, status_.tag, dtype, status_.count, is_object_, {}, number_};
  message.elements.assign(elements, elements + status_.count * itemsize(dtype));
  messages_->hand_over(std::move(message));
  return true;
}

class SelfCommunicator final : public Communicator {
 public:
  explicit SelfCommunicator(std::string name) : Communicator({0, 1, std::move(name), "self"}) {}

  std::shared_ptr<Communicator> split(int color, int, const Deadline&, const std::string& called) override {
    finished();
    if (color < 0) return nullptr;
    return make_self_communicator(called.empty() ? str(name(), "/split ", n_splits_++, " color ", color) : called);
  }
  std::shared_ptr<Communicator> group(std::span<const int> ranks, const Deadline&, const std::string& called) override {
    finished();
    if (ranks.size() != 1 || ranks[0] != 0) {
      throw InvalidArgumentError("group: this group has rank 0 only, so the list must be [0]");
    }
    return make_self_communicator(called.empty() ? name() + "/group 0" : called);
  }
  void close(const Deadline&) override {
    const std::lock_guard lock(messages_->mutex);
    closed_ = true;
    for (const auto& receive : messages_->matcher.withdraw_all()) {
      receive->fail(std::make_exception_ptr(
          NotInitializedError(receive->describe() + ": the group was closed before a message had come")));
    }
  }
  void abandon(std::exception_ptr error, const std::string&) override {
    const std::lock_guard lock(messages_->mutex);
    // Other threads may wait in these receives; no message will come any more.
    for (const auto& receive : messages_->matcher.withdraw_all()) receive->fail(error);
    if (is_broken_) return;  // other threads may read the first error
    broken_ = std::move(error);
    is_broken_ = true;
  }
  Counters counters() const override { return {operations_, 0, 0}; }

 protected:
  WorkPtr start_collective(const CollectiveArgs& args) override {
    WorkPtr work = finished();
    if (reduces(args.type)) {
      const kernels::Input input{args.in.data, args.reduction.factor};
      kernels::reduce(args.in.dtype, args.reduction.op, {&input, 1}, args.out.data, args.in.count,
                      args.reduction.divisor);
    } else if (args.uses_in(0) && args.out.data != args.in.data && args.in.count != 0) {
      // Not for empty arrays, whose pointers may be null.
      std::memmove(args.out.data, args.in.data, args.in.nbytes());
    }
    return work;
  }
  WorkPtr run_collective(const CollectiveArgs& args) override {
    start_collective(args);
    return nullptr;
  }
  WorkPtr start_send(const SendArgs& args) override {
    WorkPtr sent = finished();
    Message message{0, args.tag, args.in.dtype, args.in.count, args.is_object, {}, 0};
    const auto* elements = static_cast<const std::byte*>(args.in.data);
    // Copied, so that the send is complete although nobody may have posted the receive: otherwise a program that sends
    // to itself and then receives would wait forever.
    message.elements.assign(elements, elements + args.in.nbytes());
    const std::lock_guard lock(messages_->mutex);
    message.number = messages_->n_sent++;
    messages_->hand_over(std::move(message));
    return sent;
  }
  WorkPtr start_recv(const RecvArgs& args) override {
    auto receive = std::make_shared<SelfReceive>(messages_, args);
    const std::lock_guard lock(messages_->mutex);
    // With the mutex, so that `abandon` either fails this receive or makes this throw.
    finished();
    const Message* const found = messages_->matcher.find(args.source, args.tag);
    if (found == nullptr) {
      messages_->matcher.post(args.source, args.tag, receive);
      return receive;
    }
    receive->take(*found);
    if (!receive->probes()) messages_->matcher.drop(found);
    return receive;
  }
  void apply(const GroupSettings&) override {}

 private:
  WorkPtr finished() {
    if (closed_) {
      throw NotInitializedError(
          str("group '", name(), "' is closed: make it again, or call samestep.initialize() to start anew"));
    }
    if (is_broken_) std::rethrow_exception(broken_);
    ++operations_;
    // Without state, so one object serves all operations.
    static const WorkPtr work = std::make_shared<Finished>();
    return work;
  }

  std::shared_ptr<SelfMessages> messages_ = std::make_shared<SelfMessages>();
  std::atomic<std::uint64_t> operations_ = 0;  // only counted
  std::atomic<bool> closed_ = false;           // publishes nothing else
  std::atomic<bool> is_broken_ = false;        // set after `broken_`, which does not change from then on
  std::exception_ptr broken_;
  std::atomic<int> n_splits_ = 0;
};

}  // namespace

std::shared_ptr<Communicator> make_self_communicator(const std::string& name) {
  return std::make_shared<SelfCommunicator>(name);
}

}  // namespace samestep
