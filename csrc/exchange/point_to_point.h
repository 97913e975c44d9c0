#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/buffer.h"
#include "exchange/inbox.h"
#include "exchange/operation.h"

namespace samestep {

class Send : public Operation {
 public:
  /// `waited_for`: by whoever begins it.
  Send(std::shared_ptr<Engine> engine, ConstBuffer in, int dest, int tag, bool waited_for)
      : Operation(std::move(engine)), in_(in), dest_(dest), tag_(tag), waited_for_(waited_for) {}

  bool is_collective() const override { return false; }
  void begin(std::uint64_t) override;
  bool advance() override;
  bool needs(int peer, std::uint64_t) override { return peer == dest_; }
  std::string describe() const override;
  std::vector<int> waits_for() override { return {dest_}; }

 protected:
  void give_up() override {}

 private:
  ConstBuffer in_;
  int dest_;
  int tag_;
  bool waited_for_;
  std::vector<std::byte> head_;
  Messenger::Request head_request_;
  Requests body_;
};

class Receive : public Operation, private Inbox::Taker {
 public:
  Receive(std::shared_ptr<Engine> engine, Buffer out, int source, int tag, bool waited_for)
      : Operation(std::move(engine)), out_(out), source_(source), tag_(tag), waited_for_(waited_for) {}

  bool is_collective() const override { return false; }
  void begin(std::uint64_t) override;
  bool advance() override;
  bool needs(int peer, std::uint64_t) override;
  std::string describe() const override;
  std::vector<int> waits_for() override;
  Status status() const override { return status_; }

  /// See Communicator::cancel. With the engine's mutex held.
  bool cancel();

 protected:
  void give_up() override;

 private:
  bool wants(int source, int tag) const override;
  /// The header is here: takes the elements, or starts to.
  void take(int source, const MessageHeader& header, std::span<const std::byte> elements) override;
  [[noreturn]] void throw_mismatch() const;

  Buffer out_;
  int source_;
  int tag_;
  bool waited_for_;
  bool has_head_ = false;
  MessageHeader sent_{};
  bool fits_ = true;
  std::vector<std::byte> unwanted_;  // where a body that does not fit is put
  Requests body_;
  Status status_;
};

}  // namespace samestep
