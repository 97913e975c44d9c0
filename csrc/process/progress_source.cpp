#include "process/progress_source.h"

#include <mutex>
#include <vector>

namespace samestep {
namespace {

struct ProgressSources {
  std::mutex mutex;
  std::vector<std::weak_ptr<ProgressSource>> all;
};

ProgressSources& progress_sources() {
  static auto& only = *new ProgressSources;  // threads may wait while the process ends
  return only;
}

}  // namespace

void register_progress_source(std::weak_ptr<ProgressSource> source) {
  const std::lock_guard lock(progress_sources().mutex);
  std::erase_if(progress_sources().all, [](const auto& each) { return each.expired(); });
  progress_sources().all.push_back(std::move(source));
}

void progress_all() {
  // Sources advance without the mutex: they take locks of their own, and other threads may register sources meanwhile.
  // The shared pointers keep each source alive until it has advanced.
  std::vector<std::shared_ptr<ProgressSource>> alive;
  {
    const std::lock_guard lock(progress_sources().mutex);
    for (const auto& each : progress_sources().all) alive.push_back(each.lock());
  }
  for (const auto& each : alive) {
    if (each != nullptr) each->advance();
  }
}

}  // namespace samestep
