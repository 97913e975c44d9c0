#pragma once

#include <cstddef>
#include <cstdint>

/// The C interface by which XLA calls functions of others (its "typed FFI"), as far as a function of ours needs it.
/// Sizes and order of the fields are those of xla/ffi/api/c_api.h at version 0.1; later versions append fields.
namespace samestep::xla {

inline constexpr int kMajorVersion = 0, kMinorVersion = 1;

enum DataType : std::int32_t {
  kBool = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kUint8 = 6,
  kUint16 = 7,
  kUint32 = 8,
  kUint64 = 9,
  kFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kComplex64 = 15,
  kBfloat16 = 16,
  kToken = 17,  // no data: it orders calls
  kComplex128 = 18,
  kFloat8E5M2 = 19,
  kFloat8E4M3FN = 20,
};

enum Stage : std::int32_t { kExecute = 3 };
enum AttributeType : std::int32_t { kScalar = 3 };
enum ErrorCode : std::int32_t { kInternal = 13 };

struct Extension {
  enum Type : std::int32_t { kMetadata = 1 };
  std::size_t struct_size;
  Type type;
  Extension* next;
};

struct Version {
  std::size_t struct_size;
  Extension* extensions;
  std::int32_t major;
  std::int32_t minor;
};

/// What XLA asks for when the function is registered.
struct Metadata {
  std::size_t struct_size;
  Version version;
  std::uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Array {
  std::size_t struct_size;
  Extension* extensions;
  DataType dtype;
  void* data;
  std::int64_t n_dims;
  const std::int64_t* extents;
};

/// Arguments, or results.
struct Arrays {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  const std::int32_t* types;
  Array* const* values;
};

struct Scalar {
  DataType dtype;
  const void* value;
};

struct Name {
  const char* data;
  std::size_t size;
};

struct Attributes {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  const AttributeType* types;
  const Name* const* names;
  const void* const* values;
};

struct Error;  // XLA's own

struct ErrorArgs {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;
  ErrorCode code;
};

struct Api {
  std::size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorArgs* args);
};

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  Stage stage;
  Arrays args;
  Arrays results;
  Attributes attributes;
};

}  // namespace samestep::xla
