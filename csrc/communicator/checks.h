#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "communicator/communicator.h"
#include "core/buffer.h"

namespace samestep {

/// Whether a receive into `out` accepts a message of `count` elements.
bool fits(std::uint64_t count, DType dtype, bool is_object, const Buffer& out, Fit fit);
/// The text of the MismatchError if it does not. `receive`: the user's call.
std::string unfit_text(const std::string& receive, const Status& sent, DType dtype, bool is_object, Fit fit);

}  // namespace samestep

namespace samestep::checks {

// Checks of arguments before anything is sent. Each throws an InvalidArgumentError that names the operation, the
// argument and both values; in_host_memory throws UnavailableError.

void root_in_group(std::string_view verb, int root, int size);
void peer_in_group(std::string_view verb, std::string_view argument, int peer, int size);
void tag_is_valid(std::string_view verb, int tag);
void same_dtype(std::string_view verb, const ConstBuffer& in, const ConstBuffer& out);
/// `buffer.count == expected`.
void has_count(std::string_view verb, std::string_view argument, const ConstBuffer& buffer, std::uint64_t expected);
void in_host_memory(std::string_view verb, const ConstBuffer& buffer);
/// There is one count for each rank, and their sum is `buffer.count`.
void counts_fill(std::string_view verb, std::string_view argument, std::span<const std::uint64_t> counts, int size,
                 const ConstBuffer& buffer);

}  // namespace samestep::checks
