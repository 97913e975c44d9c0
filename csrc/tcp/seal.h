#pragma once

#include <cstddef>
#include <cstdint>

#include "tcp/frame.h"

namespace samestep::tcp {

/// Ends each part of what one direction of a connection carries with a tag that depends on all its bytes: a CRC32C. The
/// checksum of TCP misses bytes that change in the memory of a network card, a switch or a host, where it is made anew.
class Seal {
 public:
  static constexpr std::size_t kMaxTag = 4;
  std::size_t tag_nbytes() const { return sizeof crc_; }

  /// Writes the tag of a part.
  void seal(Bytes part, std::byte* tag);
  /// Takes the next bytes of a part that has arrived.
  void open(std::byte* bytes, std::size_t nbytes);
  /// Ends the part. False if its bytes are not those that were sealed.
  bool check(const std::byte* tag);

 private:
  std::uint32_t crc_ = 0;  // of the bytes that were opened
};

}  // namespace samestep::tcp
