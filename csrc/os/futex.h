#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace samestep {

/// Sleeps while `word` equals `seen`, until it is woken or the time has passed. For words that several processes share.
/// May return spuriously.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds most);

/// Wakes all waiters of the word.
void futex_wake(std::atomic<std::uint32_t>& word);

}  // namespace samestep
