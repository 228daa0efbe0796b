// How one bucket goes over a collective's wire: what transports/weightplane/transports/collective_layout.py says.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "plan.hpp"

namespace weightplane {

constexpr std::uint64_t kFenceBytes = 512;

// Equal in all members of a channel.
struct Tuning {
    std::uint64_t large = 32 << 20; // bytes from which a segment travels unpacked
    std::uint64_t pack = 192 << 20; // bytes of a packed buffer
    std::uint64_t slots = 2;        // such buffers
};

// Bytes [offset, offset + nbytes) of the bucket; `at`: where they lie in the packed buffer.
struct Part {
    std::uint64_t offset = 0, nbytes = 0, at = 0;
};

// One packed buffer of `nbytes` bytes, or (`large`) stretches that travel as they are, in one group.
struct Step {
    bool large = false;
    std::vector<Part> parts;
    std::uint64_t nbytes = 0; // of the buffer, gaps included
};

inline std::vector<Step> steps_of(const Bucket &bucket, const Tuning &tuning) {
    constexpr std::uint64_t kAlign = 16, kCut = 1 << 20;
    constexpr std::size_t kGroup = 64;
    std::vector<Step> out;
    std::vector<Part> large, parts;
    std::uint64_t at = 0, offset = 0;
    const auto seal = [&] {
        if (!parts.empty())
            out.push_back({false, parts, parts.back().at + parts.back().nbytes});
        parts.clear();
        at = 0;
    };
    for (const auto &segment : bucket.segments) {
        std::uint64_t left = segment.nbytes;
        if (left >= tuning.large) {
            large.push_back({offset, left, 0});
            offset += left;
            continue;
        }
        while (left > 0) {
            const auto room = tuning.pack > at ? tuning.pack - at : 0;
            const auto n = left <= room ? left : room >= std::min(kCut, tuning.pack) ? room : 0;
            if (n > 0) {
                if (!parts.empty() && parts.back().offset + parts.back().nbytes == offset &&
                    parts.back().at + parts.back().nbytes == at)
                    parts.back().nbytes += n; // neighbours on both sides are one part
                else
                    parts.push_back({offset, n, at});
                at += (n + kAlign - 1) / kAlign * kAlign;
                offset += n;
                left -= n;
            }
            if (left > 0)
                seal();
        }
    }
    seal();
    for (std::size_t i = 0; i < large.size(); i += kGroup) {
        const auto end = std::min(large.size(), i + kGroup);
        out.push_back({true, {large.begin() + static_cast<long>(i), large.begin() + static_cast<long>(end)}, 0});
    }
    return out;
}

// What precedes the first of `count` buckets of `nbytes` bytes together: all that one call armed of one sender for one
// set of receivers. The ids are the control plane's: short and of plain letters.
inline std::string fence_text(const std::string &channel_id, const std::string &update_id, std::int64_t epoch,
                              std::int64_t generation, std::int32_t first, std::size_t count, std::uint64_t nbytes,
                              const Tuning &tuning) {
    auto out = "{\"layout\":1,\"tuning\":\"" + std::to_string(tuning.large) + "/" + std::to_string(tuning.pack) + "/" +
               std::to_string(tuning.slots) + "\",\"channel\":" + json_string(channel_id) +
               ",\"update\":" + json_string(update_id) + ",\"epoch\":" + std::to_string(epoch) +
               ",\"generation\":" + std::to_string(generation) + ",\"first\":" + std::to_string(first) +
               ",\"buckets\":" + std::to_string(count) + ",\"bytes\":" + std::to_string(nbytes) + "}";
    out.resize(kFenceBytes, '\0');
    return out;
}

} // namespace weightplane
