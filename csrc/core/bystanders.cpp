#include "core/bystanders.h"

#include <mutex>
#include <vector>

namespace samestep {
namespace {

struct Bystanders {
  std::mutex mutex;
  std::vector<std::weak_ptr<Bystander>> all;
};

Bystanders& bystanders() {
  static auto& only = *new Bystanders;  // threads may wait while the process ends
  return only;
}

}  // namespace

void add_bystander(std::weak_ptr<Bystander> bystander) {
  const std::lock_guard lock(bystanders().mutex);
  std::erase_if(bystanders().all, [](const auto& each) { return each.expired(); });
  bystanders().all.push_back(std::move(bystander));
}

void advance_bystanders() {
  std::vector<std::shared_ptr<Bystander>> alive;
  {
    const std::lock_guard lock(bystanders().mutex);
    for (const auto& each : bystanders().all) alive.push_back(each.lock());
  }
  for (const auto& each : alive) {
    if (each != nullptr) each->advance();
  }
}

}  // namespace samestep
