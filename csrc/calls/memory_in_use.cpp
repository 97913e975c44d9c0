#include "calls/memory_in_use.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "calls/pending_work.h"
#include "core/buffer.h"
#include "core/error.h"
#include "core/format.h"

namespace samestep::memory_in_use {

namespace {

struct Entry {
  Use use;
  std::weak_ptr<PendingWork> work;
};

/// By their first byte, and the operation.
using Entries = std::multimap<std::pair<std::uintptr_t, const PendingWork*>, Entry>;

/// Those of the process. The mutex is held briefly, and no Python runs meanwhile.
///
/// A search looks at what reaches into the memory and a little around it, however many operations are in progress:
/// reads, which may be of the same memory, lie apart, and what begins far ahead is looked for among the long ones only.
struct Registry {
  std::mutex mutex;
  std::map<std::size_t, Entries> entries[2];  ///< those that are read, and written; by the power of two of their bytes
};
// relaxed: a thread sees what it has started itself. What others start at the same time has no order anyhow.
constinit std::atomic<std::size_t> n_entries = 0;
Registry& registry() {
  static auto& all = *new Registry;  // never destroyed: operations may be dropped after static objects
  return all;
}

struct Axis {
  std::int64_t step, extent;
};

/// Elements that do not fill their bytes: runs without gaps, each of `length` bytes.
struct Runs {
  const std::byte* begin;
  std::int64_t length;
  std::vector<Axis> axes;  ///< the innermost one last
};

Runs runs_of(const Use& use) {
  if (use.gaps == nullptr) return {use.begin, static_cast<std::int64_t>(use.nbytes), {}};
  const ArrayView& view = *use.gaps;
  Runs found{use.begin, static_cast<std::int64_t>(itemsize(view.dtype)), {}};
  std::vector<Axis>& axes = found.axes;
  for (int i = 0; i < view.n_dims; ++i) {
    if (view.shape[i] > 1 && view.strides[i] != 0) axes.push_back({std::abs(view.strides[i]), view.shape[i]});
  }
  std::ranges::sort(axes, std::ranges::greater{}, &Axis::step);
  while (!axes.empty() && axes.back().step == found.length) {
    found.length *= axes.back().extent;
    axes.pop_back();
  }
  return found;
}

/// Calls `visit` with the first byte of each run, until it returns true. Whether it has.
template <class Visit>
bool any_run(const Runs& runs, Visit visit) {
  std::vector<std::int64_t> at(runs.axes.size(), 0);
  const std::byte* begin = runs.begin;
  for (;;) {
    if (visit(begin)) return true;
    std::size_t i = runs.axes.size();
    for (; i > 0; --i) {
      const Axis& axis = runs.axes[i - 1];
      begin += axis.step;
      if (++at[i - 1] < axis.extent) break;
      begin -= axis.step * axis.extent;
      at[i - 1] = 0;
    }
    if (i == 0) return false;
  }
}

/// Whether no runs touch because all steps are multiples of one number: of other columns of a matrix, or where elements
/// alternate.
bool pass_each_other(const Runs& a, const Runs& b) {
  std::int64_t unit = 0;
  for (const Axis& axis : a.axes) unit = std::gcd(unit, axis.step);
  for (const Axis& axis : b.axes) unit = std::gcd(unit, axis.step);
  const std::int64_t shift = (b.begin - a.begin) % unit, ahead = shift < 0 ? shift + unit : shift;
  return ahead >= a.length && unit - ahead >= b.length;
}

/// Exact. Costs as much as to copy the elements, where these are not found to pass each other.
bool have_elements_in_common(const Use& a, const Use& b) {
  if (!share_memory(a.begin, a.nbytes, b.begin, b.nbytes)) return false;
  if (a.gaps == nullptr && b.gaps == nullptr) return true;
  const Runs in_a = runs_of(a), in_b = runs_of(b);
  if (in_a.axes.empty() && in_b.axes.empty()) return true;
  if (pass_each_other(in_a, in_b)) return false;
  std::vector<const std::byte*> begins;
  any_run(in_a, [&](const std::byte* begin) {
    if (begin + in_a.length > b.begin && begin < b.begin + b.nbytes) begins.push_back(begin);
    return false;
  });
  std::ranges::sort(begins);
  return any_run(in_b, [&](const std::byte* begin) {
    const auto first = std::ranges::upper_bound(begins, begin - in_a.length);
    return first != begins.end() && *first < begin + in_b.length;
  });
}

std::uintptr_t address(const Use& use) { return reinterpret_cast<std::uintptr_t>(use.begin); }

std::shared_ptr<PendingWork> find(const Use& use) {
  Registry& all = registry();
  const std::uintptr_t begin = address(use), end = begin + use.nbytes;
  const std::lock_guard lock(all.mutex);
  for (const bool written : {true, false}) {
    if (!written && !use.written) continue;
    for (const auto& [most, entries] : all.entries[written]) {
      // What begins further ahead ends before.
      for (auto at = entries.lower_bound({begin - std::min(begin, most), nullptr});
           at != entries.end() && at->first.first < end; ++at) {
        if (!have_elements_in_common(use, at->second.use)) continue;
        // None: another thread has just dropped it, and waits for its end, if that is due.
        if (auto work = at->second.work.lock()) return work;
      }
    }
  }
  return nullptr;
}

}  // namespace

bool any() { return n_entries.load(std::memory_order_relaxed) != 0; }  // relaxed: see there

Use use_of(const ArrayView& view, bool written) {
  const ArrayView::Extent extent = view.extent();
  const bool has_gaps = extent.nbytes != view.nbytes();
  return {extent.begin, extent.nbytes, written, has_gaps ? &view : nullptr};
}

bool is_taken(const ArrayView& view, bool written) {
  return any() && view.count != 0 && find(use_of(view, written)) != nullptr;
}

bool settle(PyObject* array, const ArrayView& view, bool written, bool is_message, const char* what) {
  if (!any() || view.count == 0) return false;
  bool waited = false;
  const Use use = use_of(view, written);
  while (const std::shared_ptr<PendingWork> other = find(use)) {
    waited = true;
    if (is_message && other->is_message() && !other->done()) {
      throw InvalidArgumentError(str(what, ": the array ", written ? "would be written while" : "is written by",
                                     written ? " a message in progress uses it" : " a receive in progress",
                                     "; wait for that operation first, or pass another array or a copy"));
    }
    other->settle();
    other->let_follow(array, view);
  }
  return waited;
}

void add(const std::shared_ptr<PendingWork>& work, std::span<const Use> uses) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (const Use& use : uses) {
    all.entries[use.written][std::bit_ceil(use.nbytes)].emplace(std::pair{address(use), work.get()}, Entry{use, work});
  }
  n_entries.fetch_add(uses.size(), std::memory_order_relaxed);  // relaxed: see there
}

void remove(const PendingWork& work, std::span<const Use> uses) noexcept {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (const Use& use : uses) {
    const auto entries = all.entries[use.written].find(std::bit_ceil(use.nbytes));
    if (entries == all.entries[use.written].end()) continue;
    n_entries.fetch_sub(entries->second.erase({address(use), &work}), std::memory_order_relaxed);  // relaxed: see there
    if (entries->second.empty()) all.entries[use.written].erase(entries);
  }
}

}  // namespace samestep::memory_in_use
