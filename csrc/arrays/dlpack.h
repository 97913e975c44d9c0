#pragma once

#include <cstdint>

/// The memory layout that DLPack fixes between libraries, as far as a reader of arrays needs it: facts
/// of an ABI (majors 0 and 1, the exchange table as of 1.3), under our own names.
/// Source: https://dmlc.github.io/dlpack/latest/c_api.html
namespace samestep::dlpack {

struct Version {
  std::uint32_t major;  ///< layouts differ between majors
  std::uint32_t minor;  ///< only new enumerators
};

enum class DeviceType : std::int32_t {
  cpu = 1,
  cuda = 2,
  cuda_host = 3,  ///< pinned memory of the host
  rocm = 10,
  rocm_host = 11,  ///< pinned memory of the host
  cuda_managed = 13,
};

struct Device {
  DeviceType type;
  std::int32_t index;
};

enum class TypeCode : std::uint8_t {
  integer = 0,
  unsigned_integer = 1,
  floating = 2,
  bfloat = 4,
  complex = 5,
  boolean = 6,
  float8_e4m3fn = 10,
  float8_e5m2 = 12,
};

struct DataType {
  TypeCode code;
  std::uint8_t bits;    ///< of one lane
  std::uint16_t lanes;  ///< more than 1: a vector type
};

struct Tensor {
  void* data;  ///< before `byte_offset`; may be null where there are no elements
  Device device;
  std::int32_t n_dims;
  DataType dtype;
  std::int64_t* shape;    ///< may be null where n_dims is 0
  std::int64_t* strides;  ///< in elements; null means compact row-major (before 1.2)
  std::uint64_t byte_offset;
};

/// What a capsule named "dltensor" points at. It has no flags, so it cannot say that it is read-only.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);  ///< frees the struct as well; may be null
};

inline constexpr std::uint64_t kReadOnlyFlag = 1;

/// What a capsule named "dltensor_versioned" points at. With another major than 1 only `deleter` may be used.
struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);  ///< frees the struct as well; may be null
  std::uint64_t flags;
  Tensor tensor;
};

struct ExchangeHeader {
  Version version;
  const ExchangeHeader* previous;  ///< a table of an older major, or null
};

/// The table of C functions that a library hangs on its array type, in a capsule named
/// "dlpack_exchange_api" under the attribute `__dlpack_c_exchange_api__`. It lives as long as the
/// process. The functions return 0, or -1 with a Python exception set; none waits for a device.
struct ExchangeApi {
  ExchangeHeader header;
  int (*allocate)(Tensor* prototype, ManagedTensorVersioned** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*export_managed)(void* object, ManagedTensorVersioned** out);
  int (*import_managed)(ManagedTensorVersioned* tensor, void** out_object);
  int (*borrow)(void* object, Tensor* out);  ///< may be null; valid while `object` lives and is not resized
  int (*current_stream)(DeviceType type, std::int32_t index, void** out_stream);
};

}  // namespace samestep::dlpack
