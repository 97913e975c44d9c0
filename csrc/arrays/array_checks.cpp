// What a library says about an array's layout, checked before anything is computed from it.

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>

#include "arrays/array_sources.h"
#include "core/error.h"
#include "core/format.h"

namespace samestep {

namespace {

// Five-level page tables: no machine gives a process more addresses.
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 57;

// Alignment the loops over elements need; a complex number is two floats.
std::size_t alignment(DType dtype) { return is_complex(dtype) ? itemsize(dtype) / 2 : itemsize(dtype); }

bool is_aligned(const ArrayView& view) {
  return (reinterpret_cast<std::uintptr_t>(view.data) & (alignment(view.dtype) - 1)) == 0;
}

[[noreturn]] void refuse_extent(const ArrayView& view, int axis) {
  throw InvalidArgumentError(
      str("shape ", shape_text(view), ": the extent ", view.shape[axis], " of axis ", axis, " is negative"));
}

[[noreturn]] void refuse_size(const ArrayView& view) {
  throw InvalidArgumentError(
      str("shape ", shape_text(view), " of ", name(view.dtype), " is more than any memory holds (2^57 bytes)"));
}

[[noreturn]] void refuse_strides(const ArrayView& view) {
  throw InvalidArgumentError(
      str("strides ", strides_text(view), " bytes of shape ", shape_text(view), " reach beyond the address space"));
}

// Whether `n` bytes from `data` on end before the addresses do.
bool fits_address_space(const void* data, std::int64_t n) {
  return static_cast<std::uint64_t>(n) <=
         std::numeric_limits<std::uintptr_t>::max() - reinterpret_cast<std::uintptr_t>(data);
}

// Also of the extents before one of 0, which no kernel multiplies any more.
std::int64_t count_elements(const ArrayView& view) {
  std::int64_t count = 1;
  bool is_empty = false, too_many = false;
  for (int i = 0; i < view.n_dims; ++i) {
    if (view.shape[i] < 0) refuse_extent(view, i);
    is_empty |= view.shape[i] == 0;
    too_many |= __builtin_mul_overflow(count, view.shape[i], &count);
  }
  if (is_empty) return 0;
  if (too_many || count > kMaxBytes / static_cast<std::int64_t>(itemsize(view.dtype))) refuse_size(view);
  return count;
}

bool is_row_major(const ArrayView& view) {
  std::int64_t step = static_cast<std::int64_t>(itemsize(view.dtype));
  for (int i = view.n_dims - 1; i >= 0; --i) {
    // The stride of an axis of extent 1 is never used, and libraries put any number there.
    if (view.shape[i] == 1) continue;
    if (view.strides[i] != step) return false;
    step *= view.shape[i];
  }
  return true;
}

void check_strides(const ArrayView& view) {
  // The bytes that elements reach before and after the first one. Each axis adds to one of them, by the sign of its
  // stride.
  std::int64_t below = 0, above = static_cast<std::int64_t>(itemsize(view.dtype));
  for (int i = 0; i < view.n_dims; ++i) {
    if (view.shape[i] == 1) continue;
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(view.shape[i] - 1, view.strides[i], &reach)) refuse_strides(view);
    if (reach > kMaxBytes || reach < -kMaxBytes) refuse_strides(view);
    (reach < 0 ? below : above) += reach;  // at most 32 axes of 2^57 bytes
  }
  const auto first = reinterpret_cast<std::uintptr_t>(view.data);
  if (above - below > kMaxBytes || static_cast<std::uint64_t>(-below) > first ||
      !fits_address_space(view.data, above)) {
    refuse_strides(view);
  }
}

}  // namespace

std::optional<std::uint64_t> ArrayView::memory_order() const {
  if (contiguous) return 0;
  // Unaligned elements have no order either: a view with an order is used in place, which kernels cannot do there.
  if (n_dims > kMaxOrderedDims || !is_aligned(*this)) return std::nullopt;
  std::array<int, kMaxOrderedDims> axes{};
  std::size_t n = 0;
  for (int axis = 0; axis < n_dims; ++axis) {
    if (shape[axis] != 1) axes[n++] = axis;
  }
  // The order of axes with equal strides does not matter: such axes share elements, and the loop below refuses them,
  // since only one of the two can have the expected stride.
  const std::span<int> sorted(axes.data(), n);
  std::ranges::sort(sorted, [this](int a, int b) { return strides[a] > strides[b]; });
  auto step = static_cast<std::int64_t>(itemsize(dtype));
  std::uint64_t order = 1;
  for (std::size_t i = n; i-- > 0;) {
    if (strides[sorted[i]] != step) return std::nullopt;
    step *= shape[sorted[i]];
  }
  for (const int axis : sorted) order = order << 4 | static_cast<std::uint64_t>(axis);
  return order;
}

namespace sources {

void require_dims(std::int64_t n_dims) {
  if (n_dims < 0) throw InvalidArgumentError(str("the array has ", n_dims, " dimensions, fewer than none"));
  if (n_dims > ArrayView::kMaxDims) {
    throw InvalidArgumentError(str("the array has ", n_dims, " dimensions, more than ", ArrayView::kMaxDims,
                                   "; reshape it, e.g. x.reshape(-1)"));
  }
}

void set_compact_strides(ArrayView& view) {
  std::int64_t step = static_cast<std::int64_t>(itemsize(view.dtype));
  for (int i = view.n_dims - 1; i >= 0; --i) {
    view.strides[i] = step;
    (void)__builtin_mul_overflow(step, view.shape[i], &step);  // `measure` refuses such a shape
  }
}

void measure(ArrayView& view) {
  view.count = count_elements(view);
  view.contiguous = true;
  if (view.count == 0) return;
  if (view.data == nullptr) {
    throw InvalidArgumentError(
        "the array has a shape but no memory (a fake tensor, a tracer or a wrapper?); pass a real one");
  }
  // In a row-major view the number of elements bounds every stride, so that only the end remains to be checked, below.
  if (!is_row_major(view)) {
    check_strides(view);
    view.contiguous = false;
    return;
  }
  if (!fits_address_space(view.data, static_cast<std::int64_t>(view.nbytes()))) refuse_size(view);
  // Kernels load whole elements. Unaligned ones, as in packed records, are copied first, like elements with gaps.
  view.contiguous = is_aligned(view);
}

}  // namespace sources

}  // namespace samestep
