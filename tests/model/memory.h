#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace model {

inline constexpr int kMaxRanks = 3;

/// Reports a violation: prints it with the accesses that led there, and ends the process with status 1.
[[noreturn]] void violated(const std::string& what);

/// A number that depends on both and hides neither.
constexpr std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15u + (a << 6) + (a >> 2))) * 0xbf58476d1ce4e5b9u;
  return x ^ (x >> 29);
}

/// The memory that the ranks of a test share, and who may rely on whose accesses: a vector clock for each rank, for
/// each release store and for each plain access, after the rules of C++ for acquire and release.
///
/// A plain access that is not ordered with a conflicting one of another rank is a violation. Accesses are remembered
/// for each 8 bytes; of long runs only both ends.
class Memory {
 public:
  static constexpr std::size_t kNbytes = std::size_t{12} << 20;

  Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  std::byte* base() const { return base_; }
  bool holds(const volatile void* address) const {
    const auto* const at = static_cast<const std::byte*>(const_cast<const void*>(address));
    return at >= base_ && at < base_ + kNbytes;
  }
  std::size_t word_of(const volatile void* address) const {
    return static_cast<std::size_t>(static_cast<const std::byte*>(const_cast<const void*>(address)) - base_) / 8;
  }

  /// As it was before the first access.
  void reset();

  // Of atomic words. `load`: has the rank not yet seen this store?
  bool load(int rank, std::size_t word, std::memory_order order);
  void store(int rank, std::size_t word, std::memory_order order, std::uint64_t id);
  void update(int rank, std::size_t word, std::memory_order order, std::uint64_t id);
  bool has_news(int rank, std::size_t word) const { return words_[word].seen[index(rank)] != words_[word].id; }
  std::uint64_t latest(std::size_t word) const { return words_[word].id; }
  std::uint64_t seen(int rank, std::size_t word) const { return words_[word].seen[index(rank)]; }

  /// Atomic words change only so; `state` depends on what all of them hold and on who may rely on whom.
  void note_value(std::size_t word, std::uint64_t before, std::uint64_t after) {
    values_ += mix(word, after) - (before == 0 ? 0 : mix(word, before));
  }
  std::uint64_t state() const;

  /// Of anything else.
  void plain(int rank, const volatile void* address, std::size_t nbytes, bool writes);
  /// The rank gives no more access to these bytes: a rank that can know it must not access them.
  void withdraw(int rank, const void* address, std::size_t nbytes);
  /// From now on no other rank may write these bytes, whatever it can know.
  void close_to_writes(int rank, const void* address, std::size_t nbytes);

 private:
  using Clock = std::array<std::uint32_t, kMaxRanks>;
  struct AtomicWord {
    Clock released;    // what an acquire load of it brings
    std::uint64_t id;  // of the last store, unique
    std::array<std::uint64_t, kMaxRanks> seen;
    std::uint32_t at;  // of the writer's clock
    int writer;
  };
  struct Granule {
    Clock reads;
    std::uint32_t write;
    std::int8_t writer, withdrawn_by, closed_by;  // plus one
    std::uint32_t withdrawn;
  };

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  AtomicWord& access(std::size_t word);
  void tick(int rank) { ++clocks_[index(rank)][index(rank)]; }
  void check(int rank, std::size_t granule, bool writes);

  std::byte* base_;
  std::vector<AtomicWord> words_;
  std::vector<Granule> granules_;
  std::vector<std::uint32_t> accessed_words_, accessed_granules_;
  std::array<Clock, kMaxRanks> clocks_{};
  std::uint64_t values_ = 0;
};

}  // namespace model
