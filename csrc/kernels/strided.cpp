#include "kernels/strided.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

namespace samestep::kernels {
namespace {

// One loop of a copy between two layouts: `extent` steps of `strided` and of `packed` bytes.
struct Axis {
  std::int64_t extent;
  std::int64_t strided;
  std::int64_t packed;
};

// The loops of a copy, outermost first, without loops of one step; adjacent loops over contiguous memory are
// merged. Empty for one element; one loop of extent 0 for none.
std::vector<Axis> axes_of(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
                          std::int64_t itemsize) {
  if (std::ranges::find(shape, 0) != shape.end()) return {{0, 0, 0}};
  std::vector<Axis> axes;  // innermost first
  std::int64_t packed = itemsize;
  for (std::size_t d = shape.size(); d-- > 0; packed *= shape[d]) {
    if (shape[d] == 1) continue;
    // The packed side is contiguous, so two loops are one if the strided side is contiguous across them.
    if (!axes.empty() && strides[d] == axes.back().extent * axes.back().strided) {
      axes.back().extent *= shape[d];
    } else {
      axes.push_back({shape[d], strides[d], packed});
    }
  }
  std::ranges::reverse(axes);
  return axes;
}

// Moves the loop whose steps are nearest in strided memory next to the last, the nearest in packed memory.
void nearest_next_to_last(std::span<Axis> axes) {
  if (axes.size() < 3) return;
  const auto candidates = axes.first(axes.size() - 1);
  const auto nearest =
      std::ranges::min_element(candidates, {}, [](const Axis& axis) { return std::abs(axis.strided); });
  std::rotate(nearest, nearest + 1, candidates.end());
}

// Copies one item of `kItemsize` bytes, or of `nbytes` where that is 0.
template <std::size_t kItemsize>
void copy_item(std::byte* to, const std::byte* from, std::size_t nbytes) {
  // A length that the compiler knows becomes one load and one store instead of a call.
  if constexpr (kItemsize != 0) {
    std::memcpy(to, from, kItemsize);
  } else {
    std::memcpy(to, from, nbytes);
  }
}

template <bool kPack>
struct Copy {
  using Strided = std::conditional_t<kPack, const std::byte*, std::byte*>;
  using Packed = std::conditional_t<kPack, std::byte*, const std::byte*>;
  std::size_t itemsize;

  template <std::size_t kItemsize>
  void item(Strided strided, Packed packed) const {
    if constexpr (kPack) {
      copy_item<kItemsize>(packed, strided, itemsize);
    } else {
      copy_item<kItemsize>(strided, packed, itemsize);
    }
  }

  template <std::size_t kItemsize>
  void row(const Axis& axis, Strided strided, Packed packed) const {
    for (std::int64_t i = 0; i < axis.extent; ++i) {
      item<kItemsize>(strided + i * axis.strided, packed + i * axis.packed);
    }
  }

  void row(const Axis& axis, Strided strided, Packed packed) const {
    switch (itemsize) {
      case 1:
        return row<1>(axis, strided, packed);
      case 2:
        return row<2>(axis, strided, packed);
      case 4:
        return row<4>(axis, strided, packed);
      case 8:
        return row<8>(axis, strided, packed);
      case 16:
        return row<16>(axis, strided, packed);
      default:
        return row<0>(axis, strided, packed);
    }
  }

  // Two loops are tiled, so that cache lines and pages are fully used on both sides while they are cached.
  void tiles(const Axis& outer, const Axis& inner, Strided strided, Packed packed) const {
    constexpr std::int64_t kTile = 32;
    for (std::int64_t first = 0; first < inner.extent; first += kTile) {
      const Axis part = {std::min(kTile, inner.extent - first), inner.strided, inner.packed};
      for (std::int64_t i = 0; i < outer.extent; ++i) {
        row(part, strided + first * inner.strided + i * outer.strided,
            packed + first * inner.packed + i * outer.packed);
      }
    }
  }

  void all(std::span<const Axis> axes, Strided strided, Packed packed) const {
    if (axes.empty()) return item<0>(strided, packed);
    if (axes.size() == 1) return row(axes[0], strided, packed);
    const auto distance = [](const Axis& axis) { return std::abs(axis.strided); };
    // The two sides have different loops as their nearest. The inner loop follows the side that is written.
    if (axes.size() == 2 && distance(axes[0]) < distance(axes[1])) {
      return kPack ? tiles(axes[0], axes[1], strided, packed) : tiles(axes[1], axes[0], strided, packed);
    }
    for (std::int64_t i = 0; i < axes[0].extent; ++i) {
      all(axes.subspan(1), strided + i * axes[0].strided, packed + i * axes[0].packed);
    }
  }
};

template <bool kPack>
void copy(typename Copy<kPack>::Strided strided, std::span<const std::int64_t> shape,
          std::span<const std::int64_t> strides, std::size_t itemsize, typename Copy<kPack>::Packed packed) {
  std::vector<Axis> axes = axes_of(shape, strides, static_cast<std::int64_t>(itemsize));
  std::size_t run = itemsize;  // bytes that are contiguous on both sides
  // A loop over contiguous items is one copy of all of them.
  if (!axes.empty() && axes.back().strided == static_cast<std::int64_t>(itemsize)) {
    run *= static_cast<std::size_t>(axes.back().extent);
    axes.pop_back();
  }
  nearest_next_to_last(axes);
  Copy<kPack>{run}.all(axes, strided, packed);
}

}  // namespace

void pack(const void* strided, std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
          std::size_t itemsize, void* contiguous) {
  copy<true>(static_cast<const std::byte*>(strided), shape, strides, itemsize, static_cast<std::byte*>(contiguous));
}

void unpack(const void* contiguous, void* strided, std::span<const std::int64_t> shape,
            std::span<const std::int64_t> strides, std::size_t itemsize) {
  copy<false>(static_cast<std::byte*>(strided), shape, strides, itemsize, static_cast<const std::byte*>(contiguous));
}

}  // namespace samestep::kernels
