#pragma once

#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "shm/local_peers.h"
#include "shm/shared_heap.h"

namespace samestep {

/// How the ranks of a test reach each other's buffers.
/// `heap`: only what lies in the ranks' shared heaps.
enum class Reach { none, cma, shared, heap };

/// A host whose ranks are threads of one process, for tests: all memory is shared, the host may pretend it is not.
class ThreadPeers final : public LocalPeers {
 public:
  /// What the ranks have in common.
  struct SharedState {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::uint64_t, std::vector<std::shared_ptr<std::byte>>> regions;  // by group, in order of making
    std::vector<bool> dead = std::vector<bool>(8);
  };

  ThreadPeers(std::shared_ptr<SharedState> state, int rank, int size, Reach reach)
      : state_(std::move(state)), rank_(rank), size_(size), reach_(reach) {
    if (reach == Reach::heap) heap_ = std::make_shared<SharedHeap>();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::shared_ptr<std::byte> share(std::span<const int> members, std::size_t nbytes, std::uint64_t number,
                                   const Deadline&) override {
    std::unique_lock lock(state_->mutex);
    auto& made = state_->regions[number];
    const std::size_t mine = taken_[number]++;
    if (rank_ == members.front()) {
      auto* const memory = static_cast<std::byte*>(::operator new(nbytes, std::align_val_t{4096}));
      std::memset(memory, 0, nbytes);
      made.emplace_back(memory, [](std::byte* m) { ::operator delete(m, std::align_val_t{4096}); });
      state_->changed.notify_all();
    }
    state_->changed.wait(lock, [&] { return made.size() > mine; });
    return made[mine];
  }

  std::uint64_t to_remote_address(const void* data, std::size_t nbytes) override {
    const bool shared = reach_ == Reach::shared || (heap_ != nullptr && heap_->find(data, nbytes).has_value());
    return reinterpret_cast<std::uintptr_t>(data) | (shared ? kSharedAddressBit : 0);
  }
  std::byte* map_peer_memory(int, std::uint64_t place, std::size_t) override {
    return (place & kSharedAddressBit) == 0 ? nullptr : reinterpret_cast<std::byte*>(place & ~kSharedAddressBit);
  }
  std::shared_ptr<SharedHeap> heap() override { return heap_; }

  bool ended(int peer) const override {
    const std::lock_guard lock(state_->mutex);
    return state_->dead[static_cast<std::size_t>(peer)];
  }
  void die() {
    const std::lock_guard lock(state_->mutex);
    state_->dead[static_cast<std::size_t>(rank_)] = true;
  }
  bool has_cma() const override { return reach_ == Reach::cma || reach_ == Reach::shared; }
  using LocalPeers::read_peer;
  int n_reads = 0;
  bool refuses = false;  ///< as a kernel does that has changed its mind since the ranks met
  bool read_peer(int, std::span<const RemoteSegment> pieces) override {
    if (refuses) return false;
    ++n_reads;
    for (const RemoteSegment& piece : pieces) {
      std::memcpy(piece.local, reinterpret_cast<const void*>(piece.remote), piece.nbytes);
    }
    return true;
  }
  bool write_peer(int, std::uint64_t, std::span<const RemoteSegment> pieces) override {
    for (const RemoteSegment& piece : pieces)
      std::memcpy(reinterpret_cast<void*>(piece.remote), piece.local, piece.nbytes);
    return true;
  }
  std::uint64_t open_gate() override { return 0; }
  void close_gate(std::uint64_t) override {}
  void free_gate(std::uint64_t) override {}

 private:
  std::shared_ptr<SharedState> state_;
  std::map<std::uint64_t, std::size_t> taken_;
  int rank_, size_;
  Reach reach_;
  std::shared_ptr<SharedHeap> heap_;
};

}  // namespace samestep
