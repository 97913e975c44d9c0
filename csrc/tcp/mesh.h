#pragma once

#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "os/poller.h"
#include "tcp/connection.h"
#include "tcp/frame.h"
#include "tcp/matcher.h"

namespace samestep::tcp {

/// The connections of one rank to all other ranks of the world, which all groups share. Ranks are those of the world.
///
/// There is no background thread: waiting threads call `advance`. Thread-safe: each call holds the mesh's mutex.
class Mesh final : Connection::Receiver {
 public:
  Mesh(int rank, std::vector<TcpPeer> peers);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }

  using Group = std::uint64_t;
  /// Opens a group, until `drop`. Messages of the group may have arrived before.
  void open(Group group, std::vector<int> members);
  RequestState* send(Group group, Bytes bytes, int dest, int tag);
  RequestState* receive(Group group, void* data, std::size_t room, int source, int tag);
  /// True once the request has ended: then it is removed, and `met` has the source and tag of the matched message.
  /// Throws Error if the message was longer than the receive.
  bool test(Group group, RequestState* record, Transport::Envelope& met);
  /// True if the receive has ended without a message. Its memory is no longer written.
  bool cancel(Group group, RequestState* record);
  bool probe(Group group, int tag, Transport::Envelope& from);

  /// From now on the memory of the group's sends may change.
  void detach_sends(Group group);

  /// Waits until all frames for the peer are sent, or its connection has ended. All calls together wait a second at
  /// most.
  void flush(int peer);

  /// Sleeps until a socket is ready, for a millisecond at most.
  void wait_for_activity();

  /// Why the connection to a peer has ended; empty if it has not, or if the peer had closed the group before.
  std::string failure(Group group, int peer);

  enum class Peers : std::uint8_t { close_too, have_left };
  /// Whether a peer has closed the group, or its connection has ended.
  bool has_closed(Group group, int peer);

  /// Notifies the members that this rank has closed the group. If it is the last open group, waits a little for the
  /// members to close it, too, unless they have left it, and closes the connections. From then on no memory of the
  /// group is accessed, and none of its requests ends.
  void close(Group group, Peers peers);
  /// Closes the group if it is open, without notices, and frees its requests.
  void drop(Group group);

 private:
  struct GroupState {
    explicit GroupState(int world_size) : left(static_cast<std::size_t>(world_size)) {}
    Matcher matching;
    std::vector<int> members;
    std::vector<bool> left;  // ranks that have closed it
    bool is_open = false;    // here
    bool is_closed = false;
    bool is_dropped = false;
  };
  struct RtsSent {
    RequestState* request;
    Group group;
    bool detached = false;
  };
  struct Incoming {         // a message in data frames
    RequestState* request;  // null: discarded
    Group group;
    std::size_t left;
  };

  Connection::Destination destination_of(int peer, const Frame& frame) override;
  void take(int peer, const Frame& frame, const Connection::Destination& place) override;

  GroupState& state(Group group);
  Connection& to(int peer) { return connections_[index_[static_cast<std::size_t>(peer)]]; }
  void advance();
  void advance_all();
  void request_data(const Frame& offer, int source, RequestState& record);
  void handle_eager(const Frame& frame, const Connection::Destination& place);
  void handle_rts(int peer, const Frame& frame);
  void handle_data(int peer, const Frame& frame);
  void send_to_self(Group group, Bytes bytes, int tag);
  void note_failures();
  void wait_for_peers_to_close(const GroupState& group);
  bool has_closed(const GroupState& group, int peer);
  bool all_closed(const GroupState& group);
  void end(Group group, GroupState& ending);
  void erase_closed();

  const int rank_;
  std::vector<std::string> peers_;
  std::mutex mutex_;
  Poller poller_;
  std::deque<Connection> connections_;
  std::vector<std::size_t> index_;    // of connections, by rank
  std::vector<bool> noted_failures_;  // failures whose requests have been removed, by connection
  std::unordered_map<Group, GroupState> groups_;
  int n_open_ = 0;
  std::unordered_map<std::uint32_t, RtsSent> rts_sent_;
  std::vector<std::unordered_map<std::uint32_t, Incoming>> incoming_;  // by rank of the source and its id
  std::uint32_t next_id_ = 0;
  Clock::duration flush_left_ = std::chrono::seconds(1);
  Clock::time_point last_listened_ = Clock::now();
};

}  // namespace samestep::tcp
