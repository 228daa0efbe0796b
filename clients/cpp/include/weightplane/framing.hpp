// Chunks of TensorService: the bytes of a TransferRequest before its payload, so that the payload need not be copied
// into a message. tests/vectors/framing.json.
#pragma once

#include <cstdint>
#include <string>

namespace weightplane {

constexpr std::uint64_t kChunkBytes = 2 << 20; // the contract's most
constexpr char kKeyMetadata[] = "weightplane-channel-key-bin";
constexpr char kTransferMethod[] = "/weightplane.v1.TensorService/Transfer";

inline void put_varint(std::string &out, std::uint64_t n) {
    for (; n > 0x7F; n >>= 7)
        out += static_cast<char>((n & 0x7F) | 0x80);
    out += static_cast<char>(n);
}

// Followed by `nbytes` of payload it is the whole message.
inline std::string chunk_header(std::int32_t bucket, std::uint64_t offset, std::uint64_t nbytes) {
    std::string out = "\x10";
    put_varint(out, static_cast<std::uint64_t>(bucket));
    out += '\x18';
    put_varint(out, offset);
    out += '\x22';
    put_varint(out, nbytes);
    return out;
}

} // namespace weightplane
