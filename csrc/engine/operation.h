#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "communicator/collective_args.h"
#include "communicator/signature.h"
#include "communicator/work.h"
#include "engine/progress_engine.h"
#include "process/user_call.h"
#include "transport/request_set.h"

namespace samestep {

/// A collective or message in progress: a state machine that `ProgressEngine::progress` advances. All functions but
/// `done`, `wait` and `error` are called with the engine's mutex held.
class Operation : public Work {
 public:
  explicit Operation(std::shared_ptr<ProgressEngine> engine) : engine_(std::move(engine)) {}

  bool done() override;
  void wait(const Deadline& deadline) override { engine_->wait(*this, deadline); }
  std::exception_ptr error() const override { return finished_ ? error_ : nullptr; }
  std::string timeout_message(Seconds waited) override { return engine_->timeout_message(*this, waited); }
  /// Transports alone access its memory; see Membership::is_discarded.
  bool device_has_ended() const override { return true; }

  bool finished() const { return finished_.load(std::memory_order_acquire); }  // pairs with finish
  std::uint64_t sequence() const { return sequence_; }

  /// A collective gets the next sequence number of its group; a send or receive has none.
  virtual bool is_collective() const = 0;
  /// Starts it: sends what can be sent at once.
  virtual void begin(std::uint64_t sequence) = 0;
  /// Makes one step. True at the end. Throws errors.
  virtual bool advance() = 0;
  /// Ends it with an error; cancels what is in flight.
  void fail(std::exception_ptr error);
  void finish() { finished_.store(true, std::memory_order_release); }  // pairs with finished()
  /// Whether it fails if `peer` takes no part in operations from `first_absent` on.
  virtual bool needs(int peer, std::uint64_t first_absent) = 0;
  /// The user's call and its group, for error texts, such as "allreduce of float32[3] with op sum (operation 12 of
  /// group 'world')".
  std::string describe() const;
  /// Ranks for which it waits.
  virtual std::vector<int> pending_peers_of_operation() = 0;

 protected:
  virtual void abort() = 0;
  /// The operation itself, such as "send of 3 float32 to rank 1".
  virtual std::string what() const = 0;
  /// Its number, if it has one, such as "operation 12 of ".
  virtual std::string which() const { return ""; }
  /// The user's call, if that is not the operation itself; see UserCall.
  const std::string& called() const { return called_; }

  ProgressEngine& engine() { return *engine_; }
  const ProgressEngine& engine() const { return *engine_; }
  Transport& transport() const { return engine_->transport(); }
  HeaderExchange& headers() const { return engine_->header_exchange(); }
  int rank() const { return engine_->rank(); }
  int size() const { return engine_->size(); }
  std::uint64_t sequence_ = 0;

 private:
  std::shared_ptr<ProgressEngine> engine_;
  const std::string called_ = user_call();
  std::atomic<bool> finished_ = false;
  std::exception_ptr error_;
};

/// A collective: exchanges headers, compares signatures, then works.
class Collective : public Operation {
 public:
  Collective(std::shared_ptr<ProgressEngine> engine, const Signature& signature)
      : Operation(std::move(engine)), signature_(signature), digest_(signature.digest()) {}

  bool is_collective() const override { return true; }
  void begin(std::uint64_t sequence) override;
  /// The same for a collective whose header the caller has posted.
  void begin_posted(std::uint64_t sequence) {
    sequence_ = sequence;
    stage_ = Stage::exchange_headers;
  }
  bool advance() override;
  bool needs(int peer, std::uint64_t first_absent) override;
  std::vector<int> pending_peers_of_operation() override;
  /// Whether the headers of all ranks, which have been received, are of operation `sequence` and have this digest.
  static bool headers_agree(ProgressEngine& engine, std::uint64_t sequence, std::uint64_t digest);

 protected:
  std::string what() const override { return signature_.describe(engine().options().naming); }
  std::string which() const override;
  /// Posts this rank's header, with inline data if there are any.
  virtual void post(std::uint64_t digest) = 0;
  /// Called when all ranks have posted the same signature. Unless `holds_headers`, the headers of peers are valid only
  /// during this call.
  virtual void start_work() = 0;
  /// Makes one step. True at the end.
  virtual bool work() = 0;
  /// Whether `work` still needs the headers of peers.
  virtual bool holds_headers() const { return false; }
  /// Ranks for whose data `work` waits.
  virtual std::vector<int> pending_peers() { return {}; }
  void abort() override { pending_descriptions_.abandon(transport()); }

  const Signature& signature() const { return signature_; }
  /// Signatures differ between ranks, so no rank works on it.
  bool is_mismatched() const { return stage_ == Stage::mismatch; }

 private:
  enum class Stage : std::uint8_t { post, exchange_headers, mismatch, work };

  bool post_if_possible();
  /// Throws Error if a header is not of this operation.
  void require_sequence();
  void exchange_descriptions();
  [[noreturn]] void throw_mismatch();

  Signature signature_;
  std::uint64_t digest_;
  Stage stage_ = Stage::post;
  std::vector<Description> descriptions_;
  RequestSet pending_descriptions_;
};

}  // namespace samestep
