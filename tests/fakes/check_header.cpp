// Compiled where the headers of NCCL and of the CUDA runtime are found: our numbers against theirs.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <climits>

#include "nccl/nccl_library.h"

namespace abi = samestep::nccl_abi;
namespace gpu = samestep::gpu_abi;

static_assert(gpu::kInvalidValue == int{cudaErrorInvalidValue});
static_assert(gpu::kNotReady == int{cudaErrorNotReady} && gpu::kCopyEitherWay == int{cudaMemcpyDefault});
static_assert(gpu::kFirstCaptureError == int{cudaErrorStreamCaptureUnsupported});
static_assert(gpu::kLastCaptureError == int{cudaErrorStreamCaptureWrongThread});
static_assert(gpu::kRelaxedCapture == int{cudaStreamCaptureModeRelaxed});
static_assert(gpu::kNonBlockingStream == cudaStreamNonBlocking && gpu::kOrderOnlyEvent == cudaEventDisableTiming);
static_assert(gpu::kPortable == cudaHostAllocPortable && gpu::kPortable == cudaHostRegisterPortable);
static_assert(gpu::kDeviceMemory == int{cudaMemoryTypeDevice} && gpu::kManagedMemory == int{cudaMemoryTypeManaged});

static_assert(int{abi::kSuccess} == int{ncclSuccess} && int{abi::kInvalidUsage} == int{ncclInvalidUsage});
static_assert(int{abi::kRemoteError} == int{ncclRemoteError} && int{abi::kInProgress} == int{ncclInProgress});
static_assert(int{abi::kInt8} == int{ncclInt8} && int{abi::kUint8} == int{ncclUint8});
static_assert(int{abi::kInt32} == int{ncclInt32} && int{abi::kUint32} == int{ncclUint32});
static_assert(int{abi::kInt64} == int{ncclInt64} && int{abi::kUint64} == int{ncclUint64});
static_assert(int{abi::kFloat16} == int{ncclFloat16} && int{abi::kBfloat16} == int{ncclBfloat16});
static_assert(int{abi::kFloat32} == int{ncclFloat32} && int{abi::kFloat64} == int{ncclFloat64});
static_assert(int{abi::kSum} == int{ncclSum} && int{abi::kProd} == int{ncclProd} && int{abi::kAvg} == int{ncclAvg});
static_assert(int{abi::kMax} == int{ncclMax} && int{abi::kMin} == int{ncclMin});
static_assert(abi::kScalarOnHost == int{ncclScalarHostImmediate});
static_assert(sizeof(abi::UniqueId) == sizeof(ncclUniqueId));
static_assert(offsetof(ncclConfig_t, size) == offsetof(abi::Config, size));
static_assert(offsetof(ncclConfig_t, magic) == offsetof(abi::Config, magic));
static_assert(offsetof(ncclConfig_t, version) == offsetof(abi::Config, version));
static_assert(offsetof(ncclConfig_t, blocking) == offsetof(abi::Config, blocking));
static_assert(offsetof(ncclConfig_t, cgaClusterSize) == offsetof(abi::Config, cga_cluster_size));
static_assert(offsetof(ncclConfig_t, minCTAs) == offsetof(abi::Config, min_ctas));
static_assert(offsetof(ncclConfig_t, maxCTAs) == offsetof(abi::Config, max_ctas));
static_assert(offsetof(ncclConfig_t, netName) == offsetof(abi::Config, net_name));
static_assert(offsetof(ncclConfig_t, splitShare) == offsetof(abi::Config, split_share));
static_assert(abi::kUndefined == NCCL_CONFIG_UNDEF_INT);

int main() {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  return theirs.magic == abi::Config{}.magic ? 0 : 1;
}
