#include "shm/shared_heap.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

#include "core/error.h"

namespace samestep {
namespace {

constexpr std::size_t kShortestSegment = std::size_t{64} << 20;
constexpr std::uint64_t kOffsetMask = (std::uint64_t{1} << BlockPool::kOffsetBits) - 1;

std::uint32_t segment_in(std::uint64_t handle) { return static_cast<std::uint32_t>(handle >> BlockPool::kOffsetBits); }
std::size_t offset_in(std::uint64_t handle) { return handle & kOffsetMask; }
std::size_t rounded_up(std::size_t nbytes, std::size_t to) { return (nbytes + to - 1) / to * to; }

}  // namespace

SharedHeap::SharedHeap() { register_listener(); }

SharedHeap::~SharedHeap() { unregister_listener(); }

SharedHeap::Block SharedHeap::allocate(std::size_t nbytes) {
  const std::lock_guard lock(mutex_);
  if (is_child_ || nbytes > BlockPool::kMaxBytes) return {};
  try {
    const std::optional<std::uint64_t> handle = take(nbytes);
    if (!handle) return {};
    Block block{at(*handle), false};
    if (make_present(*handle, BlockPool::size_for(nbytes), block.is_zero)) return block;
    pool_.give(*handle);
  } catch (const std::bad_alloc&) {  // the caller uses other memory then
  }
  return {};
}

bool SharedHeap::free(void* data) {
  if (!may_own(data)) return false;
  const std::lock_guard lock(mutex_);
  const auto handle = locate(data);
  if (!handle) return false;
  // The block is the parent's, and stays in use there.
  if (is_child_) return true;
  if (is_withdrawn(*handle, pool_.size_at(*handle))) return true;
  if (!pool_.give(*handle)) return false;
  // Down to half of what may be kept, so that the next frees do not trim again.
  if (spare() > trim_from_) trim(needed() + keep_ / 2);
  return true;
}

std::size_t SharedHeap::size_of(const void* data) const {
  if (!may_own(data)) return 0;
  const std::lock_guard lock(mutex_);
  const auto handle = locate(data);
  return handle ? pool_.size_at(*handle) : 0;
}

std::optional<SharedHeap::Spot> SharedHeap::find(const void* data, std::size_t nbytes) const {
  if (!may_own(data)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto handle = locate(data);
  if (!handle) return std::nullopt;
  const Spot spot{segment_in(*handle), offset_in(*handle)};
  if (spot.offset + nbytes > segments_[spot.segment].memory.nbytes()) return std::nullopt;
  if (is_withdrawn(*handle, nbytes)) return std::nullopt;
  return spot;
}

void SharedHeap::withdraw(const void* data, std::size_t nbytes) {
  if (nbytes == 0 || !may_own(data)) return;
  const std::lock_guard lock(mutex_);
  const auto handle = locate(data);
  if (!handle || is_child_) return;
  Segment& segment = segments_[segment_in(*handle)];
  if (!segment.published.value_or(false)) return;  // nobody else uses it
  // A block has its pages for itself.
  const std::uint64_t begin = *handle / BlockPool::kPage * BlockPool::kPage;
  const std::uint64_t end = rounded_up(*handle + nbytes, BlockPool::kPage);
  for (std::uint64_t at = begin; at < end;) {
    const auto next = withdrawn_.upper_bound(at);
    // Pages that have been taken out are not mapped anew, which would bring back what the segment holds.
    if (next != withdrawn_.begin() && std::prev(next)->second > at) {
      at = std::prev(next)->second;
      continue;
    }
    const std::uint64_t stop = next == withdrawn_.end() ? end : std::min(end, next->first);
    withdrawn_.emplace_hint(next, at, stop);
    segment.memory.take_out(offset_in(at), stop - at);
    at = stop;
  }
}

bool SharedHeap::is_withdrawn(std::uint64_t handle, std::size_t nbytes) const {
  // Few ranges, and mostly none.
  return std::ranges::any_of(withdrawn_,
                             [&](const auto& range) { return range.first < handle + nbytes && handle < range.second; });
}

void SharedHeap::set_bounds(std::size_t limit, std::size_t keep) {
  const std::lock_guard lock(mutex_);
  limit_ = limit;
  keep_ = trim_from_ = keep;
  if (spare() > keep_) trim(needed() + keep_);
}

SharedHeap::Usage SharedHeap::usage() {
  const std::lock_guard lock(mutex_);
  look_after_children();
  return {pool_.usage(), present_, segments_.size()};
}

// ---- addresses

bool SharedHeap::may_own(const void* data) const {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  // relaxed: a thread that holds a block got its address after the bounds were stored. Any other address may pass, and
  // is checked again with the mutex held.
  return address >= lowest_.load(std::memory_order_relaxed) && address < highest_.load(std::memory_order_relaxed);
}

std::optional<std::uint64_t> SharedHeap::locate(const void* data) const {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  for (std::uint64_t i = 0; i < segments_.size(); ++i) {
    const auto begin = reinterpret_cast<std::uintptr_t>(segments_[i].memory.data());
    if (address >= begin && address - begin < segments_[i].memory.nbytes()) {
      return i << BlockPool::kOffsetBits | (address - begin);
    }
  }
  return std::nullopt;
}

std::byte* SharedHeap::at(std::uint64_t handle) const {
  return segments_[segment_in(handle)].memory.data() + offset_in(handle);
}

// ---- memory of the system

std::optional<std::uint64_t> SharedHeap::take(std::size_t nbytes) {
  if (const auto handle = pool_.take(nbytes)) return handle;
  look_after_children();
  // Blocks that were held for children that have ended are free now.
  if (const auto handle = pool_.take(nbytes)) return handle;
  return grow(BlockPool::size_for(nbytes)) ? pool_.take(nbytes) : std::nullopt;
}

bool SharedHeap::grow(std::size_t nbytes) {
  // Each segment is larger than the last, so there are never many. Pages that are not populated cost nothing.
  const std::size_t length = rounded_up(std::max({nbytes, kShortestSegment, mapped_ / 4}), kPart);
  if (nbytes > limit_ || length > kOffsetMask) return false;
  try {
    Segment made{SharedMemory::make("samestep-heap", length), std::vector<char>(length / kPart), {}};
    const auto begin = reinterpret_cast<std::uintptr_t>(made.memory.data());
    segments_.push_back(std::move(made));
    // Only this function writes them, with the mutex held; they are never wrong for a block that somebody holds.
    lowest_ = std::min(lowest_.load(), begin);
    highest_ = std::max(highest_.load(), begin + length);
  } catch (const UnavailableError&) {
    return false;
  }
  mapped_ += length;
  pool_.add(static_cast<std::uint64_t>(segments_.size() - 1) << BlockPool::kOffsetBits, length);
  return true;
}

bool SharedHeap::make_present(std::uint64_t handle, std::size_t nbytes, bool& was_absent) {
  Segment& segment = segments_[segment_in(handle)];
  const std::size_t first = offset_in(handle) / kPart, last = (offset_in(handle) + nbytes - 1) / kPart;
  was_absent = false;
  if (std::memchr(&segment.present[first], 0, last + 1 - first) == nullptr) return true;
  const auto begin = segment.present.begin() + static_cast<std::ptrdiff_t>(first);
  const auto end = segment.present.begin() + static_cast<std::ptrdiff_t>(last) + 1;
  const std::size_t absent = static_cast<std::size_t>(std::count(begin, end, 0)) * kPart;
  was_absent = absent == (last + 1 - first) * kPart;
  if (needed() > limit_ || absent > limit_) return false;
  // Pages of free blocks are returned before the limit refuses a block.
  if (present_ > limit_ - absent) trim(limit_ - absent);
  if (present_ > limit_ - absent) return false;
  for (auto part = std::find(begin, end, 0); part != end; part = std::find(part, end, 0)) {
    const auto next = std::find(part, end, 1);
    const auto from = static_cast<std::size_t>(part - segment.present.begin()) * kPart;
    const auto length = static_cast<std::size_t>(next - part) * kPart;
    // Some of the pages may exist already. They are returned, because nothing would count them.
    if (!populate(segment.memory.data() + from, length)) {
      segment.memory.release(from, length);
      return false;
    }
    present_ += length;
    std::fill(part, next, 1);
    part = next;
  }
  return true;
}

std::size_t SharedHeap::needed() const { return pool_.usage().used + pool_.usage().held; }

/// Populated bytes that are free, roughly: parts at the edge of a block count too.
std::size_t SharedHeap::spare() const { return present_ > needed() ? present_ - needed() : 0; }

/// Returns free pages to the system until so many bytes are populated, if possible.
void SharedHeap::trim(std::size_t to) {
  for (const BlockPool::Range& range : pool_.free_ranges()) {
    if (present_ <= to) break;
    Segment& segment = segments_[segment_in(range.handle)];
    const std::size_t offset = offset_in(range.handle);
    const std::size_t first = rounded_up(offset, kPart) / kPart, end = (offset + range.nbytes) / kPart;
    if (first >= end) continue;
    const auto parts = segment.present.begin() + static_cast<std::ptrdiff_t>(first);
    const auto n_present = std::count(parts, parts + static_cast<std::ptrdiff_t>(end - first), 1);
    if (n_present == 0) continue;
    if (!segment.memory.release(first * kPart, (end - first) * kPart)) break;
    std::fill_n(parts, end - first, 0);
    present_ -= static_cast<std::size_t>(n_present) * kPart;
  }
  // Does not try again at every call what could not be returned now.
  trim_from_ = std::max(keep_, spare() + keep_ / 2);
}

// ---- children

void SharedHeap::look_after_children() {
  if (children_.empty()) return;
  std::erase_if(children_, [](const Child& child) {
    pollfd entry{child.alive.get(), 0, 0};  // POLLHUP once the other end is closed
    return child.alive && ::poll(&entry, 1, 0) > 0;
  });
  std::vector<std::uint32_t> living;
  for (const Child& child : children_) living.push_back(child.number);
  pool_.set_children(living);
}

void SharedHeap::before_fork() noexcept {
  // Held until after the fork: another thread may be changing the heap, and the child would inherit the middle of that.
  mutex_.lock();
  if (is_child_ || pool_.usage().blocks == 0) return;
  look_after_children();
  int ends[2];
  // The child holds one end and never uses it. The kernel closes it when the child ends or calls exec, and the parent
  // sees that without waiting for the child, which is the user's business.
  if (::pipe2(ends, O_CLOEXEC) == 0) lifeline_ = {Fd(ends[0]), Fd(ends[1])};
}

void SharedHeap::after_fork_in_parent() noexcept {
  if (!is_child_ && pool_.usage().blocks != 0) {
    // Without a pipe the child counts as alive forever.
    children_.push_back({pool_.note_fork(), std::move(lifeline_.first)});
    lifeline_ = {};
  }
  mutex_.unlock();
}

void SharedHeap::after_fork_in_child() noexcept {
  if (!is_child_) {
    is_child_ = true;
    for (Segment& segment : segments_) {
      // Otherwise the child's writes would reach all ranks of the host. What was withdrawn is private already.
      std::size_t at = 0;
      for (const auto& [begin, end] : withdrawn_) {
        if (&segments_[segment_in(begin)] != &segment) continue;
        segment.memory.make_private(at, offset_in(begin) - at);
        at = offset_in(begin) + (end - begin);
      }
      segment.memory.make_private(at, segment.memory.nbytes() - at);
      segment.memory.close_fd();
    }
    for (Child& child : children_) child.alive = Fd();
    lifeline_.first = Fd();  // the other end stays open as long as the child lives
  }
  mutex_.unlock();
}

}  // namespace samestep
