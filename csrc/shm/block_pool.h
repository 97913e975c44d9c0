#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace samestep {

/// Manages which parts of some ranges are blocks in use. A pure data structure: it never accesses the memory.
///
/// Sizes are whole pages, eight for each doubling, so at most an eighth is wasted. A freed block joins the list of
/// its size and is the next to be reused. If no list and no free range can serve a request, all lists are merged into
/// ranges, from which blocks of other sizes are cut. Lists take constant time, ranges logarithmic time.
///
/// After a fork (`note_fork`) a block may be visible to a child: when it is freed, it is held until the child has
/// ended.
class BlockPool {
 public:
  static constexpr std::size_t kPage = 4096;
  /// A handle is the number of a range, followed by an offset of so many bits.
  static constexpr int kOffsetBits = 40;
  static constexpr std::size_t kMaxBytes = std::size_t{1} << 39;

  struct Range {
    std::uint64_t handle;
    std::size_t nbytes;
  };
  struct Usage {
    std::size_t blocks = 0;     ///< in use
    std::size_t used = 0;       ///< their bytes
    std::size_t held = 0;       ///< freed bytes that a child may still see
    std::size_t available = 0;  ///< free bytes
  };

  /// Size of the block that `take(nbytes)` returns. `nbytes` is at most `kMaxBytes`.
  static std::size_t size_for(std::size_t nbytes);

  /// Adds a range. `handle` and `nbytes` are multiples of the page size.
  void add(std::uint64_t handle, std::size_t nbytes);
  /// Allocates a block of `size_for(nbytes)` bytes, if there is one.
  std::optional<std::uint64_t> take(std::size_t nbytes);
  /// Frees a block. False if no block in use begins here.
  bool give(std::uint64_t handle);
  /// Size of the block in use that begins here, else 0.
  std::size_t size_at(std::uint64_t handle) const;

  /// All free ranges, merged, the largest first.
  std::vector<Range> free_ranges();

  /// Records that a child has been forked, which sees the blocks in use. Returns its number.
  std::uint32_t note_fork();
  /// The recorded children that are still alive, in ascending order.
  void set_children(std::span<const std::uint32_t> living);

  const Usage& usage() const { return usage_; }

 private:
  static constexpr std::size_t kSizes = 256;
  struct Block {
    std::uint8_t size;   // number of the size
    std::uint32_t born;  // children with higher numbers see it
  };
  struct Held {
    std::uint64_t handle;
    Block block;
    std::uint32_t freed;  // children with higher numbers do not
  };
  static std::size_t size_class_of(std::size_t nbytes);
  static std::size_t nbytes_of(std::size_t number);
  std::optional<std::uint64_t> take_from_ranges(std::size_t nbytes);
  void merge();
  void insert(std::uint64_t handle, std::size_t nbytes);
  void erase(std::map<std::uint64_t, std::size_t>::iterator range);
  bool is_seen(std::uint32_t born, std::uint32_t freed) const;

  std::array<std::vector<std::uint64_t>, kSizes> lists_;     // by number of the size; the last entry was freed last
  std::map<std::uint64_t, std::size_t> by_handle_;           // free ranges
  std::set<std::pair<std::size_t, std::uint64_t>> by_size_;  // the same
  std::unordered_map<std::uint64_t, Block> in_use_;
  std::vector<Held> held_;
  std::vector<std::uint32_t> children_;
  std::uint32_t n_forks_ = 0;
  Usage usage_;
};

}  // namespace samestep
