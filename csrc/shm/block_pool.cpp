#include "shm/block_pool.h"

#include <algorithm>
#include <bit>

namespace samestep {

// 1 to 8 pages, then 9 to 16 times one page, two, four, ...
std::size_t BlockPool::size_class_of(std::size_t nbytes) {
  const std::size_t pages = std::max<std::size_t>(1, (nbytes + kPage - 1) / kPage);
  if (pages <= 8) return pages - 1;
  const auto octave = static_cast<std::size_t>(std::bit_width(pages - 1)) - 4;
  const std::size_t steps = (pages + (std::size_t{1} << octave) - 1) >> octave;
  return 8 + 8 * octave + steps - 9;
}

std::size_t BlockPool::nbytes_of(std::size_t number) {
  if (number < 8) return (number + 1) * kPage;
  return ((9 + number % 8) << (number / 8 - 1)) * kPage;
}

std::size_t BlockPool::size_for(std::size_t nbytes) { return nbytes_of(size_class_of(nbytes)); }

void BlockPool::add(std::uint64_t handle, std::size_t nbytes) {
  insert(handle, nbytes);
  usage_.available += nbytes;
}

std::optional<std::uint64_t> BlockPool::take(std::size_t nbytes) {
  const std::size_t number = size_class_of(nbytes), size = nbytes_of(number);
  std::optional<std::uint64_t> handle;
  if (auto& list = lists_[number]; !list.empty()) {
    handle = list.back();
    list.pop_back();
  } else if (handle = take_from_ranges(size); !handle) {
    // Only now: merged blocks have to be cut again for the next requests of their sizes.
    merge();
    handle = take_from_ranges(size);
  }
  if (!handle) return handle;
  in_use_.emplace(*handle, Block{static_cast<std::uint8_t>(number), n_forks_});
  usage_.blocks += 1;
  usage_.used += size;
  usage_.available -= size;
  return handle;
}

std::optional<std::uint64_t> BlockPool::take_from_ranges(std::size_t nbytes) {
  const auto fitting = by_size_.lower_bound({nbytes, 0});
  if (fitting == by_size_.end()) return std::nullopt;
  const auto [length, handle] = *fitting;
  erase(by_handle_.find(handle));
  if (length > nbytes) insert(handle + nbytes, length - nbytes);
  return handle;
}

bool BlockPool::give(std::uint64_t handle) {
  const auto found = in_use_.find(handle);
  if (found == in_use_.end()) return false;
  const Block block = found->second;
  const std::size_t size = nbytes_of(block.size);
  in_use_.erase(found);
  usage_.blocks -= 1;
  usage_.used -= size;
  // The child's mapping follows the parent's writes to pages that the child has not written, so reuse would change what
  // the child reads.
  if (is_seen(block.born, n_forks_)) {
    held_.push_back({handle, block, n_forks_});
    usage_.held += size;
  } else {
    lists_[block.size].push_back(handle);
    usage_.available += size;
  }
  return true;
}

std::size_t BlockPool::size_at(std::uint64_t handle) const {
  const auto found = in_use_.find(handle);
  return found == in_use_.end() ? 0 : nbytes_of(found->second.size);
}

// ---- free ranges

void BlockPool::insert(std::uint64_t handle, std::size_t nbytes) {
  auto next = by_handle_.lower_bound(handle);
  if (next != by_handle_.end() && handle + nbytes == next->first) {
    nbytes += next->second;
    erase(next++);
  }
  if (next != by_handle_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == handle) {
      handle = before->first;
      nbytes += before->second;
      erase(before);
    }
  }
  by_handle_.emplace(handle, nbytes);
  by_size_.emplace(nbytes, handle);
}

void BlockPool::erase(std::map<std::uint64_t, std::size_t>::iterator range) {
  by_size_.erase({range->second, range->first});
  by_handle_.erase(range);
}

void BlockPool::merge() {
  for (std::size_t number = 0; number < kSizes; ++number) {
    for (const std::uint64_t handle : lists_[number]) insert(handle, nbytes_of(number));
    lists_[number].clear();
  }
}

std::vector<BlockPool::Range> BlockPool::free_ranges() {
  merge();
  std::vector<Range> ranges;
  for (auto range = by_size_.rbegin(); range != by_size_.rend(); ++range) {
    ranges.push_back({range->second, range->first});
  }
  return ranges;
}

// ---- children

std::uint32_t BlockPool::note_fork() {
  children_.push_back(++n_forks_);
  return n_forks_;
}

bool BlockPool::is_seen(std::uint32_t born, std::uint32_t freed) const {
  // A child sees the block if it was forked after the block was taken and before it was freed.
  const auto first = std::upper_bound(children_.begin(), children_.end(), born);
  return first != children_.end() && *first <= freed;
}

void BlockPool::set_children(std::span<const std::uint32_t> living) {
  children_.assign(living.begin(), living.end());
  std::erase_if(held_, [this](const Held& held) {
    // Another living child may still see the block.
    if (is_seen(held.block.born, held.freed)) return false;
    const std::size_t size = nbytes_of(held.block.size);
    lists_[held.block.size].push_back(held.handle);
    usage_.held -= size;
    usage_.available += size;
    return true;
  });
}

}  // namespace samestep
