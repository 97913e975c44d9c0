#include "bindings/memory_in_use.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>

#include "bindings/pending_work.h"
#include "core/buffer.h"
#include "core/error.h"
#include "core/format.h"

namespace samestep::memory_in_use {

namespace {

struct Entry {
  Use use;
  const PendingWork* key;
  std::weak_ptr<PendingWork> work;
};

/// Those of the process, by their first byte. The mutex is held briefly, and no Python runs meanwhile.
struct Registry {
  std::mutex mutex;
  std::multimap<const std::byte*, Entry> entries;
  std::size_t longest = 0;  ///< bytes of any entry since there were none
};
// relaxed: a thread sees what it has started itself. What others start at the same time has no order anyhow.
constinit std::atomic<std::size_t> n_entries = 0;
Registry& registry() {
  static auto& all = *new Registry;  // never destroyed: operations may be dropped after static objects
  return all;
}

struct Run {
  const std::byte* begin;
  const std::byte* end;
};

/// Calls `visit` for each stretch of elements without gaps, until it returns true. Whether it has.
template <class Visit>
bool any_run(const Use& use, Visit visit) {
  if (use.gaps == nullptr) return visit(Run{use.begin, use.begin + use.nbytes});
  const ArrayView& view = *use.gaps;
  struct Axis {
    std::int64_t step, extent;
  };
  std::vector<Axis> axes;  // the innermost one last
  for (int i = 0; i < view.n_dims; ++i) {
    if (view.shape[i] > 1 && view.strides[i] != 0) axes.push_back({std::abs(view.strides[i]), view.shape[i]});
  }
  std::ranges::sort(axes, std::ranges::greater{}, &Axis::step);
  auto length = static_cast<std::int64_t>(itemsize(view.dtype));
  while (!axes.empty() && axes.back().step == length) {
    length *= axes.back().extent;
    axes.pop_back();
  }
  std::vector<std::int64_t> at(axes.size(), 0);
  const std::byte* begin = use.begin;
  for (;;) {
    if (visit(Run{begin, begin + length})) return true;
    std::size_t i = axes.size();
    for (; i > 0; --i) {
      const Axis& axis = axes[i - 1];
      begin += axis.step;
      if (++at[i - 1] < axis.extent) break;
      begin -= axis.step * axis.extent;
      at[i - 1] = 0;
    }
    if (i == 0) return false;
  }
}

/// Exact, also for views whose elements alternate, as the columns of a matrix. Costs as much as to copy them.
bool have_elements_in_common(const Use& a, const Use& b) {
  if (!share_memory(a.begin, a.nbytes, b.begin, b.nbytes)) return false;
  if (a.gaps == nullptr && b.gaps == nullptr) return true;
  std::vector<Run> runs;
  any_run(a, [&](const Run& run) {
    if (run.end > b.begin && run.begin < b.begin + b.nbytes) runs.push_back(run);
    return false;
  });
  std::ranges::sort(runs, {}, &Run::begin);
  return any_run(b, [&](const Run& run) {
    // Where elements of `a` share memory with each other, runs do; they are as long as each other, so ends are sorted.
    const auto first = std::ranges::upper_bound(runs, run.begin, {}, &Run::end);
    return first != runs.end() && first->begin < run.end;
  });
}

std::shared_ptr<PendingWork> find(const Use& use) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  // What begins further ahead ends before.
  const auto begin = reinterpret_cast<std::uintptr_t>(use.begin);
  auto at = all.entries.lower_bound(reinterpret_cast<const std::byte*>(begin - std::min(begin, all.longest)));
  for (; at != all.entries.end() && at->first < use.begin + use.nbytes; ++at) {
    const Entry& entry = at->second;
    if (!(use.written || entry.use.written) || !have_elements_in_common(use, entry.use)) continue;
    // None: another thread has just dropped it, and waits for its end, if that is due.
    if (auto work = entry.work.lock()) return work;
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

bool settle(const ArrayView& view, bool written, bool is_message, const char* what) {
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
  }
  return waited;
}

void add(const std::shared_ptr<PendingWork>& work, std::span<const Use> uses) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (const Use& use : uses) {
    all.entries.emplace(use.begin, Entry{use, work.get(), work});
    all.longest = std::max(all.longest, use.nbytes);
  }
  n_entries.store(all.entries.size(), std::memory_order_relaxed);  // relaxed: see there
}

void remove(const PendingWork& work, std::span<const Use> uses) noexcept {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (const Use& use : uses) {
    for (auto [at, end] = all.entries.equal_range(use.begin); at != end;) {
      at = at->second.key == &work ? all.entries.erase(at) : std::next(at);
    }
  }
  if (all.entries.empty()) all.longest = 0;
  n_entries.store(all.entries.size(), std::memory_order_relaxed);  // relaxed: see there
}

}  // namespace samestep::memory_in_use
