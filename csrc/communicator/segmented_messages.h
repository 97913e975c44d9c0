#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "communicator/communicator.h"

namespace samestep {

/// The elements of a long message, which follow its header.
struct MessageBody {
  int peer = -1;
  std::uint32_t number = 0;        ///< the sender's
  std::size_t nbytes = 0;          ///< 0: the header brought the elements, which are in `Work::object`
  std::size_t segment_nbytes = 0;  ///< of every segment but the last
  std::string what = {};           ///< the user's call, for error texts
};

/// Messages whose memory is available a segment at a time. Peers need not know: they send and receive whole messages,
/// or theirs in segments too. Headers are matched in the order of their calls, and so are the segments of a body.
class SegmentedMessages {
 public:
  virtual ~SegmentedMessages() = default;

  /// `args.in.data` is not read. Needs `body.segment_nbytes`; sets what remains at once.
  virtual Communicator::WorkPtr send_header(const SendArgs& args, std::shared_ptr<MessageBody> body) = 0;
  /// Sets `body` once the Work has ended. `args.out.data` is not written to.
  virtual Communicator::WorkPtr receive_header(const RecvArgs& args, std::shared_ptr<MessageBody> body) = 0;
  /// The next segment. Done once its memory may be reused.
  virtual Communicator::WorkPtr send_segment(const MessageBody& body, const void* data, std::size_t nbytes) = 0;
  virtual Communicator::WorkPtr receive_segment(const MessageBody& body, void* data, std::size_t nbytes) = 0;
};

}  // namespace samestep
