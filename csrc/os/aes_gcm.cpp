#include "os/aes_gcm.h"

#include <cstring>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "os/dynamic_library.h"

namespace samestep {
namespace {

constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_GCM_GET_TAG and _SET_TAG

unsigned char* bytes(std::byte* data) { return reinterpret_cast<unsigned char*>(data); }
const unsigned char* bytes(const std::byte* data) { return reinterpret_cast<const unsigned char*>(data); }

void require(int outcome) {
  if (outcome != 1) throw Error("libcrypto has refused to encrypt or decrypt");
}

}  // namespace

/// The functions, whose interface is the same in OpenSSL 1.1 to 4.
struct AesGcm::Libcrypto {
  OpenedLibrary library;
  void* (*make)() = find("EVP_CIPHER_CTX_new");
  void (*free)(void*) = find("EVP_CIPHER_CTX_free");
  const void* (*aes_256_gcm)() = find("EVP_aes_256_gcm");
  int (*init)(void*, const void* cipher, void* engine, const unsigned char* key, const unsigned char* nonce,
              int seals) = find("EVP_CipherInit_ex");
  int (*update)(void*, unsigned char* to, int* written, const unsigned char* from,
                int nbytes) = find("EVP_CipherUpdate");
  int (*finish)(void*, unsigned char* to, int* written) = find("EVP_CipherFinal_ex");
  int (*control)(void*, int what, int nbytes, void* data) = find("EVP_CIPHER_CTX_ctrl");

  Symbol find(const char* name) const {
    if (void* const address = library.find(name)) return {address};
    throw UnavailableError(library.path() + " has no AES-256-GCM");
  }
};

const AesGcm::Libcrypto& AesGcm::libcrypto() {
  static const Libcrypto found = [] {
    std::string why;
    for (const char* const name : {"libcrypto.so.3", "libcrypto.so.4", "libcrypto.so.1.1"}) {
      try {
        return Libcrypto{OpenedLibrary(name)};
      } catch (const UnavailableError& error) {
        why += str(why.empty() ? "" : "; ", error.what());
      }
    }
    throw UnavailableError(
        str("encryption needs libcrypto of OpenSSL. Cure: apt install libssl3, dnf install openssl-libs, or conda "
            "install openssl (",
            why, ")"));
  }();
  return found;
}

std::string AesGcm::library() { return libcrypto().library.path(); }

AesGcm::AesGcm(std::span<const std::byte> key, Direction direction) : context_(libcrypto().make(), libcrypto().free) {
  if (key.size() != kKeyBytes) throw InvalidArgumentError(str("a key must have ", kKeyBytes, " bytes"));
  if (!context_) throw Error("libcrypto has no memory");
  const int seals = direction == Direction::seals ? 1 : 0;
  require(libcrypto().init(context_.get(), libcrypto().aes_256_gcm(), nullptr, bytes(key.data()), nullptr, seals));
}

void AesGcm::begin() {
  if (std::exchange(in_part_, true)) return;
  std::array<std::byte, 12> nonce{};
  std::memcpy(nonce.data(), &number_, sizeof number_);
  ++number_;
  require(libcrypto().init(context_.get(), nullptr, nullptr, nullptr, bytes(nonce.data()), -1));
}

void AesGcm::update(const std::byte* from, std::byte* to, std::size_t nbytes) {
  begin();
  int written = 0;
  require(libcrypto().update(context_.get(), bytes(to), &written, bytes(from), static_cast<int>(nbytes)));
}

void AesGcm::seal(std::byte* tag) {
  std::array<std::byte, kTagBytes> nothing;
  int written = 0;
  require(libcrypto().finish(context_.get(), bytes(nothing.data()), &written));
  require(libcrypto().control(context_.get(), kGetTag, kTagBytes, tag));
  in_part_ = false;
}

bool AesGcm::open(const std::byte* tag) {
  std::array<std::byte, kTagBytes> given;
  std::memcpy(given.data(), tag, given.size());
  int written = 0;
  require(libcrypto().control(context_.get(), kSetTag, kTagBytes, given.data()));
  in_part_ = false;
  return libcrypto().finish(context_.get(), bytes(given.data()), &written) == 1;
}

}  // namespace samestep
