#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exchange/movement.h"
#include "node/direct_movement.h"
#include "node/moment.h"
#include "node/node_group.h"
#include "node/staged_movement.h"

namespace samestep {

/// A collective that only moves data between the ranks of a host. Short runs of bytes lie behind the announcements. Of
/// a long one each side announces where it is; what both ends then see decides:
///   direct:  the receiver copies it straight from the one buffer into the other;
///   divided: where all comes from one rank or goes to one, that rank takes a fair share of the copies;
///   staged:  see StagedMovement, where neither end lies in shared memory.
/// Where neither can reach the other's memory and nothing can be staged it goes as a message.
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
  using Way = WayChoice::Way;

  /// Where ranks need not agree on sizes, each tells what it sends and what it expects.
  struct Sizes {
    std::uint64_t out, in;
  };
  /// Where they do, each tells of the whole operation:
  struct Start {
    Way way;               // of rank 0 counts
    bool first_is_staged;  // the first windows lie in this rank's stage
    Moment begun;
  };
  /// What a rank tells a peer of the long runs between them.
  struct Places {
    std::uint64_t out, in;  // see Host::place_of; 0 where there is none
  };
  /// One end of a long run.
  struct End {
    int peer;
    bool outgoing;
    std::byte* mine;
    std::uint64_t my_place, their_place;
    std::size_t nbytes;
    bool first_is_staged;
  };

  bool is_long(const Route& route) { return !is_short(route.out_nbytes) || !is_short(route.in_nbytes); }
  bool is_private(const std::byte* data, std::size_t nbytes);
  void choose_way();
  /// The ways that are open to an operation whose ends are not all in shared memory. Ends with none.
  std::vector<Way> open_ways() const;
  void stage_ahead(bool past_caches);
  void meet_peer(int peer, const Route& route);
  /// Takes a value from the front of what a peer announced.
  template <class T>
  T take(int peer, Meeting::Bytes& data);
  /// Decides how a long run goes.
  void begin_run(const End& end);
  void copy_directly(const End& end);
  StagedMovement& staged();
  /// What this rank has copied so far, in pieces.
  std::uint64_t steps() const { return direct_.steps() + (staged_ ? staged_->steps() : 0); }
  /// What goes from this rank to itself: last, so that peers find what they copy in the caches it was written to.
  void copy_own();
  /// True; or throws what was wrong.
  bool end();
  bool peer_is_done(int peer);

  std::shared_ptr<NodeGroup> group_;
  bool has_long_ = false;
  std::size_t longest_ = 0;
  bool ragged_;
  bool can_stage_;
  std::size_t touched_;  // bytes of all ranks, about, that take part
  Start start_{Way::divided, false, {}};
  Moment all_begun_;      // of those that this rank has met
  std::string mismatch_;  // with one of the peers; told when the others have been served
  DirectMovement direct_;
  std::optional<StagedMovement> staged_;
  bool timed_ = false;
  bool mine_are_done_ = false;
};

}  // namespace samestep
