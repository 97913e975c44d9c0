#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "communicator/signature.h"

namespace samestep {

/// Settings of a group that may change after it was made. Groups made from it inherit them. Fields that are not given
/// keep their values.
struct GroupSettings {
  std::optional<Naming> naming = {};                   ///< the names of operations in error texts
  std::optional<std::vector<std::string>> hosts = {};  ///< by rank, for error texts
  std::optional<bool> oversubscribed = {};  ///< more ranks than CPUs on this host: waiting ranks yield at once

  // These must be the same on all ranks, and be set before anything long is sent:
  std::optional<std::string> algorithm = {};              ///< of long reductions; "" selects it by the cost model
  std::optional<std::size_t> segment_bytes = {};          ///< of one rank's part of a segment; 0: the default
  std::optional<std::size_t> default_segment_bytes = {};  ///< the default, if `segment_bytes` was not given before
  std::optional<std::size_t> max_message = {};      ///< limit of a message of the transport in bytes; 0: its own limit
  std::optional<std::size_t> message_segment = {};  ///< longer messages are sent in segments of at most so many bytes

  /// Copies the block that a rank sends to itself in a collective that only moves data. Empty: memmove.
  std::function<void(std::byte* to, const std::byte* from, std::size_t nbytes)> copy_local = {};
};

}  // namespace samestep
