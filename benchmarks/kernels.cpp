// How fast the reduction kernels run from each level of the memory, for each instruction set:
//   cmake -S . -B build/bench -DSAMESTEP_BUILD_BENCHMARKS=ON -DSAMESTEP_BUILD_PYTHON=OFF
//   cmake --build build/bench --target kernels_benchmark && build/bench/kernels_benchmark [KiB per buffer]...
// or, with "copies" instead, how long copies take whose ends differ by so many bytes in their page offsets.
// GB/s counts each buffer read and each result stored once; ns is for one call.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "kernels/isa.h"
#include "kernels/reduce.h"
#include "kernels/stream.h"

namespace {

using namespace samestep;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The least of several runs, each long enough for the clock: others use the machine too.
template <class Act>
double least_seconds(Act act) {
  std::size_t n_calls = 1;
  double begin = seconds_now();
  for (act(); seconds_now() - begin < 0.001; act()) ++n_calls;
  double least = 1e9;
  for (int trial = 0; trial < 30; ++trial) {
    begin = seconds_now();
    for (std::size_t i = 0; i < n_calls; ++i) act();
    least = std::min(least, (seconds_now() - begin) / static_cast<double>(n_calls));
  }
  return least;
}

void measure(DType dtype, std::size_t n_inputs, std::size_t n_outs, std::size_t count) {
  const std::size_t nbytes = count * itemsize(dtype);
  // 64-byte multiples, but not at equal places of a page.
  const std::size_t stride = (nbytes / 4096 + 1) * 4096 + 320;
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(64, stride * n_inputs), std::free);
  std::memset(memory.get(), 0, stride * n_inputs);
  std::vector<kernels::Input> inputs;
  std::vector<void*> buffers;
  for (std::size_t b = 0; b < n_inputs; ++b) buffers.push_back(static_cast<std::byte*>(memory.get()) + b * stride);
  for (const void* buffer : buffers) inputs.push_back({buffer});
  const std::span outs(buffers.data(), n_outs);
  const double seconds = least_seconds([&] { kernels::reduce_into(dtype, ReduceOp::sum, inputs, outs, count); });
  const double gigabytes = static_cast<double>(nbytes * (n_inputs + n_outs)) / 1e9;
  std::printf("%-9s %-9s %6zu %5zu %9zu %8.1f %12.0f\n", name(dtype).data(), kernels::isa_name().data(), n_inputs,
              n_outs, count, gigabytes / seconds, seconds * 1e9);
}

void measure_copies() {
  constexpr std::size_t kPage = 4096, kMaxBytes = 1 << 20;
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(kPage, 2 * kMaxBytes + 2 * kPage), std::free);
  auto* const from = static_cast<std::byte*>(memory.get());
  std::memset(from, 1, 2 * kMaxBytes + 2 * kPage);
  std::printf("%9s %9s %12s %12s\n", "bytes", "ahead", "memcpy us", "copy us");
  for (const std::size_t nbytes :
       {std::size_t{2048}, std::size_t{4096}, std::size_t{65536}, std::size_t{131072}, kMaxBytes}) {
    for (const std::size_t ahead : {0, 16, 31, 32, 4080}) {
      std::byte* const to = from + kMaxBytes + kPage + ahead;
      const double by_memcpy = least_seconds([&] { std::memcpy(to, from, nbytes); });
      const double by_copy = least_seconds([&] { kernels::copy(to, from, nbytes); });
      std::printf("%9zu %9zu %12.3f %12.3f\n", nbytes, ahead, by_memcpy * 1e6, by_copy * 1e6);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "copies") == 0) {
    measure_copies();
    return 0;
  }
  std::printf("%-9s %-9s %6s %5s %9s %8s %12s\n", "dtype", "isa", "inputs", "outs", "count", "GB/s", "ns");
  std::vector<std::size_t> kib;  // of a float32 buffer; the other types have as many elements
  for (int i = 1; i < argc; ++i) kib.push_back(std::strtoull(argv[i], nullptr, 10));
  if (kib.empty()) kib = {128, 16 * 1024};
  for (const std::size_t size : kib) {
    for (const auto isa : kernels::supported_isas()) {
      kernels::select_isa(isa);
      for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16}) {
        for (const auto& [n_inputs, n_outs] : {std::pair{2, 1}, {2, 2}, {4, 1}, {4, 4}, {8, 8}}) {
          measure(dtype, static_cast<std::size_t>(n_inputs), static_cast<std::size_t>(n_outs), size * 256);
        }
      }
    }
  }
}
