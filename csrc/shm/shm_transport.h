#pragma once

#include <deque>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "communicator/tag_matcher.h"
#include "shm/event_count_waiter.h"
#include "shm/local_peers.h"
#include "shm/shm_region.h"
#include "transport/transport.h"

namespace samestep {

/// Messages between the ranks of a group over rings in shared memory, one ring for each ordered pair.
///
/// Short messages are eager: they are copied into the ring and out of it. For a long message the sender sends an RTS
/// with its address, and the receiver reads it by CMA once a receive matches. If CMA is refused, the receiver answers
/// with a CTS, and the sender sends data frames through the ring.
class ShmTransport final : public Transport {
 public:
  /// `members`: by rank of the group, the rank on the host.
  ShmTransport(std::shared_ptr<ShmRegion> region, std::shared_ptr<LocalPeers> peers, std::vector<int> members,
               int rank);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::string_view name() const override { return "shm"; }
  std::size_t max_message() const override { return SIZE_MAX; }
  std::size_t eager_limit() const override { return max_eager(); }
  bool is_eager(const void* data, std::size_t nbytes) const override;

  using Bytes = std::span<const std::byte>;
  /// Sends a message of `head` and `body` if it is eager and the ring has room for it now.
  bool send_inline(Bytes head, Bytes body, int dest, int tag);
  /// The bytes of the next message from `source` if it is an eager one with `tag`, and no earlier one is unexpected;
  /// empty otherwise. Valid until `consume`.
  Bytes peek(int source, int tag);
  void consume(int source);

  Request send(const void* data, std::size_t nbytes, int dest, int tag) override;
  Request receive(void* data, std::size_t capacity, int source, int tag) override;
  bool test(Request& request, Envelope* envelope) override;
  bool cancel(Request& request) override;
  bool probe(int tag, Envelope& envelope) override;
  std::unique_ptr<Transport> subset(std::span<const int> ranks, std::uint32_t number) override;
  void close() override;
  bool forgets_at_close() const override { return true; }
  std::vector<PeerFailure> failed_peers() override;
  std::unique_ptr<Waiter> make_waiter() override { return std::make_unique<EventCountWaiter>(region_, rank_); }

 private:
  enum class Kind : std::uint32_t {
    padding,  ///< unused: the end of the ring is too short for the next frame
    eager,    ///< a message
    rts,      ///< the id and address of a long message
    fin,      ///< the receiver has read all of message `id`
    cts,      ///< send message `id` in data frames
    data,     ///< the next bytes of message `id`
  };
  struct Frame {
    std::uint32_t nbytes;  ///< of the frame with its payload, a multiple of 64
    Kind kind;
    std::int32_t tag;
    std::uint32_t id;
    std::uint64_t length;  ///< of the message, or of the payload of a data frame
    std::uint64_t address;
  };
  struct RequestState {
    bool receives = false;
    bool ended = false;
    int peer = -1, tag = -1;
    const std::byte* from = nullptr;
    std::byte* into = nullptr;
    std::size_t nbytes = 0;  // of the message to send, or capacity of the receive
    std::size_t moved = 0;
    Envelope envelope;
  };
  struct UnexpectedMessage {  // no receive has matched it
    int source, tag;
    std::size_t length;
    std::vector<std::byte> bytes;
    std::uint32_t id;
    std::uint64_t address;  // 0: the message is in `bytes`
  };
  struct Outgoing {
    Frame frame;
    Bytes bytes;
    RequestState* request;  // completes when this is written, if not null
  };

  std::size_t max_eager() const { return region_->ring_nbytes() / 3 / 64 * 64 - sizeof(Frame); }
  RequestState* new_request();
  void drop(RequestState* record);
  void post(int dest, const Outgoing& outgoing);
  bool write(int dest, const Frame& frame, Bytes bytes, Bytes more = {});
  void sent(const Outgoing& outgoing);
  void flush(int dest);
  void advance();
  void read(int source);
  void handle_frame(int source, const Frame& frame, const std::byte* bytes);
  void add_unexpected(UnexpectedMessage arrived, const std::byte* bytes);
  void deliver(RequestState& record, const UnexpectedMessage& arrived, const std::byte* bytes);
  bool fetch_rendezvous(RequestState& record, const UnexpectedMessage& arrived);
  void receive_data(int source, const Frame& frame, const std::byte* bytes);
  void send_fin(int source, std::uint32_t id);
  void send_data(RequestState& record, std::uint32_t id);
  void complete_rts(std::uint32_t id);

  std::shared_ptr<ShmRegion> region_;
  std::shared_ptr<LocalPeers> peers_;
  std::vector<int> members_;
  int rank_;
  std::unordered_map<RequestState*, std::unique_ptr<RequestState>> requests_;
  TagMatcher<RequestState*, UnexpectedMessage> matcher_;
  std::vector<std::deque<Outgoing>> outgoing_;       // by rank: frames for which the ring had no room
  std::map<std::uint32_t, RequestState*> rts_sent_;  // by id
  std::map<std::pair<int, std::uint32_t>, RequestState*> in_data_phase_;  // by source and id
  std::uint32_t next_id_ = 0;
  std::vector<bool> reported_;  // by rank: whether `failed_peers` has reported it
};

}  // namespace samestep
