#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace model {
namespace {

bool acquires(std::memory_order order) {
  return order != std::memory_order_relaxed && order != std::memory_order_release;
}
bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel || order == std::memory_order_seq_cst;
}

template <class Clock>
void join(Clock& into, const Clock& other) {
  for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

constexpr std::size_t kEnd = 64;           // bytes of a long run that are looked at
constexpr std::size_t kScanned = 8 << 10;  // up to here all of them are, for atomic words

}  // namespace

Memory::Memory()
    : base_(static_cast<std::byte*>(
          ::mmap(nullptr, kNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
      words_(kNbytes / 8),
      granules_(kNbytes / 8) {
  reset();
}

Memory::~Memory() { ::munmap(base_, kNbytes); }

void Memory::reset() {
  for (const std::uint32_t word : accessed_words_) {
    words_[word] = {};
    std::memset(base_ + std::size_t{word} * 8, 0, 8);
  }
  for (const std::uint32_t granule : accessed_granules_) granules_[granule] = {};
  accessed_words_.clear();
  accessed_granules_.clear();
  values_ = 0;
  for (std::size_t rank = 0; rank < clocks_.size(); ++rank) {
    clocks_[rank] = {};
    clocks_[rank][rank] = 1;
  }
}

std::uint64_t Memory::state() const {
  std::uint64_t hash = values_;
  for (const Clock& clock : clocks_) {
    for (const std::uint32_t time : clock) hash = mix(hash, time);
  }
  return hash;
}

Memory::AtomicWord& Memory::access(std::size_t word) {
  AtomicWord& w = words_[word];
  if (w.at == 0) {
    accessed_words_.push_back(static_cast<std::uint32_t>(word));
    w.at = 1;
    w.writer = -1;
  }
  return w;
}

bool Memory::load(int rank, std::size_t word, std::memory_order order) {
  AtomicWord& w = access(word);
  if (acquires(order)) {
    join(clocks_[index(rank)], w.released);
  } else if (w.writer >= 0 && w.writer != rank && clocks_[index(rank)][index(w.writer)] < w.at) {
    violated("a relaxed load may meet a store of rank " + std::to_string(w.writer));
  }
  const bool news = w.seen[index(rank)] != w.id;
  w.seen[index(rank)] = w.id;
  return news;
}

void Memory::store(int rank, std::size_t word, std::memory_order order, std::uint64_t id) {
  AtomicWord& w = access(word);
  w.released = releases(order) ? clocks_[index(rank)] : Clock{};
  w.id = w.seen[index(rank)] = id;
  w.writer = rank;
  w.at = clocks_[index(rank)][index(rank)];
  tick(rank);
}

void Memory::update(int rank, std::size_t word, std::memory_order order, std::uint64_t id) {
  AtomicWord& w = access(word);
  if (acquires(order)) join(clocks_[index(rank)], w.released);
  if (releases(order)) join(w.released, clocks_[index(rank)]);
  w.id = w.seen[index(rank)] = id;
  w.writer = rank;
  w.at = clocks_[index(rank)][index(rank)];
  tick(rank);
}

void Memory::check(int rank, std::size_t granule, bool writes) {
  Granule& g = granules_[granule];
  Clock& mine = clocks_[index(rank)];
  if (g.writer == 0 && g.withdrawn_by == 0 && g.reads == Clock{}) {
    accessed_granules_.push_back(static_cast<std::uint32_t>(granule));
  }
  const int owner = g.withdrawn_by - 1;
  if (owner >= 0 && owner != rank && mine[index(owner)] >= g.withdrawn) {
    violated("rank " + std::to_string(rank) + " touches a buffer that rank " + std::to_string(owner) +
             " has withdrawn, and could know it");
  }
  if (writes && g.closed_by != 0 && g.closed_by - 1 != rank) {
    violated("rank " + std::to_string(rank) + " writes into a buffer of rank " + std::to_string(g.closed_by - 1) +
             ", which has got its error");
  }
  const int writer = g.writer - 1;
  if (writer >= 0 && writer != rank && mine[index(writer)] < g.write) {
    violated("rank " + std::to_string(rank) + (writes ? " overwrites" : " reads") + " what rank " +
             std::to_string(writer) + " may be writing");
  }
  if (!writes) {
    g.reads[index(rank)] = mine[index(rank)];
    return;
  }
  for (int peer = 0; peer < kMaxRanks; ++peer) {
    if (peer != rank && mine[index(peer)] < g.reads[index(peer)]) {
      violated("rank " + std::to_string(rank) + " overwrites what rank " + std::to_string(peer) + " may be reading");
    }
  }
  g.writer = static_cast<std::int8_t>(rank + 1);
  g.write = mine[index(rank)];
}

void Memory::plain(int rank, const volatile void* address, std::size_t nbytes, bool writes) {
  if (nbytes == 0) return;
  if (writes && nbytes <= kScanned) {
    const std::size_t end = word_of(static_cast<const volatile std::byte*>(address) + nbytes - 1);
    for (std::size_t word = word_of(address); word <= end; ++word) {
      if (words_[word].at != 0) violated("rank " + std::to_string(rank) + " writes over an atomic word");
    }
  }
  if (nbytes > 4 * kEnd) {
    plain(rank, address, kEnd, writes);
    return plain(rank, static_cast<const volatile std::byte*>(address) + (nbytes - kEnd), kEnd, writes);
  }
  const std::size_t first = word_of(address);
  const std::size_t last = word_of(static_cast<const volatile std::byte*>(address) + nbytes - 1);
  for (std::size_t granule = first; granule <= last; ++granule) check(rank, granule, writes);
}

void Memory::withdraw(int rank, const void* address, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 8) {
    Granule& g = granules_[word_of(static_cast<const std::byte*>(address) + i)];
    accessed_granules_.push_back(static_cast<std::uint32_t>(word_of(address) + i / 8));
    g.withdrawn_by = static_cast<std::int8_t>(rank + 1);
    g.withdrawn = clocks_[index(rank)][index(rank)];
  }
}

void Memory::close_to_writes(int rank, const void* address, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 8) {
    const std::size_t granule = word_of(static_cast<const std::byte*>(address) + i);
    accessed_granules_.push_back(static_cast<std::uint32_t>(granule));
    granules_[granule].closed_by = static_cast<std::int8_t>(rank + 1);
  }
}

}  // namespace model
