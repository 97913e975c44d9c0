#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/crc32c.h"

using namespace samestep;

TEST_CASE("crc32c: the check value, at once and in two pieces") {
  const std::string digits = "123456789";  // the one of all catalogues of CRCs
  for (std::size_t n = 0; n <= digits.size(); ++n) {
    CHECK(kernels::crc32c(digits.data() + n, digits.size() - n, kernels::crc32c(digits.data(), n)) == 0xE3069283);
  }
}

TEST_CASE("crc32c: all ways of this processor give the same, at every length and offset") {
  std::vector<std::byte> bytes(20'000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 251);
  const std::vector<kernels::Crc32cWay> ways = kernels::crc32c_ways();
  for (const kernels::Crc32cWay way : ways) {
    for (const std::size_t begin : {0, 1, 7}) {
      for (const std::size_t n : {0, 1, 7, 8, 9, 255, 256, 511, 512, 513, 768, 3071, 3072, 3073, 6144, 6151, 19'000}) {
        CHECK(way(5, bytes.data() + begin, n) == ways.front()(5, bytes.data() + begin, n));
      }
    }
  }
}

TEST_CASE("crc32c: every bit counts") {
  std::vector<unsigned char> bytes(7000, 0xa5);
  const std::uint32_t right = kernels::crc32c(bytes.data(), bytes.size());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); bit += 11) {
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    REQUIRE(kernels::crc32c(bytes.data(), bytes.size()) != right);
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
  }
}
