// SHA-256 (FIPS 180-4), for content ids, and what is keyed by it, for proofs.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace weightplane {

namespace detail {

constexpr std::array<std::uint32_t, 64> kSha256 = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

inline std::uint32_t rotate_right(std::uint32_t x, unsigned n) { return x >> n | x << (32 - n); }

inline void sha256_block(std::array<std::uint32_t, 8> &h, const unsigned char *block) {
    std::array<std::uint32_t, 64> w{};
    for (std::size_t i = 0; i < 16; ++i)
        w[i] = std::uint32_t{block[4 * i]} << 24 | std::uint32_t{block[4 * i + 1]} << 16 |
               std::uint32_t{block[4 * i + 2]} << 8 | std::uint32_t{block[4 * i + 3]};
    for (std::size_t i = 16; i < 64; ++i) {
        const std::uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (rotate_right(a, 7) ^ rotate_right(a, 18) ^ a >> 3) + w[i - 7] +
               (rotate_right(b, 17) ^ rotate_right(b, 19) ^ b >> 10);
    }
    std::array<std::uint32_t, 8> v = h;
    for (std::size_t i = 0; i < 64; ++i) {
        const std::uint32_t e = v[4], a = v[0];
        const std::uint32_t t = v[7] + (rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25)) +
                                ((e & v[5]) ^ (~e & v[6])) + kSha256[i] + w[i];
        const std::uint32_t u = (rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22)) +
                                ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        v = {t + u, v[0], v[1], v[2], v[3] + t, v[4], v[5], v[6]};
    }
    for (std::size_t i = 0; i < 8; ++i)
        h[i] += v[i];
}

} // namespace detail

// 32 bytes.
inline std::string sha256(std::string_view text) {
    std::array<std::uint32_t, 8> h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    const auto *at = reinterpret_cast<const unsigned char *>(text.data());
    std::size_t left = text.size();
    for (; left >= 64; left -= 64, at += 64)
        detail::sha256_block(h, at);
    std::array<unsigned char, 128> tail{};
    if (left > 0)
        std::memcpy(tail.data(), at, left);
    tail[left] = 0x80;
    const std::size_t end = left < 56 ? 64 : 128;
    const std::uint64_t bits = std::uint64_t{text.size()} * 8;
    for (std::size_t i = 0; i < 8; ++i)
        tail[end - 1 - i] = static_cast<unsigned char>(bits >> (8 * i));
    for (std::size_t i = 0; i < end; i += 64)
        detail::sha256_block(h, tail.data() + i);
    std::string out;
    for (const auto word : h)
        for (int shift = 24; shift >= 0; shift -= 8)
            out += static_cast<char>(word >> shift & 255);
    return out;
}

// In lower-case hex.
inline std::string hex(std::string_view bytes) {
    static const char digits[] = "0123456789abcdef";
    std::string out;
    for (const char c : bytes) {
        out += digits[c >> 4 & 15];
        out += digits[c & 15];
    }
    return out;
}

// The first 128 bits, as 32 hex digits: what every content id ends with.
inline std::string sha256_128(std::string_view text) { return hex(sha256(text).substr(0, 16)); }

// HMAC (RFC 2104) with SHA-256: 32 bytes.
inline std::string hmac_sha256(std::string_view key, std::string_view text) {
    std::string block = key.size() > 64 ? sha256(key) : std::string(key);
    block.resize(64, '\0');
    std::string inner = block, outer = block;
    for (std::size_t i = 0; i < 64; ++i) {
        inner[i] = static_cast<char>(inner[i] ^ 0x36);
        outer[i] = static_cast<char>(outer[i] ^ 0x5c);
    }
    return sha256(outer + sha256(inner.append(text)));
}

} // namespace weightplane
