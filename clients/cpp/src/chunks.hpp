// Buckets cut into the messages of TensorService. The payload is not copied: a message points into the mapped file.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <vector>

#include "digests.hpp"
#include "weightplane/framing.hpp"

class Chunks {
public:
    // Plan and source outlive every message.
    Chunks(const weightplane::Plan &plan, const Safetensors &source, std::vector<const weightplane::Bucket *> buckets)
        : plan_(plan), source_(source), buckets_(std::move(buckets)) {}

    // The next message; false if there is none.
    bool next(grpc::ByteBuffer &out) {
        while (at_ < buckets_.size() && offset_ == buckets_[at_]->nbytes) {
            ++at_;
            offset_ = segment_ = within_ = 0;
        }
        if (at_ == buckets_.size())
            return false;
        const auto &bucket = *buckets_[at_];
        const auto n = std::min(weightplane::kChunkBytes, bucket.nbytes - offset_);
        pieces_.clear();
        for (std::uint64_t left = n; left > 0;) {
            const auto &s = bucket.segments[segment_];
            const auto take = std::min(left, s.nbytes - within_);
            each_span(plan_, source_, static_cast<std::size_t>(s.region), s.offset + within_, take,
                      [&](const std::uint8_t *data, std::uint64_t size) { add(data, size); });
            left -= take;
            within_ += take;
            if (within_ == s.nbytes) {
                ++segment_;
                within_ = 0;
            }
        }
        out = message(weightplane::chunk_header(bucket.index, offset_, n), n);
        offset_ += n;
        return true;
    }

private:
    struct Piece {
        const std::uint8_t *data;
        std::uint64_t size;
    };
    static constexpr std::size_t kPieces = 64; // of more, each too small to be worth a slice, one copy is made

    void add(const std::uint8_t *data, std::uint64_t size) {
        if (!pieces_.empty() && pieces_.back().data + pieces_.back().size == data)
            pieces_.back().size += size;
        else
            pieces_.push_back({data, size});
    }

    grpc::ByteBuffer message(const std::string &header, std::uint64_t n) const {
        std::vector<grpc::Slice> slices;
        if (pieces_.size() <= kPieces) {
            slices.emplace_back(header);
            for (const auto &p : pieces_)
                slices.emplace_back(p.data, p.size, grpc::Slice::STATIC_SLICE);
        } else {
            grpc::Slice copy(header.size() + n);
            auto *at = const_cast<std::uint8_t *>(copy.begin()); // ours alone until it is sent
            at = std::copy(header.begin(), header.end(), at);
            for (const auto &p : pieces_)
                at = std::copy(p.data, p.data + p.size, at);
            slices.push_back(copy);
        }
        return grpc::ByteBuffer(slices.data(), slices.size());
    }

    const weightplane::Plan &plan_;
    const Safetensors &source_;
    const std::vector<const weightplane::Bucket *> buckets_;
    std::size_t at_ = 0, segment_ = 0;
    std::uint64_t offset_ = 0, within_ = 0;
    std::vector<Piece> pieces_;
};
