#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace samestep {

/// Sleeps while `word` is `seen`, until it is woken, but not for longer than that. For words that processes share; it
/// may return for no reason.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds most);

/// Wakes all that sleep there.
void futex_wake(std::atomic<std::uint32_t>& word);

}  // namespace samestep
