// What it costs that two processors write and read the same memory, for docs/design/0011-non-shared-buffers.md.
//
//   g++ -O3 -std=c++20 -march=native -pthread benchmarks/lines.cpp -o lines && ./lines
//
// One thread copies a slice into a stage, another adds its own to it, the first copies the result out of the stage:
// a reduction of two ranks' non-shared memory through shared memory. The result is either written into a stage of the second
// thread, or into the lines in which the slice came. Then one thread copies a slice into a stage and the other copies
// it out; it only reads the stage, or stores into each line what is there. Medians; each buffer is rewritten by its
// owner before.

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Floats = std::vector<float>;

constexpr int kRepeats = 400;

void pin(pthread_t thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread, sizeof set, &set);
}

class Stopwatch {
 public:
  template <typename Act>
  void time(Act act) {
    const auto begin = Clock::now();
    act();
    took_.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  double median() {
    std::nth_element(took_.begin(), took_.begin() + kRepeats / 2, took_.end());
    return took_[kRepeats / 2];
  }

 private:
  std::vector<double> took_;
};

void await(const std::atomic<int>& turn, int value) {
  while (turn.load(std::memory_order_acquire) < value) {
  }
}

void measure(std::size_t nbytes, bool same_lines) {
  const std::size_t n = nbytes / sizeof(float);
  Floats stage(n), other_stage(n), first(n), second(n);
  Floats& result = same_lines ? stage : other_stage;
  std::atomic<int> turn = 0;
  std::array<Stopwatch, 3> watches;
  std::thread owner([&] {
    for (int i = 0; i < kRepeats; ++i) {
      std::fill(second.begin(), second.end(), 1.0F);
      await(turn, 3 * i + 1);
      watches[1].time([&] {
        float* const to = result.data();
        float* const own = second.data();
        const float* const theirs = stage.data();
#pragma GCC ivdep
        for (std::size_t k = 0; k < n; ++k) to[k] = own[k] += theirs[k];
      });
      turn.store(3 * i + 2, std::memory_order_release);
      await(turn, 3 * i + 3);
    }
  });
  pin(owner.native_handle(), 1);
  pin(pthread_self(), 0);
  for (int i = 0; i < kRepeats; ++i) {
    std::fill(first.begin(), first.end(), 1.0F);
    watches[0].time([&] { std::memcpy(stage.data(), first.data(), nbytes); });
    turn.store(3 * i + 1, std::memory_order_release);
    await(turn, 3 * i + 2);
    watches[2].time([&] { std::memcpy(first.data(), result.data(), nbytes); });
    turn.store(3 * i + 3, std::memory_order_release);
  }
  owner.join();
  const double in = watches[0].median(), reduce = watches[1].median(), out = watches[2].median();
  std::printf("%5zu KiB, %-18s in %6.1f  reduced %6.1f  out %6.1f  together %6.1f us\n", nbytes >> 10,
              same_lines ? "the same lines:" : "a stage of its own:", in, reduce, out, in + reduce + out);
}

void measure_one_way(std::size_t nbytes, bool owns_lines) {
  constexpr std::size_t kLine = 64;
  std::vector<char> stage(nbytes), sent(nbytes), taken(nbytes);
  std::atomic<int> turn = 0;
  std::array<Stopwatch, 2> watches;
  std::thread taker([&] {
    for (int i = 0; i < kRepeats; ++i) {
      std::fill(taken.begin(), taken.end(), 1);
      await(turn, 2 * i + 1);
      watches[1].time([&] {
        std::memcpy(taken.data(), stage.data(), nbytes);
        for (std::size_t k = 0; owns_lines && k < nbytes; k += kLine) {
          volatile char* const line = &stage[k];  // a store of what is there is none to a compiler
          *line = *line;
        }
      });
      turn.store(2 * i + 2, std::memory_order_release);
    }
  });
  pin(taker.native_handle(), 1);
  pin(pthread_self(), 0);
  for (int i = 0; i < kRepeats; ++i) {
    std::fill(sent.begin(), sent.end(), static_cast<char>(i));
    watches[0].time([&] { std::memcpy(stage.data(), sent.data(), nbytes); });
    turn.store(2 * i + 1, std::memory_order_release);
    await(turn, 2 * i + 2);
  }
  taker.join();
  const double in = watches[0].median(), out = watches[1].median();
  std::printf("%5zu KiB, %-18s in %6.1f  out %6.1f  together %6.1f us\n", nbytes >> 10,
              owns_lines ? "owned:" : "only read:", in, out, in + out);
}

}  // namespace

int main() {
  for (const std::size_t nbytes : {16U << 10, 64U << 10, 256U << 10}) {
    for (const bool same_lines : {false, true}) measure(nbytes, same_lines);
    for (const bool owns_lines : {false, true}) measure_one_way(nbytes, owns_lines);
  }
}
