#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/stream.h"
#include "kernels/strided.h"

namespace samestep {
namespace {

using Extents = std::vector<std::int64_t>;
using Bytes = std::vector<std::byte>;

std::size_t product(const Extents& shape) {
  return static_cast<std::size_t>(std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>{}));
}

// The offset in bytes of row-major element `index`.
std::int64_t offset_of(std::size_t index, const Extents& shape, const Extents& strides) {
  std::int64_t offset = 0;
  for (std::size_t d = shape.size(); d-- > 0;) {
    offset += static_cast<std::int64_t>(index) % shape[d] * strides[d];
    index /= static_cast<std::size_t>(shape[d]);
  }
  return offset;
}

// A strided array somewhere in the middle of a buffer, every byte different from the next ones.
struct Array {
  Extents shape;
  Extents strides;
  std::size_t itemsize;
  std::size_t origin = 0;
  Bytes memory = {};

  Array(Extents shape_, Extents strides_, std::size_t itemsize_)
      : shape(std::move(shape_)), strides(std::move(strides_)), itemsize(itemsize_) {
    std::size_t reach = itemsize;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      reach += static_cast<std::size_t>(std::abs(strides[d]) * std::max<std::int64_t>(shape[d] - 1, 0));
    }
    origin = reach;
    memory.resize(2 * reach + itemsize);
    std::mt19937 random(6);
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  }

  std::byte* data() { return memory.data() + origin; }
  std::size_t count() const { return product(shape); }
  const std::byte* element(std::size_t i) const {
    return memory.data() + static_cast<std::int64_t>(origin) + offset_of(i, shape, strides);
  }
  Bytes expected() const {
    Bytes bytes;
    for (std::size_t i = 0; i < count(); ++i) bytes.insert(bytes.end(), element(i), element(i) + itemsize);
    return bytes;
  }
};

Array permuted(const Extents& extents, const std::vector<std::size_t>& order, std::size_t itemsize) {
  Extents strides(extents.size());
  auto step = static_cast<std::int64_t>(itemsize);
  for (const std::size_t d : order) {  // innermost in memory first
    strides[d] = step;
    step *= extents[d];
  }
  return {extents, strides, itemsize};
}

std::vector<Array> arrays(std::size_t itemsize) {
  const auto s = static_cast<std::int64_t>(itemsize);
  std::vector<Array> list = {
      {{}, {}, itemsize},                             // 0-d: one element
      {{0}, {s}, itemsize},                           // nothing
      {{3, 0, 2}, {2 * s, 2 * s, s}, itemsize},       // nothing, between other extents
      {{7}, {s}, itemsize},                           // contiguous
      {{2, 3, 4}, {12 * s, 4 * s, s}, itemsize},      // contiguous in three dimensions
      {{5}, {2 * s}, itemsize},                       // every second
      {{5}, {-s}, itemsize},                          // backwards
      {{4, 3}, {-3 * s, s}, itemsize},                // rows backwards
      {{4, 3}, {-3 * s, -s}, itemsize},               // all backwards
      {{3, 4}, {0, s}, itemsize},                     // one row, three times
      {{3, 4}, {s, 0}, itemsize},                     // each element four times
      {{3, 4}, {0, 0}, itemsize},                     // one element
      {{4, 3}, {5 * s, s}, itemsize},                 // rows with a gap
      {{2, 4, 3}, {24 * s, 6 * s, 2 * s}, itemsize},  // all dimensions merge
      {{2, 1, 3}, {3 * s, 1000 * s, s}, itemsize},    // the stride of extent 1 means nothing
      {{3, 5}, {s + 1, 3 * s + 4}, itemsize},         // odd strides, as in packed records
      {{2, 2, 2, 2, 2, 2, 2, 2}, {1, 2, 4, 8, 16, 32, 64, 128}, itemsize},
  };
  list.push_back(permuted({70, 67}, {0, 1}, itemsize));  // a transposed matrix, more than a tile in both dimensions
  list.push_back(permuted({3, 37, 5}, {0, 2, 1}, itemsize));
  list.push_back(permuted({3, 37, 5}, {1, 0, 2}, itemsize));
  list.push_back(permuted({3, 4, 5, 6}, {2, 0, 3, 1}, itemsize));
  return list;
}

