#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace samestep::tcp {

using Bytes = std::span<const std::byte>;

/// The header of a frame; integers are little-endian. Its tag follows, then the bytes, if there are any, and theirs;
/// see Seal.
struct Frame {
  enum class Kind : std::uint32_t {
    eager,   ///< a message, whose `nbytes` follow
    rts,     ///< request to send a long message `id`, which is sent after a CTS
    cts,     ///< clear to send message `id`
    data,    ///< the next `nbytes` of message `id` follow
    leave,   ///< the sender has closed the group
    damage,  ///< what the sender received is not what was sent: it ends the connection
  };

  std::uint64_t group;
  std::uint64_t nbytes;
  std::uint32_t sequence;  ///< number of the frame on its connection
  Kind kind;
  std::int32_t tag;
  std::uint32_t id;
};
static_assert(sizeof(Frame) == 32);

/// The sequence number of the first frame, which identifies this version of the protocol.
inline constexpr std::uint32_t kFirstSequence = 0x73730002;

/// Longer messages use the rendezvous protocol: they need no memory but the receive's, and short ones may overtake
/// them.
inline constexpr std::size_t kEagerLimit = 512 << 10;
inline constexpr std::size_t kDataFrameBytes = 1 << 20;

inline bool has_bytes(const Frame& frame) {
  return frame.kind == Frame::Kind::eager || frame.kind == Frame::Kind::data;
}

/// False for a frame that no rank sends.
inline bool is_valid(const Frame& frame) {
  return frame.kind <= Frame::Kind::damage && (!has_bytes(frame) || frame.nbytes <= kDataFrameBytes);
}

}  // namespace samestep::tcp
