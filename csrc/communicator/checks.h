#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/buffer.h"

namespace samestep::checks {

// Argument checks that every engine makes before anything is sent. Each throws InvalidArgumentError that
// names the verb, the argument and both values.

void root_in_group(std::string_view verb, int root, int size);
void peer_in_group(std::string_view verb, std::string_view argument, int peer, int size);
void tag_is_valid(std::string_view verb, int tag);
void same_dtype(std::string_view verb, const ConstBuffer& in, const ConstBuffer& out);
/// `out.count == expected`, where `what` says what was expected.
void has_count(std::string_view verb, std::string_view argument, const ConstBuffer& buffer, std::uint64_t expected);
void on_host(std::string_view verb, const ConstBuffer& buffer);
/// One count per rank, that together are `buffer`'s.
void counts_fill(std::string_view verb, std::string_view argument, std::span<const std::uint64_t> counts, int size,
                 const ConstBuffer& buffer);

}  // namespace samestep::checks
