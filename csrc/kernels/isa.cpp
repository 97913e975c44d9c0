#include "kernels/isa.h"

#include <algorithm>
#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "core/error.h"
#include "core/format.h"
#include "kernels/divide.h"

namespace samestep::kernels {
namespace {

struct Isa {
  std::string_view name;
  bool (*runs_here)();
  void (*reduce_floating_job)(DType dtype, const ReduceArgs& job);
  bool (*divide_job)(DType dtype, void* data, std::size_t count, double divisor);
};

#if defined(__x86_64__)
bool has_f16c() {  // not every compiler accepts the name in __builtin_cpu_supports
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & 1U << 29) != 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && has_f16c(); }

// Those that the AVX-512 code is compiled with, see CMakeLists.txt: all of them have to be present.
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// In ascending order of speed: the last one that runs here is used.
constexpr Isa kIsas[] = {
    {"portable", [] { return true; }, portable::reduce_floating_job, portable::divide_job},
#if defined(__x86_64__)
    {"avx2", has_avx2, avx2::reduce_floating_job, avx2::divide_job},
    {"avx512", has_avx512, avx512::reduce_floating_job, avx512::divide_job},
#endif
};

constinit std::atomic<const Isa*> in_use = nullptr;

const Isa& isa_in_use() {
  const Isa* isa = in_use.load(std::memory_order_relaxed);  // relaxed: it points to constants
  if (isa == nullptr) {
    for (const Isa& candidate : kIsas) {
      if (candidate.runs_here()) isa = &candidate;
    }
    in_use.store(isa, std::memory_order_relaxed);  // relaxed: see above
  }
  return *isa;
}

}  // namespace

std::vector<std::string_view> supported_isas() {
  std::vector<std::string_view> names;
  for (const Isa& isa : kIsas) {
    if (isa.runs_here()) names.push_back(isa.name);
  }
  return names;
}

std::string_view isa_name() { return isa_in_use().name; }

void select_isa(std::string_view name) {
  const auto wanted = std::ranges::find(kIsas, name, &Isa::name);
  if (wanted != std::end(kIsas) && wanted->runs_here()) {
    in_use.store(wanted, std::memory_order_relaxed);  // relaxed: it points to constants
    return;
  }
  std::string known;
  for (const std::string_view isa : supported_isas()) known += str(known.empty() ? "" : ", ", isa);
  throw InvalidArgumentError(str("instruction set '", name, "': this processor runs ", known));
}

void reduce_with_isa(DType dtype, const ReduceArgs& job) {
  constexpr std::size_t kMaxPortable = 64;  // a step of the portable code: it pads less than the others
  // All instruction sets give the same bits, so that they can be chosen by length.
  const bool few = (dtype == DType::float32 || dtype == DType::float64) && job.count * itemsize(dtype) <= kMaxPortable;
  if (few) return portable::reduce_floating_job(dtype, job);
  if (is_floating(dtype) || is_complex(dtype)) return isa_in_use().reduce_floating_job(dtype, job);
  portable::reduce_integer_job(dtype, job);
}

bool divide_in_place(DType dtype, void* data, std::size_t count, double divisor) {
  return isa_in_use().divide_job(dtype, data, count, divisor);
}

}  // namespace samestep::kernels
