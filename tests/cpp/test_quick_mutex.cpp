#include <doctest/doctest.h>

#include <mutex>
#include <thread>
#include <vector>

#include "core/quick_mutex.h"

using namespace samestep;

TEST_CASE("one thread at a time is inside, and what it wrote is seen by the next") {
  constexpr int kThreads = 4, kTimes = 5000;
  QuickMutex mutex;
  long n = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < kTimes; ++k) {
        const std::lock_guard lock(mutex);
        const std::lock_guard again(mutex);  // recursive
        ++n;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(n == kThreads * kTimes);
}

TEST_CASE("while one thread is inside no other gets in, however deep the first has been") {
  QuickMutex mutex;
  const auto another_gets_in = [&] {
    bool got_in = false;
    std::thread([&] {
      got_in = mutex.try_lock();
      if (got_in) mutex.unlock();
    }).join();
    return got_in;
  };
  mutex.lock();
  CHECK(mutex.try_lock());
  mutex.unlock();
  CHECK_FALSE(another_gets_in());
  mutex.unlock();
  CHECK(another_gets_in());
}
