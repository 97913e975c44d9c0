#pragma once

#include <array>
#include <memory>

#include "exchange/meeting.h"
#include "node/arena.h"

namespace samestep {

/// A meeting in shared memory: each rank writes one line, which all others read. Few bytes lie in the line itself,
/// more in a block beside it; nobody copies them.
class LineMeeting final : public Meeting {
 public:
  LineMeeting(std::shared_ptr<Arena> arena, int rank);

  std::size_t limit() const override { return limit_; }
  std::size_t limit_of_parts() const override { return limit_of_parts_; }
  // Between two ranks stages carry longer ones.
  std::size_t limit_of_one() const override { return size_ > 2 ? Arena::kBlockBytes : limit_of_parts_; }
  bool has_room(std::uint64_t sequence) override;
  void announce(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) override;
  void announce_parts(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes> parts,
                      Bytes prefix) override;
  bool complete(std::uint64_t sequence) override;
  Header header(std::uint64_t sequence, int peer) const override;
  Bytes data(std::uint64_t sequence, int peer) const override;
  void release(std::uint64_t sequence) override;
  std::vector<int> missing(std::uint64_t sequence) override;
  void abandon() override {}
  void leave(std::uint64_t first_missing, const std::string& reason) override;

  /// Do all ranks still take part in this operation?
  bool all_here(std::uint64_t sequence) const;

  /// This rank's announcements say from now on that it runs on this CPU, so that others know whom they keep from it; -1
  /// is unknown.
  void runs_on(int cpu) { cpu_ = static_cast<std::uint64_t>(cpu + 1); }
  /// May a rank that has not announced this operation need the CPU this rank runs on?
  bool keeps_others_from(std::uint64_t sequence) const;

  /// Has this rank released all operations before this one?
  bool is_next(std::uint64_t sequence) const { return released_ == sequence; }

 private:
  void look_who_released();
  std::byte* take_block(std::uint64_t sequence, std::size_t nbytes);
  void publish(std::uint64_t sequence, std::uint64_t digest, std::size_t nbytes, Arena::Where where);

  std::shared_ptr<Arena> arena_;
  int rank_;
  int size_;
  std::size_t limit_;
  std::size_t limit_of_parts_;
  std::uint64_t announced_ = 0;        // operations of this rank
  std::uint64_t released_ = 0;         // by this rank
  std::uint64_t released_by_all_ = 0;  // at least
  const std::uint64_t look_after_;     // operations, from which on a waiting rank looks who has released
  std::uint64_t n_blocks_ = 0;         // taken so far
  std::array<std::uint64_t, Arena::kBlocks> users_{};  // operation that took each block, plus one
  std::uint64_t cpu_ = 0;                              // plus one
  std::size_t expected_in_block_ = 0;                  // of the next announcement
  int scanned_ = 1;  // of operation `released_`: peers rank+1 .. rank+scanned_-1 have come
};

}  // namespace samestep
