// wpd1, the digest of a piece's row-major bytes: XXH3-64 over 128 KiB leaves, then over the leaves' values and the size.
// Needs libxxhash. Defined in docs/protocol.md; tests/vectors/digests.json holds what must come out.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#if defined(XXH_INLINE_ALL)
#include <xxhash.h> // as wide as the compiler is told that processors are
#elif defined(__x86_64__)
#include <xxh_x86dispatch.h> // the widest vectors that this processor has
#else
#include <xxhash.h>
#endif

namespace weightplane {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the contract's bytes are little-endian");

// Takes the bytes in any portions. A portion that covers a whole leaf is hashed where it lies.
class Digest {
public:
    static constexpr std::size_t kLeaf = 131072;

    void update(const void *data, std::size_t size) {
        auto at = static_cast<const std::uint8_t *>(data);
        total_ += size;
        while (size > 0) {
            if (partial_.empty() && size >= kLeaf) {
                leaves_.push_back(XXH3_64bits(at, kLeaf));
                at += kLeaf;
                size -= kLeaf;
                continue;
            }
            const std::size_t n = std::min(size, kLeaf - partial_.size());
            partial_.insert(partial_.end(), at, at + n);
            at += n;
            size -= n;
            if (partial_.size() == kLeaf)
                end_leaf();
        }
    }

    // The digest of everything so far; call it once.
    std::uint64_t finish() {
        if (!partial_.empty()) {
            partial_.resize((partial_.size() + 1023) / 1024 * 1024, 0); // zero-padded
            end_leaf();
        }
        leaves_.push_back(total_);
        return XXH3_64bits(leaves_.data(), leaves_.size() * sizeof(std::uint64_t));
    }

private:
    void end_leaf() {
        leaves_.push_back(XXH3_64bits(partial_.data(), partial_.size()));
        partial_.clear();
    }

    std::vector<std::uint64_t> leaves_;
    std::vector<std::uint8_t> partial_;
    std::uint64_t total_ = 0;
};

inline std::uint64_t digest_of(const void *data, std::size_t size) {
    Digest digest;
    digest.update(data, size);
    return digest.finish();
}

// As it is shown to people: 16 hex digits.
inline std::string hex_digest(std::uint64_t value) {
    static const char digits[] = "0123456789abcdef";
    std::string out(16, '0');
    for (std::size_t i = 0; i < 16; ++i)
        out[15 - i] = digits[value >> (4 * i) & 15];
    return out;
}

} // namespace weightplane
