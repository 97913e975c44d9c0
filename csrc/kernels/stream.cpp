#include "kernels/stream.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace samestep::kernels {

void copy_part(void* to, const void* from, std::size_t nbytes, std::size_t whole) {
  constexpr std::size_t kPastCachesFrom = 32 << 20;  // below, the caches do better
  if (whole >= kPastCachesFrom) return copy_past_caches(to, from, nbytes);
  if (nbytes != 0) std::memcpy(to, from, nbytes);
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
