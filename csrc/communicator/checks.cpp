#include "communicator/checks.h"

#include <numeric>

#include "core/error.h"
#include "core/format.h"

namespace samestep {

bool fits(std::uint64_t count, DType dtype, bool is_object, const Buffer& out, Fit fit) {
  // Objects are pickled bytes and arrays are elements. Neither may be taken for the other, even if the sizes would fit.
  if (fit == Fit::object || is_object) return fit == Fit::object && is_object;
  return dtype == out.dtype && (fit == Fit::exactly ? count == out.count : count <= out.count);
}

std::string unfit_text(const std::string& receive, const Status& sent, DType dtype, bool is_object, Fit fit) {
  const std::string what = is_object ? "an object by send_object" : str(sent.count, " ", name(dtype));
  std::string text = str(receive, ": rank ", sent.source, " sent ", what, " with tag ", sent.tag);
  if (is_object) {
    text += "; receive it by recv_object";
  } else if (fit == Fit::object) {
    text += " by send; receive arrays by recv, or send them by send_object";
  }
  // Left in the queue, the message would fail every later receive with this source and tag as well.
  return text + "; the message has been taken and thrown away";
}

}  // namespace samestep

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

void in_host_memory(std::string_view verb, const ConstBuffer& buffer) {
  if (buffer.device.kind != DeviceKind::cpu) {
    throw UnavailableError(str(verb,
                               ": the array is in device memory, which this backend does not reach; move it to "
                               "host memory first (torch: x.cpu(), CuPy: x.get())"));
  }
}

void counts_fill(std::string_view verb, std::string_view argument, std::span<const std::uint64_t> counts, int size,
                 const ConstBuffer& buffer) {
  // First, because callers then index `counts` by rank.
  if (counts.size() != static_cast<std::size_t>(size)) {
    throw InvalidArgumentError(str(verb, ": ", argument, " has ", counts.size(), " entries for ", size, " ranks"));
  }
  const std::uint64_t total = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  if (total != buffer.count) {
    throw InvalidArgumentError(
        str(verb, ": ", argument, " add up to ", total, " elements but the array has ", buffer.count));
  }
}

void arguments(const SendArgs& args, int size, bool needs_host_memory) {
  const std::string_view verb = args.is_object ? "send_object" : "send";
  if (needs_host_memory) in_host_memory(verb, args.in);
  peer_in_group(verb, "dest", args.dest, size);
  tag_is_valid(verb, args.tag);
}

void arguments(const RecvArgs& args, int size, bool needs_host_memory) {
  const std::string_view verb = args.fit == Fit::object ? "recv_object" : args.fit == Fit::probe ? "probe" : "recv";
  if (needs_host_memory) in_host_memory(verb, args.out);
  if (args.source != kAnySource) peer_in_group(verb, "source", args.source, size);
  if (args.tag != kAnyTag) tag_is_valid(verb, args.tag);
}

}  // namespace samestep::checks
