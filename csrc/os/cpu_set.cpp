#include "os/cpu_set.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>

#include "core/format.h"

namespace samestep {
namespace {

/// "max 100000" or "200000 100000": microseconds of CPU in each period.
double quota_of(const std::string& file) {
  std::ifstream in(file);
  std::string quota;
  double period = 0;
  if (!(in >> quota >> period) || quota == "max" || period <= 0) return INFINITY;
  try {
    return std::stod(quota) / period;
  } catch (const std::exception&) {
    return INFINITY;
  }
}

std::string own_control_group() {
  std::ifstream in("/proc/self/cgroup");
  std::string line;
  while (std::getline(in, line)) {
    // The entry of version 2. Those of version 1 name their controllers.
    if (line.rfind("0::", 0) == 0) return line.substr(3);
  }
  return "";
}

/// The smallest quota of this process's group and of those above it, each of which limits all below.
double quota() {
  constexpr std::string_view kRoot = "/sys/fs/cgroup";
  // In a container the root of the mounted hierarchy is often the container's own group. Elsewhere the root has no such
  // file.
  double least = quota_of(str(kRoot, "/cpu.max"));
  for (std::string group = own_control_group(); group.size() > 1; group.resize(group.find_last_of('/'))) {
    least = std::min(least, quota_of(str(kRoot, group, "/cpu.max")));
  }
  return least;
}

int cpus_in_mask() {
  // The kernel refuses a set that is smaller than its own, which has more than 1024 CPUs on large machines.
  constexpr std::size_t kMaxCpus = 1 << 20;
  for (std::size_t n_cpus = CPU_SETSIZE; n_cpus <= kMaxCpus; n_cpus *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(n_cpus),
                                                               [](cpu_set_t* all) { CPU_FREE(all); });
    const std::size_t nbytes = CPU_ALLOC_SIZE(n_cpus);
    if (set != nullptr && ::sched_getaffinity(0, nbytes, set.get()) == 0) return CPU_COUNT_S(nbytes, set.get());
  }
  return 1;
}

}  // namespace

int usable_cpus() {
  const int in_mask = cpus_in_mask();
  const double quota_in_cpus = quota();
  // Rounded up: with a quota of 1.5 CPUs two ranks still run at the same time, if not all the time.
  const int in_quota = std::isinf(quota_in_cpus) ? in_mask : static_cast<int>(std::ceil(quota_in_cpus));
  return std::max(1, std::min(in_mask, in_quota));
}

int this_cpu() { return ::sched_getcpu(); }

}  // namespace samestep
