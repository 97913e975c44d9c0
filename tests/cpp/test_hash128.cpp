#include <doctest/doctest.h>

#include <cstddef>
#include <cstring>
#include <set>
#include <vector>

#include "kernels/hash128.h"

namespace samestep::kernels {

namespace {

using Hash = std::array<std::uint64_t, 2>;

std::vector<unsigned char> pattern(std::size_t nbytes) {
  std::vector<unsigned char> bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<unsigned char>(i * 7 + i / 256);
  return bytes;
}

Hash hash_of(const std::vector<unsigned char>& bytes) { return hash128(bytes.data(), bytes.size()); }

}  // namespace

TEST_CASE("every flip of one bit changes both words of the hash") {
  for (const std::size_t nbytes : {1, 7, 8, 31, 32, 33, 100}) {
    std::vector<unsigned char> bytes = pattern(nbytes);
    std::set<Hash> seen = {hash_of(bytes)};
    for (std::size_t bit = 0; bit < 8 * nbytes; ++bit) {
      const Hash before = hash_of(bytes);
      bytes[bit / 8] ^= static_cast<unsigned char>(1U << bit % 8);
      const Hash after = hash_of(bytes);
      CHECK(before[0] != after[0]);
      CHECK(before[1] != after[1]);
      seen.insert(after);
      bytes[bit / 8] ^= static_cast<unsigned char>(1U << bit % 8);
    }
    CHECK(seen.size() == 8 * nbytes + 1);
  }
}

TEST_CASE("the number of bytes counts, also of zeros") {
  std::set<Hash> seen;
  for (std::size_t nbytes = 0; nbytes < 200; ++nbytes) seen.insert(hash_of(std::vector<unsigned char>(nbytes)));
  CHECK(seen.size() == 200);
}

TEST_CASE("equal words at other places give other hashes") {
  std::set<Hash> seen;
  for (std::size_t first = 0; first < 24; ++first) {
    for (std::size_t second = first + 1; second < 24; ++second) {
      std::vector<std::uint64_t> words(24);
      words[first] = words[second] = 0x123456789ABCDEF;  // would vanish in an exclusive or of all words
      seen.insert(hash128(words.data(), words.size() * sizeof words[0]));
    }
  }
  CHECK(seen.size() == 24 * 23 / 2);
}

TEST_CASE("the hash of given bytes stays what it is") {
  CHECK(hash128(nullptr, 0) == hash128("", 0));
  const std::vector<unsigned char> bytes = pattern(1000);
  std::vector<unsigned char> elsewhere(1001);
  std::memcpy(elsewhere.data() + 1, bytes.data(), 1000);
  CHECK(hash_of(bytes) == hash128(elsewhere.data() + 1, 1000));
  CHECK(hash_of(bytes) == Hash{0x37C83CD5DBB7D38B, 0x4934910C62B1A471});
}

}  // namespace samestep::kernels
