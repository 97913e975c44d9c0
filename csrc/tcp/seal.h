#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "os/aes_gcm.h"
#include "tcp/frame.h"

namespace samestep::tcp {

/// Ends each part of what one direction of a connection carries with a tag that depends on all its bytes.
///
/// Without a key it is a CRC32C. The checksum of TCP misses bytes that change in the memory of a network card, a switch
/// or a host, where it is made anew. With a key the parts are encrypted by AES-256-GCM, whose tag also shows that they
/// come from the peer, in this order.
class Seal {
 public:
  static constexpr std::size_t kMaxTag = AesGcm::kTagBytes;

  /// `key`: empty for none.
  Seal(const std::string& key, AesGcm::Direction direction);

  bool encrypts() const { return cipher_.has_value(); }
  std::size_t tag_nbytes() const { return encrypts() ? AesGcm::kTagBytes : sizeof crc_; }

  /// Writes the tag of a part, and the part itself to `encrypted` if there is a key; that may be the part.
  void seal(Bytes part, std::byte* encrypted, std::byte* tag);
  /// Takes the next bytes of a part that has arrived; decrypts them in place if there is a key. They may still be
  /// wrong.
  void open(std::byte* bytes, std::size_t nbytes);
  /// Ends the part. False if its bytes are not those that were sealed.
  bool check(const std::byte* tag);

 private:
  std::optional<AesGcm> cipher_;
  std::uint32_t crc_ = 0;  // of the bytes that were opened
};

}  // namespace samestep::tcp
