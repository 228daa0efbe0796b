// A box of a row-major tensor as runs of contiguous bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace weightplane {

using Shape = std::vector<std::int64_t>;
using Box = std::vector<std::pair<std::int64_t, std::int64_t>>; // [start, stop) of each dimension

inline Box full_box(const Shape &shape) {
    Box box;
    for (const auto d : shape)
        box.emplace_back(0, d);
    return box;
}

inline bool inside(const Box &box, const Box &outer) {
    if (box.size() != outer.size())
        return false;
    for (std::size_t i = 0; i < box.size(); ++i)
        if (box[i].first < outer[i].first || box[i].second > outer[i].second || box[i].first > box[i].second)
            return false;
    return true;
}

// The packed bytes of a box, in the tensor they are cut from. All runs are equally long.
class Runs {
public:
    Runs(const Shape &shape, const Box &box, std::uint64_t item) : strides_(shape.size()) {
        std::uint64_t stride = item;
        for (std::size_t i = shape.size(); i-- > 0; stride *= static_cast<std::uint64_t>(shape[i]))
            strides_[i] = stride;
        std::size_t whole = shape.size(); // dimensions from here on are not cut
        while (whole > 0 && box[whole - 1].first == 0 && box[whole - 1].second == shape[whole - 1])
            --whole;
        length_ = item;
        for (std::size_t i = whole > 0 ? whole - 1 : 0; i < box.size(); ++i)
            length_ *= extent(box[i]);
        nbytes_ = length_;
        for (std::size_t i = 0; i + 1 < whole; ++i) {
            outer_.push_back(extent(box[i]));
            nbytes_ *= outer_.back();
        }
        for (std::size_t i = 0; i < box.size(); ++i)
            start_ += static_cast<std::uint64_t>(box[i].first) * strides_[i];
    }

    std::uint64_t nbytes() const { return nbytes_; }

    // Calls f(offset in the tensor, bytes) for the packed bytes [offset, offset + nbytes), in order.
    template <class F> void each(std::uint64_t offset, std::uint64_t nbytes, F &&f) const {
        while (nbytes > 0) {
            const std::uint64_t run = offset / length_, within = offset % length_;
            const std::uint64_t n = std::min(nbytes, length_ - within);
            f(source(run) + within, n);
            offset += n;
            nbytes -= n;
        }
    }

private:
    static std::uint64_t extent(const std::pair<std::int64_t, std::int64_t> &range) {
        return static_cast<std::uint64_t>(range.second - range.first);
    }

    std::uint64_t source(std::uint64_t run) const {
        std::uint64_t at = start_;
        for (std::size_t i = outer_.size(); i-- > 0; run /= outer_[i])
            at += run % outer_[i] * strides_[i];
        return at;
    }

    std::vector<std::uint64_t> strides_, outer_;
    std::uint64_t length_ = 0, nbytes_ = 0, start_ = 0;
};

} // namespace weightplane
