#pragma once

#include <memory>
#include <string>
#include <vector>

#include "exchange/movement.h"
#include "node/node_group.h"

namespace samestep {

/// A collective that only moves data between the ranks of a host. Short runs of bytes lie behind the announcements;
/// of a long one each side announces where it is, and then either side, or both by turns, copies it straight from
/// the one buffer into the other. Where neither can reach the other's memory it goes as a message.
class NodeMovement final : public Movement {
 public:
  NodeMovement(std::shared_ptr<Engine> engine, const Signature& signature, std::vector<Route> routes,
               std::shared_ptr<NodeGroup> group);

 protected:
  void announce(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  bool keeps_meeting() const override { return has_long_; }
  std::vector<int> awaited() override;

 private:
  /// Where ranks need not agree on sizes, each tells what it sends and what it expects.
  struct Sizes {
    std::uint64_t out, in;
  };
  /// What a rank tells a peer of the long runs between them.
  struct Places {
    std::uint64_t out, in;  // see Host::place_of; 0 where there is none
  };
  /// A run of bytes of which this rank copies some chunks.
  struct Copy {
    int peer;
    bool outgoing;
    std::byte* mine;
    std::uint64_t theirs;
    std::size_t nbytes;
    std::size_t first, step;  // chunks

    /// Short ones where ranks take turns; else long ones, as each call of the kernel costs a microsecond.
    std::size_t chunk_nbytes() const { return step > 1 ? Crossings::kChunkBytes : 1 << 20; }
  };

  bool is_long(const Route& route) { return !is_short(route.out_nbytes) || !is_short(route.in_nbytes); }
  void meet_peer(int peer, const Route& route);
  /// Takes a value from the front of what a peer announced.
  template <class T>
  T take(int peer, Meeting::Bytes& data);
  /// Decides who copies a long run: appends this rank's share, or starts a message.
  void divide(int peer, bool outgoing, std::byte* mine, std::uint64_t my_place, std::uint64_t their_place,
              std::size_t nbytes);
  void copy_chunk(const Copy& copy, std::size_t chunk);
  bool work_on_copies();
  /// What goes from this rank to itself: last, so that peers find what they copy in the caches it was written to.
  void copy_own();
  /// True; or throws what was wrong.
  bool end();
  bool peer_is_done(int peer);

  std::shared_ptr<NodeGroup> group_;
  bool has_long_ = false;
  bool ragged_;
  std::string mismatch_;  // with one of the peers; told when the others have been served
  std::vector<Copy> copies_;
  std::size_t at_ = 0;     // of copies_
  std::size_t chunk_ = 0;  // of that copy
  bool mine_are_done_ = false;
  bool stuck_ = false;  // for good, see Unreachable
};

}  // namespace samestep
