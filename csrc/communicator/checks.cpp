#include "communicator/checks.h"

#include <numeric>

#include "core/error.h"
#include "core/format.h"

namespace samestep::checks {

void root_in_group(std::string_view verb, int root, int size) {
  if (root < 0 || root >= size) {
    throw InvalidArgumentError(str(verb, ": root ", root, " is outside this group's ranks 0..", size - 1));
  }
}

void peer_in_group(std::string_view verb, std::string_view argument, int peer, int size) {
  if (peer < 0 || peer >= size) {
    throw InvalidArgumentError(str(verb, ": ", argument, " ", peer, " is outside this group's ranks 0..", size - 1));
  }
}

void tag_is_valid(std::string_view verb, int tag) {
  if (tag < 0) throw InvalidArgumentError(str(verb, ": tag ", tag, " is negative; tags are 0..2147483647"));
}

void same_dtype(std::string_view verb, const ConstBuffer& in, const ConstBuffer& out) {
  if (in.dtype != out.dtype) {
    throw InvalidArgumentError(str(verb, ": out has dtype ", name(out.dtype), " but the input has ", name(in.dtype)));
  }
}

void has_count(std::string_view verb, std::string_view argument, const ConstBuffer& buffer, std::uint64_t expected) {
  if (buffer.count != expected) {
    throw InvalidArgumentError(str(verb, ": ", argument, " has ", buffer.count, " elements, expected ", expected));
  }
}

void on_host(std::string_view verb, const ConstBuffer& buffer) {
  if (buffer.device.kind != DeviceKind::cpu) {
    throw UnavailableError(str(verb,
                               ": the array is in device memory, which this backend does not reach; move it to "
                               "host memory first (torch: x.cpu(), CuPy: x.get())"));
  }
}

void counts_fill(std::string_view verb, std::string_view argument, std::span<const std::uint64_t> counts, int size,
                 const ConstBuffer& buffer) {
  if (counts.size() != static_cast<std::size_t>(size)) {
    throw InvalidArgumentError(str(verb, ": ", argument, " has ", counts.size(), " entries for ", size, " ranks"));
  }
  const std::uint64_t total = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  if (total != buffer.count) {
    throw InvalidArgumentError(
        str(verb, ": ", argument, " add up to ", total, " elements but the array has ", buffer.count));
  }
}

}  // namespace samestep::checks
