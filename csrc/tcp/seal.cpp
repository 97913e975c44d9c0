#include "tcp/seal.h"

#include <cstring>
#include <utility>

#include "kernels/crc32c.h"

namespace samestep::tcp {

void Seal::seal(Bytes part, std::byte* tag) {
  const std::uint32_t crc = kernels::crc32c(part.data(), part.size());
  std::memcpy(tag, &crc, sizeof crc);
}

void Seal::open(std::byte* bytes, std::size_t nbytes) { crc_ = kernels::crc32c(bytes, nbytes, crc_); }

bool Seal::check(const std::byte* tag) {
  const std::uint32_t crc = std::exchange(crc_, 0);
  return std::memcmp(tag, &crc, sizeof crc) == 0;
}

}  // namespace samestep::tcp
