#include "nccl/packer.h"

#include <algorithm>

#include "core/error.h"
#include "core/format.h"
#include "nccl/gpu_memory.h"
#include "nccl/packing_source.h"
#include "os/private_file.h"

namespace samestep {
namespace {

constexpr unsigned kThreads = 256;            // of a block
constexpr std::size_t kBytesOfThread = 64;    // four moves of 16 bytes: enough under way to fill the memory's pipes
constexpr std::size_t kMostColumns = 0xFFFF;  // threads then go round

/// FNV-1a.
std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

}  // namespace

Packer::Packer(std::shared_ptr<GpuLibrary> gpu, int device, PackerPaths paths)
    : gpu_(std::move(gpu)), device_(device), paths_(std::move(paths)) {}

const std::string& Packer::problem() {
  std::call_once(made_, [this] {
    try {
      make();
    } catch (const Error& error) {
      problem_ = error.what();
    }
  });
  return problem_;
}

void Packer::make() {
  if (paths_.compiler.empty()) throw UnavailableError("there is no NVRTC or hipRTC, which compiles kernels");
  const OnDevice on(*gpu_, device_);
  const GpuEvent context(gpu_);  // the runtime makes the device's context at its first call, and the driver needs one
  driver_ = std::make_unique<KernelDriver>(gpu_->kind(), paths_.driver);
  const KernelCompiler compiler(gpu_->kind(), paths_.compiler);
  const std::string architecture = driver_->architecture(device_);
  const std::string name =
      str("packing-", architecture, "-", compiler.version(), "-", std::hex, hash_of(kPackingSource), ".bin");
  const bool keeps = !paths_.cache.empty() && !architecture.empty();  // without its name, whose kernels were they?
  if (const auto kept = keeps ? read_private_file(paths_.cache, name) : std::nullopt) {
    try {
      load(*kept);
      cached_ = true;
      return;
    } catch (const Error&) {  // damaged, or of another driver: made again
    }
  }
  const std::vector<char> image = compiler.compile(kPackingSource, architecture);
  load(image);
  if (keeps) write_private_file(paths_.cache, name, image);
}

void Packer::load(const std::vector<char>& image) {
  const KernelDriver::Module loaded = driver_->load(image);  // for good: launches may be under way at the end
  pack_ = driver_->kernel(loaded, "samestep_pack");
  unpack_ = driver_->kernel(loaded, "samestep_unpack");
}

void Packer::launch(KernelDriver::Kernel kernel, std::span<const PackedLeaf> leaves,
                    std::span<const std::uint32_t> starts, void* bucket, GpuLibrary::Stream stream) const {
  if (leaves.empty()) return;
  if (leaves.size() > kPackedAtOnce || leaves.size() != starts.size()) {
    throw InvalidArgumentError(str("pack: ", leaves.size(), " leaves with ", starts.size(), " places"));
  }
  PackedLeaves table{};
  std::size_t longest = 1;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    table.data[i] = leaves[i].data;
    table.nbytes[i] = leaves[i].nbytes;
    table.start[i] = starts[i];
    longest = std::max(longest, leaves[i].nbytes);
  }
  const std::size_t of_block = kThreads * kBytesOfThread, columns = (longest + of_block - 1) / of_block;
  void* arguments[] = {&table, &bucket};
  driver_->launch(kernel, static_cast<unsigned>(std::min(columns, kMostColumns)), static_cast<unsigned>(leaves.size()),
                  kThreads, stream, arguments);
}

void Packer::pack(std::span<const PackedLeaf> leaves, std::span<const std::uint32_t> starts, void* bucket,
                  GpuLibrary::Stream stream) const {
  launch(pack_, leaves, starts, bucket, stream);
}

void Packer::unpack(std::span<const PackedLeaf> leaves, std::span<const std::uint32_t> starts, void* bucket,
                    GpuLibrary::Stream stream) const {
  launch(unpack_, leaves, starts, bucket, stream);
}

}  // namespace samestep
