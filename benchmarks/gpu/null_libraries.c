// A CUDA runtime and an NCCL in one library whose calls return at once: what is left of a call's time is the caller's
// own. "Device" memory is that of the host, and what is enqueued has ended.

#include <stdlib.h>
#include <string.h>

#define CALL(name, ...) __attribute__((visibility("default"))) int name(__VA_ARGS__)
#define NOTHING(name, ...) \
  CALL(name, __VA_ARGS__) { return 0; }

static int is_made(void** out, size_t nbytes) {
  *out = calloc(1, nbytes != 0 ? nbytes : 1);
  return *out != NULL ? 0 : 2;
}

// ---- the CUDA runtime

struct attributes {
  int type, device;
  void *on_device, *on_host;
};

CALL(cudaGetDeviceCount, int* n) { return *n = 1, 0; }
CALL(cudaRuntimeGetVersion, int* version) { return *version = 13000, 0; }
CALL(cudaGetDevice, int* device) { return *device = 0, 0; }
NOTHING(cudaSetDevice, int device)
CALL(cudaDeviceGetPCIBusId, char* text, int length, int device) { return strncpy(text, "0000:01:00.0", length), 0; }
CALL(cudaPointerGetAttributes, struct attributes* found, const void* data) {
  *found = (struct attributes){.type = 2};  // of a device
  return 0;
}
CALL(cudaMalloc, void** out, size_t nbytes) { return is_made(out, nbytes); }
CALL(cudaFree, void* data) { return free(data), 0; }
CALL(cudaHostAlloc, void** out, size_t nbytes, unsigned flags) { return is_made(out, nbytes); }
CALL(cudaFreeHost, void* data) { return free(data), 0; }
NOTHING(cudaHostRegister, void* data, size_t nbytes, unsigned flags)
NOTHING(cudaHostUnregister, void* data)
CALL(cudaMemcpyAsync, void* to, const void* from, size_t nbytes, int kind, void* stream) {
  return memmove(to, from, nbytes), 0;
}
CALL(cudaStreamCreateWithFlags, void** out, unsigned flags) { return is_made(out, 1); }
CALL(cudaStreamDestroy, void* stream) { return free(stream), 0; }
NOTHING(cudaStreamSynchronize, void* stream)
NOTHING(cudaStreamWaitEvent, void* stream, void* event, unsigned flags)
CALL(cudaEventCreateWithFlags, void** out, unsigned flags) { return is_made(out, 1); }
CALL(cudaEventDestroy, void* event) { return free(event), 0; }
NOTHING(cudaEventRecord, void* event, void* stream)
NOTHING(cudaEventQuery, void* event)
CALL(cudaStreamIsCapturing, void* stream, int* status) { return *status = 0, 0; }
CALL(cudaThreadExchangeStreamCaptureMode, int* mode) { return *mode = 0, 0; }
__attribute__((visibility("default"))) const char* cudaGetErrorString(int code) { return "an error"; }
NOTHING(cudaGetLastError, void)

// ---- NCCL

struct id {
  char bytes[128];
};

CALL(ncclGetVersion, int* version) { return *version = 23000, 0; }
__attribute__((visibility("default"))) const char* ncclGetErrorString(int code) { return "an error"; }
__attribute__((visibility("default"))) const char* ncclGetLastError(void* group) { return ""; }
CALL(ncclGetUniqueId, struct id* id) { return memset(id, 1, sizeof *id), 0; }
CALL(ncclCommInitRankConfig, void** out, int n, struct id id, int rank, void* config) { return is_made(out, 1); }
CALL(ncclCommSplit, void* of, int color, int key, void** out, void* config) { return is_made(out, 1); }
CALL(ncclCommGetAsyncError, void* group, int* state) { return *state = 0, 0; }
CALL(ncclCommAbort, void* group) { return free(group), 0; }
CALL(ncclCommDestroy, void* group) { return free(group), 0; }
NOTHING(ncclGroupStart, void)
NOTHING(ncclGroupEnd, void)
NOTHING(ncclAllReduce, const void* in, void* out, size_t n, int type, int op, void* group, void* stream)
NOTHING(ncclReduce, const void* in, void* out, size_t n, int type, int op, int root, void* group, void* stream)
NOTHING(ncclBroadcast, const void* in, void* out, size_t n, int type, int root, void* group, void* stream)
NOTHING(ncclAllGather, const void* in, void* out, size_t n, int type, void* group, void* stream)
NOTHING(ncclReduceScatter, const void* in, void* out, size_t n, int type, int op, void* group, void* stream)
NOTHING(ncclSend, const void* in, size_t n, int type, int peer, void* group, void* stream)
NOTHING(ncclRecv, void* out, size_t n, int type, int peer, void* group, void* stream)
CALL(ncclRedOpCreatePreMulSum, int* op, void* factor, int type, int residence, void* group) { return *op = 5, 0; }
NOTHING(ncclRedOpDestroy, int op, void* group)
