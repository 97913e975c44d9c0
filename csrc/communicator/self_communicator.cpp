#include "communicator/self_communicator.h"

#include <atomic>
#include <cstring>
#include <list>
#include <mutex>
#include <thread>

#include "communicator/checks.h"
#include "core/bystanders.h"
#include "core/error.h"
#include "core/format.h"
#include "core/wait_hooks.h"
#include "kernels/reduce.h"
#include "kernels/stream.h"

namespace samestep {
namespace {

/// An operation that ended before it was returned.
class Finished final : public Work {
 public:
  bool done() override { return true; }
  void wait(const Deadline&) override {}
  std::exception_ptr error() const override { return nullptr; }
};

struct Message {
  int tag;
  DType dtype;
  std::uint64_t count;
  std::vector<std::byte> elements;
};

/// Messages sent and not received, receives that wait for one.
struct Mailbox;

class SelfReceive final : public Work {
 public:
  SelfReceive(std::shared_ptr<Mailbox> mailbox, Buffer out, int tag)
      : mailbox_(std::move(mailbox)), out_(out), tag_(tag) {}

  bool done() override { return finished_; }
  void wait(const Deadline& deadline) override;
  std::exception_ptr error() const override { return error_; }
  Status status() const override { return status_; }
  bool matches(int tag) const { return tag_ == kAnyTag || tag_ == tag; }
  void take(const Message& message);
  void give_up(std::exception_ptr error) {
    error_ = std::move(error);
    finished_ = true;
  }
  std::string describe() const {
    return str("recv of ", out_.count, " ", name(out_.dtype), tag_ == kAnyTag ? std::string() : str(" with tag ", tag_),
               " in a group of one rank");
  }

