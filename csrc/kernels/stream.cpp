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

std::atomic<bool>& giving_back() {
  static std::atomic<bool> gives = is_of_amd();
  return gives;
}

#if defined(__x86_64__)

void give_back(std::byte* line) {
  volatile std::byte* const word = line;  // a store of what is there is none to a compiler
  *word = *word;
}

/// Whole lines; returns how many bytes they are.
template <bool gives_back>
std::size_t copy_whole_lines(std::byte* to, std::byte* from, std::size_t nbytes) {
  std::size_t i = 0;
  for (; i + kLine <= nbytes; i += kLine) {
    const auto* const in = reinterpret_cast<const __m128i*>(from + i);
    auto* const out = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    if constexpr (gives_back) give_back(from + i);
    _mm_storeu_si128(out, a);
    _mm_storeu_si128(out + 1, b);
    _mm_storeu_si128(out + 2, c);
    _mm_storeu_si128(out + 3, d);
  }
  return i;
}
#endif

template <bool gives_back>
void copy_by_lines(void* to, void* from, std::size_t nbytes) {
  auto* const out = static_cast<std::byte*>(to);
  auto* const in = static_cast<std::byte*>(from);
  std::size_t done = 0;
#if defined(__x86_64__)
  done = copy_whole_lines<gives_back>(out, in, nbytes);
#endif
  if (done < nbytes) std::memcpy(out + done, in + done, nbytes - done);
}

}  // namespace

void copy_lines(void* to, const void* from, std::size_t nbytes) {
  copy_by_lines<false>(to, const_cast<void*>(from), nbytes);
}

bool gives_back() { return giving_back().load(std::memory_order_relaxed); }
void set_gives_back(bool gives) { giving_back().store(gives, std::memory_order_relaxed); }

void take_lines(void* to, void* from, std::size_t nbytes) {
  gives_back() ? copy_by_lines<true>(to, from, nbytes) : copy_by_lines<false>(to, from, nbytes);
}

void give_back_lines(void* lines, std::size_t nbytes) {
  if (!gives_back()) return;
#if defined(__x86_64__)
  auto* const bytes = static_cast<std::byte*>(lines);
  for (std::size_t i = 0; i + kLine <= nbytes; i += kLine) give_back(bytes + i);
#else
  (void)lines, (void)nbytes;
#endif
}

void copy_part(void* to, const void* from, std::size_t nbytes, std::size_t touched) {
  constexpr std::size_t kPastCachesFrom = 24 << 20;  // below, the caches do better
  if (touched >= kPastCachesFrom) return copy_past_caches(to, from, nbytes);
  copy(to, from, nbytes);
}

void copy_past_caches(void* to, const void* from, std::size_t nbytes) {
#if defined(__x86_64__)
  constexpr std::size_t kVector = sizeof(__m128i);
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
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
  _mm_sfence();  // before anybody is told
#else
  if (nbytes != 0) std::memcpy(to, from, nbytes);
#endif
}

}  // namespace samestep::kernels
