#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "communicator/communicator.h"

namespace samestep {

/// The elements of a long message, which do not travel with its header.
struct MessageBody {
  int peer = -1;
  std::uint32_t number = 0;        ///< the sender's
  std::size_t nbytes = 0;          ///< 0: the elements came with the header
  std::size_t segment_nbytes = 0;  ///< of every segment but the last
  std::string what = {};           ///< the user's call, for error texts
};

/// Messages whose memory is available a segment at a time. Peers need not know: they send and receive whole messages,
/// or theirs in segments too. The segments of a body are sent, and received, in their order.
class SegmentedMessages {
 public:
  virtual ~SegmentedMessages() = default;

  /// The length of the segments of a message: all about as long, and too long to travel before they are received.
  virtual std::size_t segment_nbytes(std::size_t nbytes) const = 0;
  /// Elements that come with a header have at most so many bytes.
  virtual std::size_t max_inline_message() const = 0;

  /// Sends the header and the first segment, which lies at `args.in.data`. Sets `body` at once.
  virtual Communicator::WorkPtr send_first(const SendArgs& args, std::shared_ptr<MessageBody> body) = 0;
  /// Receives the header, and the elements that come with it, into `args.out`, of which `max_inline_message` bytes are
  /// in memory. Sets `body` before the Work ends.
  virtual Communicator::WorkPtr receive_header(const RecvArgs& args, std::shared_ptr<MessageBody> body) = 0;
  /// The segment at `offset`. Done once its memory may be reused.
  virtual Communicator::WorkPtr send_segment(const MessageBody& body, std::size_t offset, const void* data) = 0;
  virtual Communicator::WorkPtr receive_segment(const MessageBody& body, std::size_t offset, void* data) = 0;
};

}  // namespace samestep
