#pragma once

#include <chrono>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "exchange/messenger.h"
#include "node/arena.h"
#include "node/host.h"
#include "node/nap_at_bell.h"
#include "node/way_choice.h"

namespace samestep {

/// Messages between the ranks of a group over rings in shared memory, one ring for each ordered pair.
///
/// A short message is copied into the ring and out of it. Of a long one only the address travels: the receiver pulls
/// it through the kernel once it wants it. Or it asks for it, and it comes in pieces through the ring: where the kernel
/// refuses, and where both ends wait and this way is the faster one. The receiver of pieces that do not come pulls the
/// rest.
class Mailbox final : public Messenger {
 public:
  /// `members`: by rank of the group, ranks of the host.
  Mailbox(std::shared_ptr<Arena> arena, std::shared_ptr<Host> host, std::vector<int> members, int rank);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::string_view engine() const override { return "node"; }
  std::size_t max_message() const override { return SIZE_MAX; }
  std::size_t short_message() const override { return longest_message(); }
  bool is_short(const void* data, std::size_t nbytes) const override;

  using Bytes = std::span<const std::byte>;
  /// Sends a message of `head` and `body` if it is short and there is room for it now.
  bool send_at_once(Bytes head, Bytes body, int dest, int tag);
  /// The bytes of the next message from `source` if it is a short one with `tag`, and no other came before; empty
  /// otherwise. They are valid until `skip`.
  Bytes peek(int source, int tag);
  void skip(int source);

  void set_oversubscribed(bool oversubscribed) override { oversubscribed_ = oversubscribed; }
  Request send(const void* data, std::size_t nbytes, int dest, int tag) override;
  Request receive(void* data, std::size_t capacity, int source, int tag) override;
  bool test(Request& request, Envelope* envelope) override;
  bool cancel(Request& request) override;
  bool probe(int tag, Envelope& envelope) override;
  std::unique_ptr<Messenger> subset(std::span<const int> ranks) override;
  void close() override {}
  std::vector<Loss> losses() override;
  std::unique_ptr<Nap> nap() override { return std::make_unique<NapAtBell>(arena_, rank_); }

 private:
  enum class Kind : std::uint32_t {
    fill,     ///< nothing: the rest of the ring is too short for the next frame
    message,  ///< with its bytes
    offer,    ///< of a long message: id and address
    helped,   ///< the same, and its sender waits for it
    taken,    ///< all of the offered message `id` is here
    wanted,   ///< send the offered message `id` in pieces
    piece,    ///< of message `id`, the next bytes
  };
  struct Frame {
    std::uint32_t nbytes;  ///< of the frame and what is behind it, a multiple of 64
    Kind kind;
    std::int32_t tag;
    std::uint32_t id;
    std::uint64_t length;  ///< of the message, or of a piece
    std::uint64_t address;
  };
  struct Record {  // a request
    bool receives = false;
    bool ended = false;
    int peer = -1, tag = -1;
    const std::byte* from = nullptr;
    std::byte* into = nullptr;
    std::size_t nbytes = 0;  // of the message sent, or room for the one received
    std::size_t moved = 0;
    bool is_waited_for = false;
    // Of a message that comes in pieces:
    bool in_pieces = false;
    std::uint32_t id = 0;
    std::uint64_t address = 0;
    int idle_tests = 0;  // since the last piece
    std::chrono::steady_clock::time_point asked;
    Envelope envelope;
  };
  struct Arrived {  // a message that no receive has met
    int source, tag;
    std::size_t length;
    std::vector<std::byte> bytes;
    std::uint32_t id;
    std::uint64_t address;  // 0: it is in `bytes`
    bool is_helped;
  };
  struct Outgoing {
    Frame frame;
    Bytes bytes;
    Record* record;  // ends with it, if not null
  };

  std::size_t longest_message() const { return arena_->ring_nbytes() / 3 / 64 * 64 - sizeof(Frame); }
  Record* new_record();
  void drop(Record* record);
  void post(int dest, const Outgoing& outgoing);
  bool write(int dest, const Frame& frame, Bytes bytes, Bytes more = {});
  void sent(const Outgoing& outgoing);
  void flush(int dest);
  void advance();
  void read(int source);
  void take_frame(int source, const Frame& frame, const std::byte* bytes);
  void arrive(Arrived arrived, const std::byte* bytes);
  void deliver(Record& record, const Arrived& arrived, const std::byte* bytes);
  bool fetch(Record& record, const Arrived& arrived);
  void pull_rest(Record& record);
  void take_piece(int source, const Frame& frame, const std::byte* bytes);
  void end_pieces(Record& record);
  void tell_taken(int source, std::uint32_t id);
  void send_pieces(Record& record, std::uint32_t id);
  void end_offer(int dest, std::uint32_t id);
  static bool matches(const Record& record, const Arrived& arrived);

  std::shared_ptr<Arena> arena_;
  std::shared_ptr<Host> host_;
  std::vector<int> members_;
  int rank_;
  bool oversubscribed_ = false;
  std::unordered_map<Record*, std::unique_ptr<Record>> records_;
  std::list<Record*> posted_;                                   // receives that no message has met, in order
  std::list<Arrived> arrived_;                                  // messages that no receive has met, in order
  std::vector<std::deque<Outgoing>> outgoing_;                  // by rank: what the ring had no room for
  std::map<std::uint32_t, Record*> offered_;                    // by id
  std::map<std::pair<int, std::uint32_t>, Record*> in_pieces_;  // by source and id
  std::uint32_t next_id_ = 0;
  WayChoice ways_;              // of long messages that both ends wait for
  std::vector<bool> reported_;  // ranks whose end `losses` has told
};

}  // namespace samestep
