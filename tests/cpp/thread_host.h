#pragma once

#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "node/host.h"
#include "node/shared_heap.h"

namespace samestep {

/// How the ranks of a test reach each other's buffers.
/// `heap`: only what lies in the ranks' shared heaps.
enum class Reach { none, kernel, shared, heap };

/// A host whose ranks are threads of one process, for tests: all memory is shared, the host may pretend it is not.
class ThreadHost final : public Host {
 public:
  /// What the ranks have in common.
  struct House {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::vector<int>, std::vector<std::shared_ptr<std::byte>>> arenas;  // by members, in order of making
    std::vector<bool> dead = std::vector<bool>(8);
  };

  ThreadHost(std::shared_ptr<House> house, int rank, int size, Reach reach)
      : house_(std::move(house)), rank_(rank), size_(size), reach_(reach) {
    if (reach == Reach::heap) heap_ = std::make_shared<SharedHeap>();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::shared_ptr<std::byte> share(std::span<const int> members, std::size_t nbytes, const Deadline&) override {
    const std::vector<int> key(members.begin(), members.end());
    std::unique_lock lock(house_->mutex);
    auto& made = house_->arenas[key];
    const std::size_t mine = taken_[key]++;
    if (rank_ == key.front()) {
      auto* const memory = static_cast<std::byte*>(::operator new(nbytes, std::align_val_t{4096}));
      std::memset(memory, 0, nbytes);
      made.emplace_back(memory, [](std::byte* m) { ::operator delete(m, std::align_val_t{4096}); });
      house_->changed.notify_all();
    }
    house_->changed.wait(lock, [&] { return made.size() > mine; });
    return made[mine];
  }

  std::uint64_t place_of(const void* data, std::size_t nbytes) override {
    const bool shared = reach_ == Reach::shared || (heap_ != nullptr && heap_->find(data, nbytes).has_value());
    return reinterpret_cast<std::uintptr_t>(data) | (shared ? kShared : 0);
  }
  std::byte* at(int, std::uint64_t place, std::size_t) override {
    return (place & kShared) == 0 ? nullptr : reinterpret_cast<std::byte*>(place & ~kShared);
  }
  std::shared_ptr<SharedHeap> heap() override { return heap_; }

  bool ended(int peer) const override {
    const std::lock_guard lock(house_->mutex);
    return house_->dead[static_cast<std::size_t>(peer)];
  }
  void die() {
    const std::lock_guard lock(house_->mutex);
    house_->dead[static_cast<std::size_t>(rank_)] = true;
  }
  bool reaches_memory() const override { return reach_ == Reach::kernel || reach_ == Reach::shared; }
  using Host::pull;
  using Host::push;
  int n_pulls = 0;
  bool pull(int, std::span<const Piece> pieces) override {
    ++n_pulls;
    for (const Piece& piece : pieces) {
      std::memcpy(piece.mine, reinterpret_cast<const void*>(piece.theirs), piece.nbytes);
    }
    return true;
  }
  bool push(int, std::span<const Piece> pieces) override {
    for (const Piece& piece : pieces) std::memcpy(reinterpret_cast<void*>(piece.theirs), piece.mine, piece.nbytes);
    return true;
  }

 private:
  std::shared_ptr<House> house_;
  std::map<std::vector<int>, std::size_t> taken_;
  int rank_, size_;
  Reach reach_;
  std::shared_ptr<SharedHeap> heap_;
};

}  // namespace samestep
