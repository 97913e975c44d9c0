#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "communicator/communicator.h"
#include "exchange/waiting.h"

namespace samestep {

class PeerWatch;

/// Moves tagged byte messages between the ranks of a group: all that a transport has to offer for
/// ExchangeCommunicator to give it every verb.
///
/// Messages with one (sender, tag) arrive in the order they were sent. Nothing blocks but
/// `subset` and `close`. Not thread-safe: the owner takes turns.
///
/// Every call throws Error when the transport reports a failure; but where it is about to be known who has died
/// (`losses`), sends end and receives do not.
class Messenger {
 public:
  virtual ~Messenger() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string_view engine() const = 0;

  /// A send or receive under way. Falls back to inactive once `test` has seen its end.
  struct Request {
    std::uintptr_t bits = 0;
    bool active = false;
  };

  struct Envelope {
    int source = -1;
    int tag = -1;
  };

  /// While this lives, who sends or receives will wait until that has ended, and can help meanwhile.
  class WaitedFor {
   public:
    WaitedFor(Messenger& messenger, bool is_waited_for) : messenger_(messenger) {
      messenger_.waited_for_ = is_waited_for;
    }
    ~WaitedFor() { messenger_.waited_for_ = false; }
    WaitedFor(const WaitedFor&) = delete;
    WaitedFor& operator=(const WaitedFor&) = delete;

   private:
    Messenger& messenger_;
  };

  /// Does not every rank have a CPU? Told before anything is sent, and again when more is known.
  virtual void set_oversubscribed(bool oversubscribed) { (void)oversubscribed; }

  /// `data` must stay as it is until the request has ended.
  virtual Request send(const void* data, std::size_t nbytes, int dest, int tag) = 0;

  /// Takes one message of at most `capacity` bytes; `source` may be kAnySource.
  virtual Request receive(void* data, std::size_t capacity, int source, int tag) = 0;

  /// True once the request has ended (also for an inactive one). `envelope`, if given, tells whom a
  /// received message came from.
  virtual bool test(Request& request, Envelope* envelope = nullptr) = 0;

  /// Sends and receives of bundles that have ended so far; may be asked for without taking turns.
  std::uint64_t ended() const { return ended_.load(std::memory_order_relaxed); }
  void count_ended() { ended_.fetch_add(1, std::memory_order_relaxed); }

  /// Gives up a receive. True if no message had met it; else test it to its end.
  virtual bool cancel(Request& request) = 0;

  /// Is there a message with this tag, from anybody, that no receive has met?
  virtual bool probe(int tag, Envelope& envelope) = 0;

  /// Most bytes of one message.
  virtual std::size_t max_message() const = 0;
  /// Not more than so many from now on, where the transport has a limit at all. The same on all ranks.
  virtual void limit_messages(std::size_t nbytes) { (void)nbytes; }

  /// Most bytes for which a copy costs less than a message of their own.
  virtual std::size_t short_message() const { return 4 << 10; }
  /// Is a message of these bytes, some of them at `data`, to be copied into one piece?
  virtual bool is_short(const void* data, std::size_t nbytes) const {
    (void)data;
    return nbytes <= short_message();
  }

  /// Messenger of the group of `ranks`, in that order. Called by those ranks only, which all know
  /// that the others are calling it too; so it may block for as long as that takes.
  virtual std::unique_ptr<Messenger> subset(std::span<const int> ranks) = 0;

  /// A number for the next group that this rank makes, for transports that tell groups apart by them: its members agree
  /// on the highest one of theirs. 0 = none is needed.
  virtual std::uint32_t next_group() { return 0; }
  /// The same with the number that all members have agreed on.
  virtual std::unique_ptr<Messenger> subset_with(std::span<const int> ranks, std::uint32_t number) {
    (void)number;
    return subset(ranks);
  }

  /// Sleeps until something may have come or gone, for a millisecond at most. May be called without taking turns.
  /// False where the transport has nothing that wakes.
  virtual bool rest() { return false; }
  /// The same for ranks that share memory, which sleep only where it costs less than to give way; see Pause. Null where
  /// there is nothing that wakes.
  virtual std::unique_ptr<Nap> nap() { return nullptr; }

  /// From now on this says which ranks have died. Where the transport knows by itself it is not needed.
  virtual void set_watch(std::shared_ptr<PeerWatch> watch) { (void)watch; }

  /// This rank has waited for long: does the peer still live? `losses` tells, in time.
  virtual void ask_after(int peer) { (void)peer; }

  /// A rank that has gone without a word.
  struct Loss {
    int peer;
    std::uint64_t first_missing;  ///< collectives from this one on may have gone on without it
    std::string text;             ///< how it is known
  };
  /// Ranks found lost since the last call, where the transport can tell.
  virtual std::vector<Loss> losses() { return {}; }

  /// Frees what the group holds; all ranks call it. Without it (`~Messenger`) nothing collective happens.
  virtual void close() = 0;

 protected:
  bool waited_for() const { return waited_for_; }

 private:
  std::atomic<std::uint64_t> ended_ = 0;
  bool waited_for_ = false;
};

}  // namespace samestep
