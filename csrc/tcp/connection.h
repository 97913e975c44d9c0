#pragma once

#include <deque>
#include <string>
#include <vector>

#include "os/tcp_socket.h"
#include "tcp/frame.h"
#include "tcp/matching.h"

namespace samestep::tcp {

/// Frames to and from one other rank. Sends from where the bytes lie, and reads long ones to where they are wanted.
class Connection {
 public:
  /// Where the bytes of an incoming frame go: to a receive, to a message that is kept, or nowhere.
  struct Place {
    std::byte* at = nullptr;
    Record* record = nullptr;
    Arrived* kept = nullptr;
  };
  class Receiver {
   public:
    virtual ~Receiver() = default;
    virtual Place place_for(int peer, const Frame& frame) = 0;
    /// All bytes of the frame have come.
    virtual void take(int peer, const Frame& frame, const Place& place) = 0;
  };

  /// `where` names the other side in texts.
  Connection(int peer, TcpSocket socket, std::string where);

  /// Sends now what the socket takes and the rest later. `bytes` have to stay as they are until `record`, if there is
  /// one, has ended.
  void send(const Frame& frame, Bytes bytes = {}, Record* record = nullptr);
  /// Sends the bytes of a message that was offered, in pieces between which other frames may go.
  void send_offered(Record* record, std::uint64_t group, std::uint32_t id);

  /// What the poller has told.
  void ready(bool readable, bool writable, bool hung_up);
  /// Moves what can be moved now, within reason.
  void advance(Receiver& receiver);
  /// Ends it if the peer's host has been silent for long.
  void listen_for_silence();

  /// Something could be moved without news from the poller.
  bool has_work() const { return !lost_ && (hung_up_ || reads_on_ || (writable_ && !all_sent())); }
  int fd() const { return socket_.fd(); }
  bool all_sent() const { return outgoing_.empty() && offered_.empty(); }
  /// The memory of this group is neither read nor written any more.
  void forget(std::uint64_t group);
  /// The rest of the frame under way goes nowhere.
  void forget_place(const Record* record);

  int peer() const { return peer_; }
  bool lost() const { return lost_; }
  /// Why, with `where`.
  const std::string& reason() const { return reason_; }
  void end(const std::string& why);

 private:
  struct Outgoing {
    Frame frame;
    Bytes bytes;
    Record* record;
  };
  struct Offered {
    Record* record;
    std::uint64_t group;
    std::uint32_t id;
    std::size_t at = 0;
  };

  void queue(const Frame& frame, Bytes bytes, Record* record);
  void queue_piece();
  void flush();
  void sent(std::size_t nbytes);
  bool read(Receiver& receiver);
  void consume(Receiver& receiver);
  bool begin_frame(Receiver& receiver);
  void end_frame(Receiver& receiver);

  int peer_;
  TcpSocket socket_;
  std::string where_;
  bool readable_ = true, writable_ = true, hung_up_ = false;
  bool reads_on_ = false;  // it was interrupted in reading
  bool lost_ = false;
  std::string reason_;

  std::deque<Outgoing> outgoing_;
  std::deque<Offered> offered_;
  std::size_t sent_ = 0;              // bytes of the first of `outgoing_`
  std::vector<std::byte> half_sent_;  // a copy of its bytes, where its group has been closed
  std::uint32_t next_out_ = kFirstSequence;

  std::vector<std::byte> stage_;  // read ahead: short frames, and the beginnings of long ones
  std::size_t begin_ = 0, end_ = 0;
  Frame frame_{};
  Place place_;
  std::size_t left_ = 0;  // bytes of `frame_` that have not come
  std::uint32_t next_in_ = kFirstSequence;
};

}  // namespace samestep::tcp
