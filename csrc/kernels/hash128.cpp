#include "kernels/hash128.h"

#include <bit>
#include <cstring>

namespace samestep::kernels {

namespace {

// Each word enters two chains of its lane. Both steps are bijections of the chain for a given word, and of the word for
// a given chain, so that a difference cannot be lost within a lane; lanes hide the latency of the multiplications.
constexpr std::size_t kLanes = 4;
constexpr std::size_t kBlock = kLanes * sizeof(std::uint64_t);
constexpr std::uint64_t kFirst = 0x9E3779B97F4A7C15;   // 2^64 / golden ratio
constexpr std::uint64_t kSecond = 0xD1B54A32D192ED03;  // 2^64 / plastic number, made odd

struct State {
  std::uint64_t first[kLanes];
  std::uint64_t second[kLanes];
};

// The chains are copied to locals, which stay in registers.
void absorb(State& state, const std::byte* data, std::size_t n_blocks) {
  State chains = state;
  for (; n_blocks > 0; --n_blocks, data += kBlock) {
#pragma GCC unroll 4
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      std::uint64_t word;
      std::memcpy(&word, data + lane * sizeof word, sizeof word);
      chains.first[lane] = std::rotl((chains.first[lane] ^ word) * kFirst, 29);
      chains.second[lane] = std::rotl(chains.second[lane] + word, 37) * kSecond;
    }
  }
  state = chains;
}

// Every bit of the result depends on every bit of x. Source: Steele, Lea and Flood, OOPSLA 2014 (SplitMix, after
// MurmurHash3).
std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

std::array<std::uint64_t, 2> hash128(const void* data, std::size_t nbytes) {
  State state;
  // Lanes begin with different values, so that equal words in two lanes do not leave equal chains.
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    state.first[lane] = scramble(lane + 1);
    state.second[lane] = scramble(lane + 1 + kLanes);
  }
  const auto* const bytes = static_cast<const std::byte*>(data);
  // The last block is padded with zeros. Zeros at the end of the data give another hash all the same, because the
  // length enters it below.
  const std::size_t whole = nbytes - nbytes % kBlock;
  absorb(state, bytes, whole / kBlock);
  if (whole != nbytes) {
    std::byte last[kBlock] = {};
    std::memcpy(last, bytes + whole, nbytes - whole);
    absorb(state, last, 1);
  }
  std::uint64_t low = scramble(nbytes);
  std::uint64_t high = ~low;
  // In turn and scrambled, so that each bit of the result depends on both chains of every lane.
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    low = scramble(low ^ state.first[lane]);
    high = scramble(high ^ state.second[lane]);
    low += high;
    high += std::rotl(low, 32);
  }
  return {low, high};
}

}  // namespace samestep::kernels
