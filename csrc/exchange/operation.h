#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "communicator/signature.h"
#include "communicator/work.h"
#include "exchange/engine.h"
#include "exchange/requests.h"

namespace samestep {

/// One verb under way in an ExchangeCommunicator: a state machine that `Engine::progress` advances.
/// Everything but `done`, `wait` and `error` is called with the engine's mutex held.
class Operation : public Work {
 public:
  explicit Operation(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  bool done() override;
  void wait(const Deadline& deadline) override { engine_->wait(*this, deadline); }
  std::exception_ptr error() const override { return finished_ ? error_ : nullptr; }

  bool finished() const { return finished_.load(std::memory_order_acquire); }
  std::uint64_t sequence() const { return sequence_; }

  /// A collective takes the next number of its group; a send or receive has none.
  virtual bool is_collective() const = 0;
  /// Sends what can be sent at once.
  virtual void begin(std::uint64_t sequence) = 0;
  /// One step; true at the end. Throws what goes wrong.
  virtual bool advance() = 0;
  /// Ends it with an error: gives up what is under way.
  void fail(std::exception_ptr error);
  void finish() { finished_.store(true, std::memory_order_release); }
  /// Can it still end well when `peer` takes no part in operations from `first_missing` on?
  virtual bool needs(int peer, std::uint64_t first_missing) = 0;
  /// For error texts: "allreduce of float32[3] with op sum (operation 12 of group 'world')".
  virtual std::string describe() const = 0;
  /// Ranks that are waited for.
  virtual std::vector<int> waits_for() = 0;

 protected:
  virtual void give_up() = 0;

  Engine& engine() { return *engine_; }
  const Engine& engine() const { return *engine_; }
  std::uint64_t sequence_ = 0;

 private:
  std::shared_ptr<Engine> engine_;
  std::atomic<bool> finished_ = false;
  std::exception_ptr error_;
};

/// A collective: ranks meet, compare signatures, then work.
class Collective : public Operation {
 public:
  Collective(std::shared_ptr<Engine> engine, const Signature& signature)
      : Operation(std::move(engine)), signature_(signature), digest_(signature.digest()) {}

  bool is_collective() const override { return true; }
  void begin(std::uint64_t sequence) override;
  /// The same where the caller has announced it.
  void begin_announced(std::uint64_t sequence) {
    sequence_ = sequence;
    stage_ = Stage::meet;
  }
  bool advance() override;
  bool needs(int peer, std::uint64_t first_missing) override;
  std::string describe() const override;
  std::vector<int> waits_for() override;

 protected:
  /// Sends this rank's headers (through the Meeting), with what data can go with them.
  virtual void announce(std::uint64_t digest) = 0;
  /// All ranks are here and agree. What came with the headers is valid only during this call.
  virtual void start_work() = 0;
  /// One step; true at the end.
  virtual bool work() = 0;
  /// Does `work` still need what came with the headers?
  virtual bool keeps_meeting() const { return false; }
  /// Ranks whose data is still awaited.
  virtual std::vector<int> awaited() { return {}; }
  void give_up() override { descriptions_under_way_.abandon(engine().messenger()); }

  const Signature& signature() const { return signature_; }
  /// Announced, and found to differ between ranks: nobody works on it.
  bool is_disputed() const { return stage_ == Stage::describe; }

 private:
  enum class Stage : std::uint8_t { announce, meet, describe, work };
  static constexpr std::size_t kDescription = 192;

  bool announce_if_room();
  bool ranks_agree();
  void exchange_descriptions();
  [[noreturn]] void throw_mismatch();

  Signature signature_;
  std::uint64_t digest_;
  Stage stage_ = Stage::announce;
  std::vector<std::array<char, kDescription>> descriptions_;
  Requests descriptions_under_way_;
};

}  // namespace samestep
