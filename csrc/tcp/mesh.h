#pragma once

#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "os/poller.h"
#include "tcp/connection.h"
#include "tcp/frame.h"
#include "tcp/matching.h"

namespace samestep::tcp {

/// The connections of one rank to all others of the world, which all groups share. Ranks here are those of the world.
///
/// No thread of its own: whoever waits calls `advance`. Groups may be used by several threads, since each call holds
/// the mesh's mutex.
class Mesh final : Connection::Receiver {
 public:
  struct Peer {
    Fd fd;              ///< connected; none for this rank itself
    std::string where;  ///< for texts, such as "node1 (10.0.0.7:41021)"
  };
  Mesh(int rank, std::vector<Peer> peers);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }

  using Group = std::uint64_t;
  /// Until `drop`. Messages of the group may have come before.
  void open(Group group, std::vector<int> members);
  Record* send(Group group, Bytes bytes, int dest, int tag);
  Record* receive(Group group, void* data, std::size_t room, int source, int tag);
  /// True once it has ended; then it is gone, and `met` has been told. Throws Error for a message that did not fit.
  bool test(Group group, Record* record, Messenger::Envelope& met);
  /// True if the receive has ended without a message. Its memory is no longer written.
  bool cancel(Group group, Record* record);
  bool probe(Group group, int tag, Messenger::Envelope& from);

  /// Waits until all that was sent to the peer has left, or its connection has ended; in all calls a second at most.
  void flush(int peer);

  /// Sleeps until there is something to move, for a millisecond at most.
  void rest();

  /// Why the connection to a peer has ended; empty where it has not, or the peer had closed the group before.
  std::string loss(Group group, int peer);

  /// Tells the members that this rank has closed the group. Where it is the last one, waits a little for them to do the
  /// same and closes the connections. From then on no memory of the group is touched, and nothing of it ends any more.
  void close(Group group);
  /// Closes the group if need be, without a word, and forgets its requests.
  void drop(Group group);

 private:
  struct GroupState {
    explicit GroupState(int world_size) : matching(world_size), left(static_cast<std::size_t>(world_size)) {}
    Matching matching;
    std::vector<int> members;
    std::vector<bool> left;  // ranks that have closed it
    bool is_open = false;    // here
    bool is_closed = false;
    bool is_dropped = false;
  };
  struct Offer {
    Record* record;
    Group group;
  };
  struct Incoming {  // a message in pieces
    Record* record;  // null: thrown away
    Group group;
    std::size_t left;
  };

  Connection::Place place_for(int peer, const Frame& frame) override;
  void take(int peer, const Frame& frame, const Connection::Place& place) override;

  GroupState& state(Group group);
  Connection& to(int peer) { return connections_[index_[static_cast<std::size_t>(peer)]]; }
  void advance();
  void advance_all();
  void want(const Frame& offer, int source, Record& record);
  void take_message(const Frame& frame, const Connection::Place& place);
  void take_offer(int peer, const Frame& frame);
  void take_piece(int peer, const Frame& frame);
  void send_to_self(Group group, Bytes bytes, int tag);
  void note_losses();
  void linger(const GroupState& group);
  bool has_gone(const GroupState& group, int peer);
  bool all_gone(const GroupState& group);
  void end(Group group, GroupState& ending);
  void erase_gone();

  const int rank_;
  std::vector<std::string> peers_;
  std::mutex mutex_;
  Poller poller_;
  std::deque<Connection> connections_;
  std::vector<std::size_t> index_;  // of connections, by rank
  std::vector<bool> noted_;         // losses whose traces are gone, by connection
  std::unordered_map<Group, GroupState> groups_;
  int n_open_ = 0;
  std::unordered_map<std::uint32_t, Offer> offered_;
  std::vector<std::unordered_map<std::uint32_t, Incoming>> incoming_;  // by rank of the source and its id
  std::uint32_t next_id_ = 0;
  Clock::duration flush_left_ = std::chrono::seconds(1);
  Clock::time_point last_listened_ = Clock::now();
};

}  // namespace samestep::tcp
