// The control connection of transports whose receivers pull: how both sides show that they know the channel's key.
#pragma once

#include <string>
#include <vector>

#include "sha256.hpp"

namespace weightplane {

constexpr std::uint32_t kPullProtocol = 1;
constexpr std::size_t kPullFirstFrame = 4 << 10; // bytes of a message until both sides are proven
constexpr std::size_t kPullFrame = 4 << 20;      // and afterwards

// `side`: "sender" or "receiver", who shows it. See PullChallenge in transport.proto.
inline std::string pull_proof(const std::string &key, const std::string &side, const std::string &channel_id,
                              const std::string &sender, const std::string &receiver,
                              const std::string &receiver_nonce, const std::string &sender_nonce) {
    std::string text;
    for (const auto &part : std::vector<std::string>{"weightplane-pull-1", side, channel_id, sender, receiver,
                                                     receiver_nonce, sender_nonce}) {
        for (std::uint64_t n = part.size(), i = 0; i < 8; ++i, n >>= 8)
            text += static_cast<char>(n & 255);
        text += part;
    }
    return hmac_sha256(key, text);
}

} // namespace weightplane
