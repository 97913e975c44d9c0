#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace samestep::tcp {

using Bytes = std::span<const std::byte>;

/// What goes before everything on a connection, in the byte order of little-endian machines.
struct Frame {
  enum class Kind : std::uint32_t {
    message,  ///< `nbytes` of it follow
    offer,    ///< of a long message: it comes when it is wanted
    wanted,   ///< the offered message `id`
    piece,    ///< `nbytes` of the offered message `id` follow
    leave,    ///< the sender has closed the group
  };

  std::uint64_t group;
  std::uint64_t nbytes;
  std::uint32_t sequence;  ///< on its connection
  Kind kind;
  std::int32_t tag;
  std::uint32_t id;
};
static_assert(sizeof(Frame) == 32);

/// Of the first frame; what is not sent by this version does not begin like that.
inline constexpr std::uint32_t kFirstSequence = 0x73730001;

/// Longer messages are offered first: they need no memory but the receive's, and others may overtake them.
inline constexpr std::size_t kLongestUnasked = 512 << 10;
inline constexpr std::size_t kPiece = 1 << 20;

inline bool has_bytes(const Frame& frame) {
  return frame.kind == Frame::Kind::message || frame.kind == Frame::Kind::piece;
}

/// False for what no rank sends.
inline bool is_valid(const Frame& frame) {
  return frame.kind <= Frame::Kind::leave && (!has_bytes(frame) || frame.nbytes <= kPiece);
}

}  // namespace samestep::tcp
