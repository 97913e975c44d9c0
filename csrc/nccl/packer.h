#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "nccl/gpu_library.h"
#include "nccl/kernel_compiler.h"
#include "nccl/packing_plan.h"

namespace samestep {

/// Where the parts of a Packer are found.
struct PackerPaths {
  std::string compiler;  ///< NVRTC or hipRTC; "" if there is none
  std::string driver;    ///< the CUDA driver, or the HIP runtime
  std::string cache;     ///< folder in which compiled kernels are kept; "": nowhere
};

/// A leaf to be packed: device memory of `nbytes` bytes, anywhere.
struct PackedLeaf {
  void* data;
  std::size_t nbytes;
};

/// Two kernels of one device: many arrays into a bucket, and back, in one launch each.
///
/// They are compiled at the first use, which takes some tenths of a second, or read from the cache. A file there is
/// used if it and its folder belong to this user and nobody else may write them; its name tells the architecture, the
/// compiler's version and the source.
class Packer {
 public:
  /// Opens nothing yet.
  Packer(std::shared_ptr<GpuLibrary> gpu, int device, PackerPaths paths);

  /// Makes the kernels, the first time. Why there are none, or "".
  const std::string& problem();
  /// Whether the kernels came from the cache.
  bool cached() const { return cached_; }
  const std::string& compiler() const { return paths_.compiler; }

  /// Puts one launch into `stream` of the device, which is the current one. At most kPackedAtOnce leaves; `starts` as
  /// in PackedRound. `bucket` has an address divisible by kPackedAlignment. Only after `problem` was "".
  void pack(std::span<const PackedLeaf> leaves, std::span<const std::uint32_t> starts, void* bucket,
            GpuLibrary::Stream stream) const;
  void unpack(std::span<const PackedLeaf> leaves, std::span<const std::uint32_t> starts, void* bucket,
              GpuLibrary::Stream stream) const;

 private:
  void make();
  void load(const std::vector<char>& image);
  void launch(KernelDriver::Kernel kernel, std::span<const PackedLeaf> leaves, std::span<const std::uint32_t> starts,
              void* bucket, GpuLibrary::Stream stream) const;

  std::shared_ptr<GpuLibrary> gpu_;
  int device_;
  PackerPaths paths_;
  std::once_flag made_;
  std::string problem_;
  bool cached_ = false;
  std::unique_ptr<KernelDriver> driver_;
  KernelDriver::Kernel pack_ = nullptr, unpack_ = nullptr;
};

}  // namespace samestep
