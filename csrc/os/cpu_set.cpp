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
    if (line.rfind("0::", 0) == 0) return line.substr(3);
  }
  return "";
}

}  // namespace

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int in_mask = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  const double quota =
      std::min(quota_of("/sys/fs/cgroup/cpu.max"), quota_of("/sys/fs/cgroup" + own_control_group() + "/cpu.max"));
  const int in_quota = std::isinf(quota) ? in_mask : static_cast<int>(std::ceil(quota));
  return std::max(1, std::min(in_mask, in_quota));
}

int this_cpu() { return ::sched_getcpu(); }

}  // namespace samestep
