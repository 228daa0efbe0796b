// BLAKE2b (RFC 7693) with a key and a digest of any size up to 64 bytes: names and proofs of the `shm` transport.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace weightplane {

namespace detail {

constexpr std::array<std::uint64_t, 8> kBlakeStart = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr std::uint8_t kBlakeOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

inline std::uint64_t turn(std::uint64_t x, unsigned n) { return x >> n | x << (64 - n); }

// One block of 128 bytes; `total`: bytes so far, this block's included.
inline void blake_block(std::array<std::uint64_t, 8> &h, const char *block, std::uint64_t total, bool last) {
    std::array<std::uint64_t, 16> m{}, v{};
    std::memcpy(m.data(), block, 128);
    std::copy(h.begin(), h.end(), v.begin());
    std::copy(kBlakeStart.begin(), kBlakeStart.end(), v.begin() + 8);
    v[12] ^= total;
    if (last)
        v[14] = ~v[14];
    const auto mix = [&](std::size_t a, std::size_t b, std::size_t c, std::size_t d, std::uint64_t x, std::uint64_t y) {
        v[a] += v[b] + x;
        v[d] = turn(v[d] ^ v[a], 32);
        v[c] += v[d];
        v[b] = turn(v[b] ^ v[c], 24);
        v[a] += v[b] + y;
        v[d] = turn(v[d] ^ v[a], 16);
        v[c] += v[d];
        v[b] = turn(v[b] ^ v[c], 63);
    };
    for (std::size_t round = 0; round < 12; ++round) {
        const auto &s = kBlakeOrder[round % 10];
        for (std::size_t i = 0; i < 4; ++i)
            mix(i, 4 + i, 8 + i, 12 + i, m[s[2 * i]], m[s[2 * i + 1]]);
        for (std::size_t i = 0; i < 4; ++i)
            mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
    }
    for (std::size_t i = 0; i < 8; ++i)
        h[i] ^= v[i] ^ v[i + 8];
}

} // namespace detail

inline std::string blake2b(std::string_view text, std::string_view key, std::size_t size) {
    auto h = detail::kBlakeStart;
    h[0] ^= 0x01010000 ^ key.size() << 8 ^ size;
    std::string all;
    if (!key.empty()) {
        all.assign(key);
        all.resize(128, '\0');
    }
    all += text;
    const std::size_t total = all.size();
    all.resize(std::max<std::size_t>(1, (total + 127) / 128) * 128, '\0');
    for (std::size_t at = 0; at < all.size(); at += 128) {
        const bool last = at + 128 == all.size();
        detail::blake_block(h, all.data() + at, last ? total : at + 128, last);
    }
    return std::string(reinterpret_cast<const char *>(h.data()), size);
}

} // namespace weightplane
