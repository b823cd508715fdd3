#include "apps/sealing.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "loader/h5_content.h"

namespace k3 {
namespace {

template <auto Free>
struct Freed {
  template <class T>
  void operator()(T* p) const {
    Free(p);
  }
};
using Key = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;
using Digest = std::unique_ptr<EVP_MD_CTX, Freed<EVP_MD_CTX_free>>;
struct CloseFile {
  void operator()(std::FILE* f) const { std::fclose(f); }
};
using CFile = std::unique_ptr<std::FILE, CloseFile>;

void need(bool good, const char* what) {
  if (!good) throw std::runtime_error(std::string("OpenSSL: ") + what + " failed");
}

std::string hex_of(std::span<const unsigned char> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const unsigned char b : bytes) {
    out += kDigits[b >> 4];
    out += kDigits[b & 15];
  }
  return out;
}

// Empty for what is no hexadecimal text of lower case.
std::vector<unsigned char> bytes_of(std::string_view hex) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  std::vector<unsigned char> out;
  if (hex.size() % 2 != 0) return out;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    const int high = digit(hex[i]), low = digit(hex[i + 1]);
    if (high < 0 || low < 0) return {};
    out.push_back(static_cast<unsigned char>(high * 16 + low));
  }
  return out;
}

const unsigned char* bytes(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

}  // namespace

struct Sha256::Impl {
  Digest context{EVP_MD_CTX_new()};
};

Sha256::Sha256() : impl_(std::make_unique<Impl>()) {
  need(impl_->context && EVP_DigestInit_ex(impl_->context.get(), EVP_sha256(), nullptr) == 1,
       "SHA-256");
}
Sha256::~Sha256() = default;

void Sha256::add(std::span<const std::byte> more) {
  need(EVP_DigestUpdate(impl_->context.get(), more.data(), more.size()) == 1, "SHA-256");
}

std::string Sha256::hex() {
  std::vector<unsigned char> out(32);
  need(EVP_DigestFinal_ex(impl_->context.get(), out.data(), nullptr) == 1, "SHA-256");
  return hex_of(out);
}

std::string sha256_hex(std::string_view text) {
  Sha256 digest;
  digest.add(std::as_bytes(std::span(text)));
  return digest.hex();
}

std::string file_text(const std::string& path) {
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in) throw std::system_error(errno ? errno : EIO, std::generic_category(), path);
  return text;
}

std::string file_sha256(const std::string& path) { return sha256_hex(file_text(path)); }

std::string content_sha256(const std::string& path) {
  Sha256 digest;
  h5::visit_content(path, [&](std::span<const std::byte> piece) { digest.add(piece); });
  return digest.hex();
}

struct SigningKey::Impl {
  Key key;
};

SigningKey::SigningKey(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SigningKey::SigningKey(SigningKey&&) noexcept = default;
SigningKey::~SigningKey() = default;

SigningKey SigningKey::generate() {
  Key key(EVP_PKEY_Q_keygen(nullptr, nullptr, "ED25519"));
  need(key != nullptr, "making a key");
  return SigningKey(std::make_unique<Impl>(Impl{std::move(key)}));
}

SigningKey SigningKey::load(const std::string& path) {
  const CFile file(std::fopen(path.c_str(), "rb"));
  if (!file) throw std::system_error(errno, std::generic_category(), path);
  // No question at the terminal for a passphrase: a key with one is refused like any other text.
  const auto no_passphrase = [](char*, int, int, void*) { return -1; };
  Key key(PEM_read_PrivateKey(file.get(), nullptr, no_passphrase, nullptr));
  if (!key || EVP_PKEY_get_id(key.get()) != EVP_PKEY_ED25519) {
    throw std::invalid_argument(path +
                                ": holds no Ed25519 key; expected what k3report keygen writes");
  }
  return SigningKey(std::make_unique<Impl>(Impl{std::move(key)}));
}

void SigningKey::save(const std::string& path) const {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0 && errno == EEXIST) {
    throw std::invalid_argument(path + ": is there already; expected a new name for a new key");
  }
  CFile file(fd < 0 ? nullptr : ::fdopen(fd, "wb"));
  if (!file) throw std::system_error(errno, std::generic_category(), path);
  const bool written = PEM_write_PKCS8PrivateKey(file.get(), impl_->key.get(), nullptr, nullptr, 0,
                                                 nullptr, nullptr) == 1;
  if (std::fclose(file.release()) != 0 || !written)
    throw std::system_error(errno ? errno : EIO, std::generic_category(), path);
}

std::string SigningKey::public_hex() const {
  std::vector<unsigned char> out(32);
  std::size_t n = out.size();
  need(EVP_PKEY_get_raw_public_key(impl_->key.get(), out.data(), &n) == 1 && n == 32,
       "reading a key");
  return hex_of(out);
}

std::string SigningKey::sign_hex(std::string_view text) const {
  const Digest context(EVP_MD_CTX_new());
  std::vector<unsigned char> out(64);
  std::size_t n = out.size();
  need(context &&
           EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, impl_->key.get()) == 1 &&
           EVP_DigestSign(context.get(), out.data(), &n, bytes(text), text.size()) == 1 && n == 64,
       "signing");
  return hex_of(out);
}

bool signed_by(std::string_view public_hex, std::string_view text, std::string_view signature_hex) {
  const auto raw = bytes_of(public_hex), signature = bytes_of(signature_hex);
  if (raw.size() != 32 || signature.size() != 64) return false;
  const Key key(EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, raw.data(), raw.size()));
  const Digest context(EVP_MD_CTX_new());
  return key && context &&
         EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
         EVP_DigestVerify(context.get(), signature.data(), signature.size(), bytes(text),
                          text.size()) == 1;
}

}  // namespace k3
