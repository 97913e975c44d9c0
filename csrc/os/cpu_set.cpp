#include "os/cpu_set.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

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

}  // namespace

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int in_mask = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  // In a container the root of the mounted hierarchy is often the container's own group. Elsewhere the root has no such
  // file, and the group of this process has its own folder.
  const double quota =
      std::min(quota_of("/sys/fs/cgroup/cpu.max"), quota_of("/sys/fs/cgroup" + own_control_group() + "/cpu.max"));
  // Rounded up: with a quota of 1.5 CPUs two ranks still run at the same time, if not all the time.
  const int in_quota = std::isinf(quota) ? in_mask : static_cast<int>(std::ceil(quota));
  return std::max(1, std::min(in_mask, in_quota));
}

int this_cpu() { return ::sched_getcpu(); }

}  // namespace samestep
