#include "tcp/seal.h"

#include <cstring>
#include <utility>

#include "kernels/crc32c.h"

namespace samestep::tcp {

Seal::Seal(const std::string& key, AesGcm::Direction direction) {
  if (!key.empty()) cipher_.emplace(std::as_bytes(std::span(key)), direction);
}

void Seal::seal(Bytes part, std::byte* encrypted, std::byte* tag) {
  if (cipher_) {
    cipher_->update(part.data(), encrypted, part.size());
    return cipher_->seal(tag);
  }
  const std::uint32_t crc = kernels::crc32c(part.data(), part.size());
  std::memcpy(tag, &crc, sizeof crc);
}

void Seal::open(std::byte* bytes, std::size_t nbytes) {
  if (cipher_) return cipher_->update(bytes, bytes, nbytes);
  crc_ = kernels::crc32c(bytes, nbytes, crc_);
}

bool Seal::check(const std::byte* tag) {
  if (cipher_) return cipher_->open(tag);
  const std::uint32_t crc = std::exchange(crc_, 0);
  return std::memcmp(tag, &crc, sizeof crc) == 0;
}

}  // namespace samestep::tcp
