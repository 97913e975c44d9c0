#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "communicator/communicator.h"
#include "engine/message_inbox.h"
#include "engine/operation.h"

namespace samestep {

/// The elements of a long message, which do not travel with its header.
struct MessageBody {
  int peer = -1;
  std::uint32_t number = 0;        ///< the sender's
  std::size_t nbytes = 0;          ///< 0: the elements came with the header
  std::size_t segment_nbytes = 0;  ///< of every segment but the last
  std::string what = {};           ///< the user's call, for error texts
};

class Send : public Operation {
 public:
  /// `segments`: only the first segment of the body is sent here, and the others by BodySegments.
  Send(std::shared_ptr<ProgressEngine> engine, const SendArgs& args, std::shared_ptr<MessageBody> segments = nullptr)
      : Operation(std::move(engine)), args_(args), segments_(std::move(segments)) {}

  bool is_collective() const override { return false; }
  void begin(std::uint64_t) override;
  bool advance() override;
  bool needs(int peer, std::uint64_t) override { return peer == args_.dest; }
  std::vector<int> pending_peers_of_operation() override { return {args_.dest}; }

 protected:
  void abort() override {
    const bool has_tag = segments_ != nullptr && segments_->peer >= 0;  // else it has failed before it had one
    if (has_tag) engine().close_body(segments_->number);
  }
  std::string what() const override;

 private:
  SendArgs args_;
  std::shared_ptr<MessageBody> segments_;
  std::vector<std::byte> head_;
  Transport::Request head_request_;
  RequestSet body_;
};

class Receive : public Operation, private MessageInbox::PostedReceive {
 public:
  /// With `Fit::object` the operation allocates the memory. `segments`: a body that fits is received by BodySegments.
  Receive(std::shared_ptr<ProgressEngine> engine, const RecvArgs& args, std::shared_ptr<MessageBody> segments = nullptr)
      : Operation(std::move(engine)),
        args_(args),
        segments_(std::move(segments)),
        may_write_(args.out.device.kind == DeviceKind::cpu) {}

  bool is_collective() const override { return false; }
  void begin(std::uint64_t) override;
  bool advance() override;
  bool needs(int peer, std::uint64_t) override;
  std::vector<int> pending_peers_of_operation() override;
  Status status() const override { return status_; }
  std::span<const std::byte> object() const override { return object_; }

  bool cancel() override;
  bool give_back() override;
  void begin_writes() override { may_write_.store(true, std::memory_order_release); }  // pairs with advance

 protected:
  void abort() override;
  std::string what() const override;
  /// Called with the header: copies the elements, or starts to receive them.
  void take(int source, const MessageHeader& header, std::span<const std::byte> elements) override;
  int source() const { return args_.source; }
  int tag() const { return args_.tag; }
  void set_status(const Status& status) { status_ = status; }
  /// Cancels the receive. False if a message has matched it.
  virtual bool withdraw() { return engine().inbox().withdraw(*this); }

 private:
  [[noreturn]] void throw_mismatch() const;
  void receive_body();
  void hand_over();

  RecvArgs args_;
  std::shared_ptr<MessageBody> segments_;
  std::atomic<bool> may_write_;
  bool has_head_ = false;
  bool has_body_ = false;  ///< inline, or its receives have been posted
  MessageHeader sent_{};
  bool fits_ = true;
  bool is_given_back_ = false;       ///< the message goes to another receive
  std::vector<std::byte> unwanted_;  // receives a body that does not fit
  RequestSet body_;
  std::vector<std::byte> object_;
  Status status_;
};

/// Waits for a message that such a receive would get, and leaves it unreceived. Its result is the status.
class Probe final : public Receive {
 public:
  Probe(std::shared_ptr<ProgressEngine> engine, const RecvArgs& args) : Receive(std::move(engine), args) {}

  void begin(std::uint64_t) override {}
  bool advance() override;

 protected:
  void abort() override {}
  bool withdraw() override { return true; }
  std::string what() const override;
};

/// A segment of the body of a message whose header has been exchanged.
class BodySegment final : public Operation {
 public:
  /// One of `sent` and `received` is null.
  BodySegment(std::shared_ptr<ProgressEngine> engine, const MessageBody& body, std::size_t offset, const void* sent,
              void* received)
      : Operation(std::move(engine)), body_(body), offset_(offset), sent_(sent), received_(received) {}

  bool is_collective() const override { return false; }
  void begin(std::uint64_t) override;
  bool advance() override;
  bool needs(int peer, std::uint64_t) override { return peer == body_.peer; }
  std::vector<int> pending_peers_of_operation() override { return {body_.peer}; }

 protected:
  void abort() override;
  std::string what() const override { return body_.what; }

 private:
  /// After the last segment: its tag is free again.
  void end_body();

  MessageBody body_;
  std::size_t offset_;
  const void* sent_;
  void* received_;
  RequestSet request_;
};

}  // namespace samestep
