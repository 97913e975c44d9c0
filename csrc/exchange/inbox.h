#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "exchange/messenger.h"

namespace samestep {

/// What goes before the elements of every message between users, so that a receiver can tell what was sent.
struct MessageHeader {
  std::uint64_t count;  ///< elements
  std::uint32_t dtype;
  std::uint32_t body;  ///< the sender's number of the message that holds them, or kInlineBody
  std::int32_t tag;
};
inline constexpr std::uint32_t kInlineBody = 0xffffffffu;

/// Users' messages to this rank, matched with their receives here and not by the transport, so that every
/// tag of the contract serves, whatever the transport's largest one is.
///
/// While a receive is unmet, one receive of the transport takes whatever comes; what no receive wants is kept, in
/// the order of arrival. Otherwise messages stay with the transport.
class Inbox {
 public:
  /// A receive as the inbox sees it.
  class Taker {
   public:
    virtual ~Taker() = default;
    virtual bool wants(int source, int tag) const = 0;
    /// It is met; `elements` are valid during the call.
    virtual void take(int source, const MessageHeader& header, std::span<const std::byte> elements) = 0;
  };

  explicit Inbox(Messenger& messenger) : messenger_(messenger) {}

  /// Nobody waits for a message and none is kept: the next one is still with the transport.
  bool idle() const { return unmet_.empty() && kept_.empty() && !request_.active; }

  /// `taker` is given the first message that it wants: one that is kept, at once, or the next one to come.
  void expect(Taker& taker);

  /// `taker` wants none any more. False if it has been met.
  bool withdraw(Taker& taker);

  /// Takes what has come.
  void look();

  /// Gives up the transport's receive.
  void abandon();

 private:
  struct Message {
    int source;
    std::vector<std::byte> bytes;
  };

  using Bytes = std::span<const std::byte>;
  static MessageHeader header_of(Bytes message);
  static void hand_over(int source, Bytes message, Taker& taker);
  /// What the transport has put into `room_`: a header and what travels with it.
  Bytes received() const;
  void post();

  Messenger& messenger_;
  std::list<Taker*> unmet_;  // in the order of their calls
  std::list<Message> kept_;  // in the order of arrival
  std::vector<std::byte> room_ = {};
  Messenger::Request request_;
};

}  // namespace samestep
