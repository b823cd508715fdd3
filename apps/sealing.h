// Digests and signatures of the receipts: SHA-256 and Ed25519, both from OpenSSL. Hexadecimal text is lower case.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace k3 {

// A digest that grows. Throws std::runtime_error where the library fails.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void add(std::span<const std::byte> bytes);
  std::string hex();  // of all that was added; once

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

std::string sha256_hex(std::string_view text);
// Throws std::system_error naming a file that cannot be read.
std::string file_text(const std::string& path);
std::string file_sha256(const std::string& path);
// Of what the HDF5 file says, whatever its layout (loader/h5_content.h).
std::string content_sha256(const std::string& path);

// A key that signs. Its file is the user's: PEM (PKCS#8), readable by its owner only.
class SigningKey {
 public:
  static SigningKey generate();
  // Throws std::invalid_argument where the file holds no Ed25519 key.
  static SigningKey load(const std::string& path);
  SigningKey(SigningKey&&) noexcept;
  ~SigningKey();
  // Throws std::invalid_argument where `path` is there already: a lost key cannot be had back.
  void save(const std::string& path) const;
  std::string public_hex() const;  // 64 digits
  std::string sign_hex(std::string_view text) const;

 private:
  struct Impl;
  explicit SigningKey(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Whether `signature` (hex) of `text` is the one that the key with this public half makes. False for what is no signature.
bool signed_by(std::string_view public_hex, std::string_view text, std::string_view signature_hex);

}  // namespace k3
