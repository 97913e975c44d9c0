#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace samestep::kernels {

/// Copies an n-dimensional array of `itemsize`-byte elements between strided memory and contiguous
/// row-major memory. `shape` in elements, `strides` in bytes (may be negative or zero), equally long;
/// any number of dimensions, 0 included (one element); extents of 0 copy nothing.
void pack(const void* strided, std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
          std::size_t itemsize, void* contiguous);
void unpack(const void* contiguous, void* strided, std::span<const std::int64_t> shape,
            std::span<const std::int64_t> strides, std::size_t itemsize);

}  // namespace samestep::kernels
