#pragma once

#include "nccl/packing_plan.h"

namespace samestep {

/// The first argument of the kernels, as both sides lay it out. Arguments of a kernel are at most 4 KiB.
struct PackedLeaves {
  void* data[kPackedAtOnce];
  std::uint64_t nbytes[kPackedAtOnce];
  std::uint32_t start[kPackedAtOnce];  ///< in the bucket, in units of kPackedAlignment
};
static_assert(sizeof(PackedLeaves) == 2560);

/// The kernels, in the language that NVRTC and hipRTC share: row y of blocks moves leaf y. The gap behind a leaf is
/// filled with zeros, so that a bucket has the same bits whatever was there before.
inline constexpr const char* kPackingSource = R"(
struct Leaves {
  unsigned char* data[128];
  unsigned long long nbytes[128];
  unsigned int start[128];
};
struct alignas(16) Quad { unsigned int words[4]; };
typedef unsigned long long Size;

template <class T>
__device__ Size move(void* __restrict__ to, const void* __restrict__ from, Size nbytes, Size first, Size stride) {
  T* const out = static_cast<T*>(to);
  const T* const in = static_cast<const T*>(from);
  const Size count = nbytes / sizeof(T);
#pragma unroll 4
  for (Size i = first; i < count; i += stride) out[i] = in[i];
  return count * sizeof(T);
}

// One end of the two is always aligned; the other may be the middle of somebody's array.
__device__ void move_leaf(unsigned char* to, const unsigned char* from, Size nbytes, Size first, Size stride) {
  const Size places = reinterpret_cast<Size>(to) | reinterpret_cast<Size>(from);
  Size done = 0;
  if (places % 16 == 0) {
    done = move<Quad>(to, from, nbytes, first, stride);
  } else if (places % 4 == 0) {
    done = move<unsigned int>(to, from, nbytes, first, stride);
  } else if (places % 2 == 0) {
    done = move<unsigned short>(to, from, nbytes, first, stride);
  }
  move<unsigned char>(to + done, from + done, nbytes - done, first, stride);
}

extern "C" __global__ void samestep_pack(Leaves leaves, unsigned char* bucket) {
  const unsigned int leaf = blockIdx.y;
  const Size first = Size(blockIdx.x) * blockDim.x + threadIdx.x, stride = Size(gridDim.x) * blockDim.x;
  const Size nbytes = leaves.nbytes[leaf];
  unsigned char* const to = bucket + Size(leaves.start[leaf]) * 16;
  move_leaf(to, leaves.data[leaf], nbytes, first, stride);
  const Size end = (nbytes + 15) / 16 * 16;
  for (Size i = nbytes + first; i < end; i += stride) to[i] = 0;
}

extern "C" __global__ void samestep_unpack(Leaves leaves, unsigned char* bucket) {
  const unsigned int leaf = blockIdx.y;
  const Size first = Size(blockIdx.x) * blockDim.x + threadIdx.x, stride = Size(gridDim.x) * blockDim.x;
  move_leaf(leaves.data[leaf], bucket + Size(leaves.start[leaf]) * 16, leaves.nbytes[leaf], first, stride);
}
)";

}  // namespace samestep
