#include "kernels/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define SAMESTEP_CRC __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define SAMESTEP_CRC __attribute__((target("+crc")))
#endif

namespace samestep::kernels {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected
constexpr std::size_t kLane = 1024;

constexpr auto kTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) table[i] = table[i] >> 1 ^ (table[i] & 1 ? kPolynomial : 0);
  }
  return table;
}();

std::uint32_t by_table(std::uint32_t crc, std::byte byte) {
  return kTable[(crc ^ static_cast<std::uint32_t>(byte)) & 255] ^ crc >> 8;
}

#ifdef SAMESTEP_CRC

#if defined(__x86_64__)
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
SAMESTEP_CRC inline std::uint32_t next(std::uint32_t crc, std::uint64_t word) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
SAMESTEP_CRC inline std::uint32_t next(std::uint32_t crc, std::byte byte) {
  return _mm_crc32_u8(crc, static_cast<unsigned char>(byte));
}
#else
bool has_instruction() { return (getauxval(AT_HWCAP) & 1UL << 7) != 0; }  // HWCAP_CRC32
SAMESTEP_CRC inline std::uint32_t next(std::uint32_t crc, std::uint64_t word) { return __crc32cd(crc, word); }
SAMESTEP_CRC inline std::uint32_t next(std::uint32_t crc, std::byte byte) {
  return __crc32cb(crc, static_cast<std::uint8_t>(byte));
}
#endif

/// What `kLane` zero bytes make of each value of each byte of a CRC, which is the sum of these.
using Zeros = std::array<std::array<std::uint32_t, 256>, 4>;

Zeros make_zeros() {
  Zeros zeros{};
  for (std::size_t at = 0; at < zeros.size(); ++at) {
    for (std::uint32_t value = 0; value < 256; ++value) {
      std::uint32_t crc = value << 8 * at;
      for (std::size_t i = 0; i < kLane; ++i) crc = by_table(crc, std::byte{0});
      zeros[at][value] = crc;
    }
  }
  return zeros;
}

std::uint32_t after_lane(const Zeros& zeros, std::uint32_t crc) {
  return zeros[0][crc & 255] ^ zeros[1][crc >> 8 & 255] ^ zeros[2][crc >> 16 & 255] ^ zeros[3][crc >> 24];
}

std::uint64_t word_at(const std::byte* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

SAMESTEP_CRC std::uint32_t by_instruction(std::uint32_t crc, const std::byte* data, std::size_t nbytes) {
  static const Zeros zeros = make_zeros();
  // Three lanes at once, as the instruction takes three cycles but can begin in each.
  for (; nbytes >= 3 * kLane; nbytes -= 3 * kLane, data += 3 * kLane) {
    std::uint32_t second = 0, third = 0;
    for (std::size_t i = 0; i < kLane; i += sizeof(std::uint64_t)) {
      crc = next(crc, word_at(data + i));
      second = next(second, word_at(data + kLane + i));
      third = next(third, word_at(data + 2 * kLane + i));
    }
    crc = after_lane(zeros, after_lane(zeros, crc) ^ second) ^ third;
  }
  for (; nbytes >= sizeof(std::uint64_t); nbytes -= sizeof(std::uint64_t), data += sizeof(std::uint64_t)) {
    crc = next(crc, word_at(data));
  }
  for (; nbytes > 0; --nbytes, ++data) crc = next(crc, *data);
  return crc;
}

#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t crc) {
  crc = ~crc;
  for (auto at = static_cast<const std::byte*>(data); nbytes > 0; --nbytes, ++at) crc = by_table(crc, *at);
  return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t crc) {
#ifdef SAMESTEP_CRC
  static const bool fast = has_instruction();
  if (fast) return ~by_instruction(~crc, static_cast<const std::byte*>(data), nbytes);
#endif
  return crc32c_portable(data, nbytes, crc);
}

}  // namespace samestep::kernels
