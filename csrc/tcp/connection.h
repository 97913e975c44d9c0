#pragma once

#include <array>
#include <deque>
#include <string>
#include <vector>

#include "os/tcp_socket.h"
#include "tcp/frame.h"
#include "tcp/matcher.h"
#include "tcp/seal.h"
#include "tcp/tcp_transport.h"

namespace samestep::tcp {

/// A connection to another rank. Sends frames directly from the user's buffers, and reads long ones directly into them.
class Connection {
 public:
  /// The destination of an incoming frame: a receive, an unexpected message, or none, if the bytes are discarded.
  struct Destination {
    std::byte* at = nullptr;
    RequestState* request = nullptr;
    UnexpectedMessage* unexpected = nullptr;
  };
  class Receiver {
   public:
    virtual ~Receiver() = default;
    virtual Destination destination_of(int peer, const Frame& frame) = 0;
    /// All bytes of the frame have arrived.
    virtual void take(int peer, const Frame& frame, const Destination& place) = 0;
  };

  /// `here`: this end, for texts.
  Connection(int peer, TcpPeer end, std::string here);

  /// Sends as many bytes as the socket accepts now, and the remaining ones later. `bytes` must not change until
  /// `record`, if there is one, has ended.
  void send(const Frame& frame, Bytes bytes = {}, RequestState* record = nullptr);
  /// Sends a message for which a CTS has arrived, in data frames. Other frames may be sent between them. `detached`:
  /// its memory may change.
  void send_data(RequestState* record, std::uint64_t group, std::uint32_t id, bool detached);

  /// Handles the events that the poller has reported.
  void ready(bool readable, bool writable, bool hung_up);
  /// Sends and receives without blocking, up to a limit, so that other connections are served.
  void advance(Receiver& receiver);
  /// Ends the connection if the peer's host has not answered for long.
  void check_heartbeat();

  /// Whether bytes may be sent or received without another event of the poller.
  bool has_work() const { return !lost_ && (hung_up_ || reads_on_ || (writable_ && !all_sent())); }
  int fd() const { return lost_ ? -1 : socket_.fd(); }
  bool all_sent() const { return outgoing_.empty() && rts_sent_.empty(); }
  /// From now on the memory of this group is neither read nor written.
  void forget(std::uint64_t group);
  /// From now on the memory that this group sends may change: what has been checksummed is sent from a copy.
  void detach_sends(std::uint64_t group);
  /// The remaining bytes of the current frame are discarded.
  void forget_destination(const RequestState* record);

  int peer() const { return peer_; }
  bool lost() const { return lost_; }
  /// Why it was lost, with `where`.
  const std::string& reason() const { return reason_; }
  void end(const std::string& why);
  /// Ends it because bytes that this rank has sent (or received) have changed on the way.
  void end_damaged(bool sent);

 private:
  static constexpr std::size_t kMaxHead = sizeof(Frame) + Seal::kMaxTag;
  struct Outgoing {
    Frame frame;
    Bytes bytes;
    RequestState* request;
    bool detached = false;  // `bytes` may change
    bool sealed = false;
    std::array<std::byte, kMaxHead> head = {};       // frame and tag, once sealed
    std::array<std::byte, Seal::kMaxTag> tail = {};  // tag of `bytes`
  };
  struct RtsSent {
    RequestState* request;
    std::uint64_t group;
    std::uint32_t id;
    bool detached;
    std::size_t at = 0;
  };

  void drop(const std::string& why);
  void tell_of_damage();
  void queue(const Frame& frame, Bytes bytes, RequestState* record);
  void queue_data();
  bool seal(Outgoing& out);
  bool detach(Outgoing& out);
  void use_copy(Outgoing& out);
  void flush();
  void sent(std::size_t nbytes);
  bool read(Receiver& receiver);
  void consume(Receiver& receiver);
  void take_body(std::byte* bytes, std::size_t nbytes);
  bool begin_frame(Receiver& receiver);
  bool end_body(Receiver& receiver);
  void end_frame(Receiver& receiver);

  int peer_;
  TcpSocket socket_;
  std::string where_, here_;
  bool readable_ = true, writable_ = true, hung_up_ = false;
  bool reads_on_ = false;  // reading stopped at the limit, not at the end of the data
  bool lost_ = false;
  std::string reason_;

  std::deque<Outgoing> outgoing_;
  std::deque<RtsSent> rts_sent_;
  std::size_t sent_ = 0;         // bytes of the first frame of `outgoing_` that were sent
  std::vector<std::byte> copy_;  // of its bytes, if they may change; of those of several frames, encrypted
  std::size_t copied_ = 0;       // encrypted bytes in `copy_`
  std::uint32_t next_out_ = kFirstSequence;
  Seal out_;

  std::vector<std::byte> stage_;  // read-ahead buffer for short frames and the beginnings of long ones
  std::size_t begin_ = 0, end_ = 0;
  Frame frame_{};
  Destination destination_;
  bool in_body_ = false;  // of `frame_`: its tag has not been checked
  std::size_t left_ = 0;  // bytes of the body that have not arrived
  std::uint32_t next_in_ = kFirstSequence;
  Seal in_;
};

}  // namespace samestep::tcp
