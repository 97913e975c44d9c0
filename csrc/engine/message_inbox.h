#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "communicator/checks.h"
#include "communicator/tag_matcher.h"
#include "core/dtype.h"
#include "transport/transport.h"

namespace samestep {

/// The header of every point-to-point message of the user, by which the receiver checks what was sent.
struct MessageHeader {
  static constexpr std::uint32_t kObject = 1u << 31;

  std::uint64_t count;  ///< elements
  std::uint32_t kind;   ///< their dtype; of an object uint8, and kObject
  std::uint32_t body;   ///< the number of the message that holds the elements, or kInlineBody if they follow the header
  std::int32_t tag;

  static std::uint32_t kind_of(DType dtype, bool is_object) {
    return static_cast<std::uint32_t>(dtype) | (is_object ? kObject : 0);
  }
  DType dtype() const { return static_cast<DType>(kind & ~kObject); }
  bool is_object() const { return (kind & kObject) != 0; }
  std::size_t nbytes() const { return count * itemsize(dtype()); }
  /// Whether a receive into `out` accepts it.
  bool fits(const Buffer& out, Fit fit) const { return samestep::fits(count, dtype(), is_object(), out, fit); }
};
inline constexpr std::uint32_t kInlineBody = 0xffffffffu;

/// Matches the user's messages to this rank with its receives. The transport does not match them, so user tags are not
/// limited by its largest tag.
///
/// While receives are posted, one receive of the transport accepts any message; unexpected ones are kept in the order
/// of arrival. Otherwise messages stay in the transport.
class MessageInbox {
 public:
  /// A receive that waits for its message.
  class PostedReceive {
   public:
    virtual ~PostedReceive() = default;
    /// Called when a message matches. `elements` are valid during the call.
    virtual void take(int source, const MessageHeader& header, std::span<const std::byte> elements) = 0;

   private:
    friend MessageInbox;
    std::uint64_t arrival_ = 0;  // of its message
  };

  explicit MessageInbox(Transport& transport) : transport_(transport) {}

  /// No receive is posted and no message is kept: the next message is still in the transport.
  bool is_idle() const { return !matcher_.has_posted() && !matcher_.has_unexpected() && !request_.active; }

  /// `receive` gets the first message from `source` with `tag` (either may be "any"): at once if one is kept, else the
  /// next that arrives.
  void post_receive(PostedReceive& receive, int source, int tag);

  /// Cancels a receive. False if a message has matched it.
  bool withdraw(PostedReceive& receive);

  /// Takes the message of a receive back. It keeps its place before those that have arrived later: whoever receives it
  /// next waits for `complete`, which brings its elements.
  void give_back(const PostedReceive& giver, int source, MessageHeader header);
  void complete(const PostedReceive& giver, std::span<const std::byte> elements);

  /// Receives what has arrived.
  void poll();

  /// Describes the next message that such a receive would get, without receiving it. `source` and `tag` may be "any".
  /// False if none has arrived.
  bool probe(int source, int tag, Status& status);

  /// Cancels the transport's receive.
  void abandon();

 private:
  struct Message {
    int source, tag;
    std::uint64_t arrival;
    std::vector<std::byte> bytes;
    const PostedReceive* giver = nullptr;  // as long as the elements are missing
    PostedReceive* taker = nullptr;        // which waits for them
  };

  using Bytes = std::span<const std::byte>;
  static MessageHeader header_of(Bytes message);
  static void deliver(int source, std::uint64_t arrival, Bytes message, PostedReceive& taker);
  /// The received message in `room_`: a header and inline data.
  Bytes received() const;
  Message* find(int source, int tag);
  void post();
  void receive_next();
  /// Delivers or keeps the message that the transport has received. False if there is none.
  bool take_next();

  Transport& transport_;
  TagMatcher<PostedReceive*, Message> matcher_;
  std::vector<std::byte> room_ = {};
  Transport::Request request_;
  std::uint64_t arrivals_ = 0;
};

}  // namespace samestep
