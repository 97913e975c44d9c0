#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace samestep {

/// AES-256-GCM of the parts of one stream, in order, by OpenSSL's libcrypto, which is loaded at run time.
class AesGcm {
 public:
  static constexpr std::size_t kKeyBytes = 32, kTagBytes = 16;
  enum class Direction : std::uint8_t { opens, seals };

  /// The file of the library. Throws UnavailableError, naming what to install, if none loads.
  static std::string library();

  /// `key`: for this stream only, because the nonce of a part is its number. Throws as `library`, and
  /// InvalidArgumentError for a key of another length.
  AesGcm(std::span<const std::byte> key, Direction direction);

  /// Encrypts or decrypts the next bytes of a part; `from` may be `to`.
  void update(const std::byte* from, std::byte* to, std::size_t nbytes);
  /// Ends a part that was encrypted.
  void seal(std::byte* tag);
  /// Ends a part that was decrypted. False if it is not the one that the peer has encrypted with the same number.
  bool open(const std::byte* tag);

 private:
  struct Libcrypto;
  static const Libcrypto& libcrypto();
  void begin();

  std::unique_ptr<void, void (*)(void*)> context_;
  std::uint64_t number_ = 0;  // of the part
  bool in_part_ = false;
};

}  // namespace samestep
