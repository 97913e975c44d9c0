#include "kernels/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
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

std::uint32_t by_table(std::uint32_t crc, const std::byte* data, std::size_t nbytes) {
  for (; nbytes > 0; --nbytes, ++data) crc = by_table(crc, *data);
  return crc;
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

#if defined(__x86_64__)

bool has_wide_products() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"); }

/// x^n modulo the polynomial, as a factor of a carry-less product.
constexpr long long power(int n) {
  std::uint32_t bits = 1U << 31;
  for (; n > 0; --n) bits = bits >> 1 ^ (bits & 1 ? kPolynomial : 0);
  return static_cast<long long>(bits) << 1;
}

/// Adds every block to the next one, multiplied by what the distance between them is worth, until one is left, which
/// has the same CRC. Source: Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ, 2009.
__attribute__((target("avx512f,vpclmulqdq"))) std::uint32_t by_products(std::uint32_t crc, const std::byte* data,
                                                                        std::size_t nbytes) {
  constexpr std::size_t kVector = 64, kVectors = 4, kBlock = kVector * kVectors;
  constexpr int kDistance = 8 * kBlock;
  if (nbytes < 2 * kBlock) return by_instruction(crc, data, nbytes);
  const __m512i factors =
      _mm512_set4_epi64(power(kDistance - 32), power(kDistance + 32), power(kDistance - 32), power(kDistance + 32));
  __m512i block[kVectors];
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kVectors; ++i) block[i] = _mm512_loadu_si512(data + i * kVector);
  block[0] = _mm512_xor_si512(block[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (data += kBlock, nbytes -= kBlock; nbytes >= kBlock; data += kBlock, nbytes -= kBlock) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kVectors; ++i) {
      const __m512i low = _mm512_clmulepi64_epi128(block[i], factors, 0x00);
      const __m512i high = _mm512_clmulepi64_epi128(block[i], factors, 0x11);
      block[i] = _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(data + i * kVector), 0x96);
    }
  }
  std::byte last[kBlock];
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kVectors; ++i) _mm512_storeu_si512(last + i * kVector, block[i]);
  return by_instruction(by_instruction(0, last, kBlock), data, nbytes);
}

#endif
#endif

}  // namespace

std::vector<Crc32cWay> crc32c_ways() {
  std::vector<Crc32cWay> ways{by_table};
#ifdef SAMESTEP_CRC
  if (has_instruction()) ways.push_back(by_instruction);
#endif
#if defined(__x86_64__)
  if (has_instruction() && has_wide_products()) ways.push_back(by_products);
#endif
  return ways;
}

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t crc) {
  static const Crc32cWay fastest = crc32c_ways().back();
  return ~fastest(~crc, static_cast<const std::byte*>(data), nbytes);
}

}  // namespace samestep::kernels