TEST_CASE("stream: a non-temporal copy is a copy, wherever it begins and ends") {
  std::vector<unsigned char> from(400), to(400);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7 + 1);
  for (std::size_t begin = 0; begin < 20; ++begin) {
    for (const std::size_t skew : {0, 1, 8, 15}) {
      for (const std::size_t nbytes : {0, 1, 15, 16, 17, 31, 64, 65, 300}) {
        std::fill(to.begin(), to.end(), static_cast<unsigned char>(0));
        kernels::copy_nontemporal(to.data() + begin, from.data() + skew, nbytes);
        std::vector<unsigned char> want(400);
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(skew), nbytes,
                    want.begin() + static_cast<std::ptrdiff_t>(begin));
        REQUIRE(to == want);
      }
    }
  }
}

TEST_CASE("stream: a copy is a copy at every distance in a page, and touches nothing else") {
  constexpr std::size_t kPage = 4096, kMaxBytes = 9000;
  std::vector<unsigned char> from(2 * kPage + kMaxBytes), to(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7 + i / 256 + 1);
  const auto place = [](const std::vector<unsigned char>& bytes) {
    return reinterpret_cast<std::uintptr_t>(bytes.data()) % kPage;
  };
  for (const std::size_t ahead : {0, 1, 16, 31, 32, 2000, 4080}) {
    for (const std::size_t nbytes : {0, 1, 2047, 2048, 2049, 9000}) {
      std::fill(to.begin(), to.end(), static_cast<unsigned char>(0));
      const std::size_t begin = (place(from) + ahead + kPage - place(to)) % kPage;
      kernels::copy(to.data() + begin, from.data(), nbytes);
      std::vector<unsigned char> want(to.size());
      std::copy_n(from.begin(), nbytes, want.begin() + static_cast<std::ptrdiff_t>(begin));
      REQUIRE(to == want);
    }
  }
}

TEST_CASE("pack: elements in row-major order, for every kind of stride") {
  for (const std::size_t itemsize : {1, 2, 3, 4, 8, 16}) {
    std::size_t number = 0;
    for (Array& array : arrays(itemsize)) {
      CAPTURE(itemsize);
      CAPTURE(number++);
      Bytes packed(array.count() * itemsize);
      kernels::pack(array.data(), array.shape, array.strides, itemsize, packed.data());
      CHECK(packed == array.expected());
    }
  }
}

TEST_CASE("unpack: the reverse of pack, and nothing between the elements is written") {
  for (const std::size_t itemsize : {1, 2, 3, 4, 8, 16}) {
    std::size_t number = 0;
    for (Array& array : arrays(itemsize)) {
      CAPTURE(itemsize);
      CAPTURE(number++);
      const Bytes packed = array.expected();
      const Bytes before = array.memory;
      std::vector<bool> is_element(array.memory.size());
      for (std::size_t i = 0; i < array.count(); ++i) {
        const auto at = static_cast<std::size_t>(array.element(i) - array.memory.data());
        for (std::size_t b = at; b < at + itemsize; ++b) {
          is_element[b] = true;
          array.memory[b] = std::byte{0xa5};
        }
      }
      kernels::unpack(packed.data(), array.data(), array.shape, array.strides, itemsize);
      CHECK(array.memory == before);
    }
  }
}

TEST_CASE("pack and unpack: an empty array may have no memory") {
  const Extents shape = {0}, strides = {4};
  kernels::pack(nullptr, shape, strides, 4, nullptr);
  kernels::unpack(nullptr, nullptr, shape, strides, 4);
}

}  // namespace
}  // namespace samestep