 private:
  std::shared_ptr<Mailbox> mailbox_;
  Buffer out_;
  int tag_;
  Status status_;
  std::exception_ptr error_;
  std::atomic<bool> finished_ = false;
};

struct Mailbox {
  std::mutex mutex;
  std::list<Message> messages;
  std::list<std::shared_ptr<SelfReceive>> receives;
};

void SelfReceive::take(const Message& message) {
  status_ = {0, message.tag, message.count};
  if (message.count != out_.count || message.dtype != out_.dtype) {
    error_ = std::make_exception_ptr(MismatchError(
        str(describe(), ": rank 0 sent ", message.count, " ", name(message.dtype), " with tag ", message.tag)));
  } else {
    kernels::copy(out_.data, message.elements.data(), out_.nbytes());
  }
  finished_ = true;
}

void SelfReceive::wait(const Deadline& deadline) {
  while (!finished_) {
    if (deadline.passed()) {
      throw TimeoutError(str(describe(), " has waited ", deadline.timeout().count(), " s for rank 0 to send"));
    }
    wait_hooks().interrupt();
    advance_bystanders();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (error_) std::rethrow_exception(error_);
}

class SelfCommunicator final : public Communicator {
 public:
  explicit SelfCommunicator(std::string name) : name_(std::move(name)) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  const std::string& name() const override { return name_; }
  std::string_view engine() const override { return "self"; }

  WorkPtr all_reduce(ConstBuffer in, Buffer out, const Reduction& reduction, const Shape&) override {
    return reduce_into("allreduce", in, out, reduction);
  }
  WorkPtr reduce(ConstBuffer in, Buffer out, const Reduction& reduction, int root, const Shape&) override {
    checks::root_in_group("reduce", root, 1);
    return reduce_into("reduce", in, out, reduction);
  }
  WorkPtr reduce_scatter(ConstBuffer in, Buffer out, const Reduction& reduction, const Shape&) override {
    return reduce_into("reduce_scatter", in, out, reduction);
  }
  WorkPtr broadcast(Buffer buffer, int root, const Shape&) override {
    checks::root_in_group("bcast", root, 1);
    return copy("bcast", buffer, buffer);
  }
  WorkPtr all_gather(ConstBuffer in, Buffer out, const Shape&) override { return copy("allgather", in, out); }
  WorkPtr all_gather_v(ConstBuffer in, Buffer out, std::span<const std::uint64_t> counts) override {
    checks::counts_fill("allgatherv", "counts", counts, 1, out);
    return copy("allgatherv", in, out);
  }
  WorkPtr gather(ConstBuffer in, Buffer out, int root, const Shape&) override {
    checks::root_in_group("gather", root, 1);
    return copy("gather", in, out);
  }
  WorkPtr gather_v(ConstBuffer in, Buffer out, std::span<const std::uint64_t> counts, int root) override {
    checks::root_in_group("gatherv", root, 1);
    checks::counts_fill("gatherv", "counts", counts, 1, out);
    return copy("gatherv", in, out);
  }
  WorkPtr scatter(ConstBuffer in, Buffer out, int root, const Shape&) override {
    checks::root_in_group("scatter", root, 1);
    return copy("scatter", in, out);
  }
  WorkPtr scatter_v(ConstBuffer in, std::span<const std::uint64_t> counts, Buffer out, int root) override {
    checks::root_in_group("scatterv", root, 1);
    checks::counts_fill("scatterv", "counts", counts, 1, in);
    return copy("scatterv", in, out);
  }
  WorkPtr all_to_all(ConstBuffer in, Buffer out, const Shape&) override { return copy("alltoall", in, out); }
  WorkPtr all_to_all_v(ConstBuffer in, std::span<const std::uint64_t> send_counts, Buffer out,
                       std::span<const std::uint64_t> receive_counts) override {
    checks::counts_fill("alltoallv", "send counts", send_counts, 1, in);
    checks::counts_fill("alltoallv", "receive counts", receive_counts, 1, out);
    return copy("alltoallv", in, out);
  }
  WorkPtr barrier() override { return finished(); }

  WorkPtr now(const Call& call) override {
    begin(call);
    return nullptr;
  }

  WorkPtr send(ConstBuffer in, int dest, int tag) override {
    checks::on_host("send", in);
    checks::peer_in_group("send", "dest", dest, 1);
    checks::tag_is_valid("send", tag);
    Message message{tag, in.dtype, in.count, {}};
    const auto* elements = static_cast<const std::byte*>(in.data);
    message.elements.assign(elements, elements + in.nbytes());
    const std::lock_guard lock(mailbox_->mutex);
    for (auto it = mailbox_->receives.begin(); it != mailbox_->receives.end(); ++it) {
      if (!(*it)->matches(tag)) continue;
      (*it)->take(message);
      mailbox_->receives.erase(it);
      return finished();
    }
    mailbox_->messages.push_back(std::move(message));
    return finished();
  }

  WorkPtr recv(Buffer out, int source, int tag) override {
    checks::on_host("recv", out);
    if (source != kAnySource) checks::peer_in_group("recv", "source", source, 1);
    if (tag != kAnyTag) checks::tag_is_valid("recv", tag);
    finished();
    auto receive = std::make_shared<SelfReceive>(mailbox_, out, tag);
    const std::lock_guard lock(mailbox_->mutex);
    for (auto it = mailbox_->messages.begin(); it != mailbox_->messages.end(); ++it) {
      if (!receive->matches(it->tag)) continue;
      receive->take(*it);
      mailbox_->messages.erase(it);
      return receive;
    }
    mailbox_->receives.push_back(receive);
    return receive;
  }

  bool cancel(Work& recv) override {
    const std::lock_guard lock(mailbox_->mutex);
    return std::erase_if(mailbox_->receives, [&](const auto& receive) {
             if (receive.get() != &recv) return false;
             receive->give_up(std::make_exception_ptr(TimeoutError(receive->describe() + ": given up")));
             return true;
           }) != 0;
  }

  std::shared_ptr<Communicator> split(int color, int, const Deadline&) override {
    finished();
    return color < 0 ? nullptr : make_self_communicator(str(name_, "/split ", children_++, " color ", color));
  }
  std::shared_ptr<Communicator> group(std::span<const int> ranks, const Deadline&) override {
    finished();
    if (ranks.size() != 1 || ranks[0] != 0) {
      throw InvalidArgumentError("group: this group has rank 0 only, so the list must be [0]");
    }
    return make_self_communicator(name_ + "/group 0");
  }
  void progress() override {}
  void close(const Deadline&) override { closed_ = true; }
  void abandon(std::exception_ptr error, const std::string&) override {
    const std::lock_guard lock(mailbox_->mutex);
    for (const auto& receive : mailbox_->receives) receive->give_up(error);
    mailbox_->receives.clear();
    broken_ = std::move(error);
  }
  void set_oversubscribed(bool) override {}
  bool oversubscribed() const override { return false; }
  Counters counters() const override { return {operations_, 0, 0}; }

 private:
  WorkPtr finished() {
    if (closed_) {
      throw NotInitializedError(str("group '", name_, "' is closed: call samestep.initialize() again to start anew"));
    }
    if (broken_) std::rethrow_exception(broken_);
    ++operations_;
    static const WorkPtr work = std::make_shared<Finished>();
    return work;
  }

  void check(std::string_view verb, const ConstBuffer& in, const ConstBuffer& out) {
    checks::on_host(verb, in);
    checks::on_host(verb, out);
    checks::same_dtype(verb, in, out);
    checks::has_count(verb, "out", out, in.count);
  }

  WorkPtr reduce_into(std::string_view verb, ConstBuffer in, Buffer out, const Reduction& reduction) {
    check(verb, in, out);
    require_reducible(in.dtype, reduction);
    WorkPtr work = finished();
    const kernels::Input input{in.data, reduction.factor};
    kernels::reduce(in.dtype, reduction.op, {&input, 1}, out.data, in.count);
    return work;
  }

  WorkPtr copy(std::string_view verb, ConstBuffer in, Buffer out) {
    check(verb, in, out);
    WorkPtr work = finished();
    if (out.data != in.data && in.count != 0) std::memmove(out.data, in.data, in.nbytes());
    return work;
  }

  std::string name_;
  std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>();
  std::atomic<std::uint64_t> operations_ = 0;
  std::atomic<bool> closed_ = false;
  std::exception_ptr broken_;
  int children_ = 0;
};

}  // namespace

std::shared_ptr<Communicator> make_self_communicator(const std::string& name) {
  return std::make_shared<SelfCommunicator>(name);
}

}  // namespace samestep
