#include "kernels/stream.h"

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace samestep::kernels {
namespace {

#if defined(__x86_64__)
constexpr std::size_t kLine = 64;

bool is_of_amd() { return __builtin_cpu_is("amd") != 0; }
#else
bool is_of_amd() { return false; }
#endif

std::atomic<bool>& owning_after_read() {
  static std::atomic<bool> owns = is_of_amd();
  return owns;
}

#if defined(__x86_64__)

void own_line(std::byte* line) {
  volatile std::byte* const word = line;  // else the compiler drops a store of the value just loaded
  *word = *word;
}

/// Whole lines; returns how many bytes they are.
template <bool owns>
std::size_t copy_whole_lines(std::byte* to, std::byte* from, std::size_t nbytes) {
  std::size_t i = 0;
  for (; i + kLine <= nbytes; i += kLine) {
    const auto* const in = reinterpret_cast<const __m128i*>(from + i);
    auto* const out = reinterpret_cast<__m128i*>(to + i);
    // A whole line at a time, by vectors that need no alignment: the two buffers rarely have the same alignment.
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    if constexpr (owns) own_line(from + i);
    _mm_storeu_si128(out, a);
    _mm_storeu_si128(out + 1, b);
    _mm_storeu_si128(out + 2, c);
    _mm_storeu_si128(out + 3, d);
  }
  return i;
}
#endif

template <bool owns>
void copy_by_lines(void* to, void* from, std::size_t nbytes) {
  auto* const out = static_cast<std::byte*>(to);
  auto* const in = static_cast<std::byte*>(from);
  std::size_t done = 0;
#if defined(__x86_64__)
  done = copy_whole_lines<owns>(out, in, nbytes);
#endif
  if (done < nbytes) std::memcpy(out + done, in + done, nbytes - done);
}

}  // namespace

void copy_vectorized(void* to, const void* from, std::size_t nbytes) {
  copy_by_lines<false>(to, const_cast<void*>(from), nbytes);
}

// Relaxed: the switch of a measurement, which changes no result.
bool owns_after_read() { return owning_after_read().load(std::memory_order_relaxed); }
void set_owns_after_read(bool owns) {
  owning_after_read().store(owns, std::memory_order_relaxed);  // relaxed: see above
}

void copy_and_own_lines(void* to, void* from, std::size_t nbytes) {
  owns_after_read() ? copy_by_lines<true>(to, from, nbytes) : copy_by_lines<false>(to, from, nbytes);
}

void own_lines(void* lines, std::size_t nbytes) {
  if (!owns_after_read()) return;
#if defined(__x86_64__)
  auto* const bytes = static_cast<std::byte*>(lines);
  for (std::size_t i = 0; i + kLine <= nbytes; i += kLine) own_line(bytes + i);
#else
  (void)lines, (void)nbytes;
#endif
}

void copy_auto(void* to, const void* from, std::size_t nbytes, std::size_t footprint) {
  constexpr std::size_t kNontemporalMin = 24 << 20;  // below, copies through the caches are faster
  if (footprint >= kNontemporalMin) return copy_nontemporal(to, from, nbytes);
  copy(to, from, nbytes);
}

void copy_nontemporal(void* to, const void* from, std::size_t nbytes) {
#if defined(__x86_64__)
  constexpr std::size_t kVector = sizeof(__m128i);
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  // Non-temporal stores need an aligned destination.
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(out) % kVector;
  if (nbytes < head + kVector) {
    if (nbytes != 0) std::memcpy(out, in, nbytes);
    return;
  }
  std::memcpy(out, in, head);
  std::size_t i = head;
  for (; i + 4 * kVector <= nbytes; i += 4 * kVector) {
    for (std::size_t k = 0; k < 4; ++k) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i + k * kVector));
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i + k * kVector), value);
    }
  }
  std::memcpy(out + i, in + i, nbytes - i);
  _mm_sfence();  // orders the non-temporal stores before the release that publishes the copy
#else
  if (nbytes != 0) std::memcpy(to, from, nbytes);
#endif
}

}  // namespace samestep::kernels
