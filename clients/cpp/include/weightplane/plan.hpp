// Plans: who sends which bytes to whom, in which bucket. tests/vectors/plans.json.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "boxes.hpp"
#include "manifest.hpp"

namespace weightplane {

class PlanError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// One box of one tensor for one set of receivers, as packed row-major bytes: what a digest is taken of.
struct Region {
    std::int32_t tensor = 0;
    Box piece_box, box;
    std::string sender;
    std::vector<std::string> receivers;
    std::uint64_t nbytes = 0;
};

// Bytes [offset, offset + nbytes) of a region.
struct Segment {
    std::int32_t region = 0;
    std::uint64_t offset = 0, nbytes = 0;
};

struct Bucket {
    std::int32_t index = 0;
    std::string sender;
    std::vector<std::string> receivers;
    std::vector<Segment> segments;
    std::uint64_t nbytes = 0;

    bool goes_to(const std::string &receiver) const {
        return std::find(receivers.begin(), receivers.end(), receiver) != receivers.end();
    }
};

namespace detail {

inline std::string box_text(const Box &box) {
    std::string out = "[";
    for (const auto &[start, stop] : box)
        out += (out.size() > 1 ? ",[" : "[") + std::to_string(start) + "," + std::to_string(stop) + "]";
    return out + "]";
}

} // namespace detail

struct Plan {
    std::string id, manifest_id;
    std::uint64_t bucket_bytes = 0;
    std::vector<Region> regions;
    std::vector<Bucket> buckets;

    // The id that this content has.
    std::string content_id() const {
        std::map<std::pair<std::string, std::vector<std::string>>, std::size_t> streams;
        std::string stream_text, region_text, bucket_text;
        for (const auto &r : regions) {
            const auto [at, fresh] = streams.try_emplace({r.sender, r.receivers}, streams.size());
            if (fresh) {
                std::string names;
                for (const auto &receiver : r.receivers)
                    names += (names.empty() ? "" : ",") + json_string(receiver);
                stream_text += (stream_text.empty() ? "[" : ",[") + json_string(r.sender) + ",[" + names + "]]";
            }
            region_text += (region_text.empty() ? "[" : ",[") + std::to_string(r.tensor) + "," +
                           detail::box_text(r.piece_box) + "," + detail::box_text(r.box) + "," +
                           std::to_string(at->second) + "," + std::to_string(r.nbytes) + "]";
        }
        for (const auto &b : buckets) {
            std::string segments;
            for (const auto &s : b.segments)
                segments += (segments.empty() ? "[" : ",[") + std::to_string(s.region) + "," +
                            std::to_string(s.offset) + "," + std::to_string(s.nbytes) + "]";
            bucket_text += (bucket_text.empty() ? "[" : ",[") + segments + "]";
        }
        return "p-" + sha256_128("{\"bucket_bytes\":" + std::to_string(bucket_bytes) + ",\"buckets\":[" + bucket_text +
                                 "],\"manifest_id\":" + json_string(manifest_id) + ",\"regions\":[" + region_text +
                                 "],\"streams\":[" + stream_text + "]}");
    }

    // Throws PlanError unless every byte that it names is inside its tensor and its id is its content's.
    void check(const Manifest &manifest) const {
        for (const auto &r : regions) {
            if (r.tensor < 0 || static_cast<std::size_t>(r.tensor) >= manifest.tensors.size())
                throw PlanError("plan " + id + " names tensor " + std::to_string(r.tensor) + ", which is none");
            const auto &t = manifest.tensors[static_cast<std::size_t>(r.tensor)];
            if (!inside(r.piece_box, full_box(t.shape)) || !inside(r.box, r.piece_box) ||
                Runs(t.shape, r.box, dtype_bytes(t.dtype)).nbytes() != r.nbytes)
                throw PlanError("plan " + id + ": a region does not lie inside tensor '" + t.name + "'");
        }
        for (const auto &b : buckets)
            for (const auto &s : b.segments) {
                if (s.region < 0 || static_cast<std::size_t>(s.region) >= regions.size())
                    throw PlanError("plan " + id + ": bucket " + std::to_string(b.index) + " names no region");
                const auto &r = regions[static_cast<std::size_t>(s.region)];
                if (s.offset > r.nbytes || s.nbytes > r.nbytes - s.offset)
                    throw PlanError("plan " + id + ": bucket " + std::to_string(b.index) + " is outside its region");
            }
        if (content_id() != id)
            throw PlanError("plan " + id + " arrived as " + content_id());
    }

    // Indices of the regions that a member sends, in plan order: the order of its digests.
    std::vector<std::size_t> regions_from(const std::string &sender) const {
        std::vector<std::size_t> out;
        for (std::size_t i = 0; i < regions.size(); ++i)
            if (regions[i].sender == sender)
                out.push_back(i);
        return out;
    }
};

// A plan from its pages (the contract's PlanPage, or anything with its accessors), checked.
template <class Pages> Plan read_plan(const Pages &pages, const Manifest &manifest) {
    const auto &head = *pages.begin();
    const auto member = [&](std::int32_t i) -> std::string {
        if (i < 0 || i >= head.members_size())
            throw PlanError("plan " + head.plan_id() + " names member " + std::to_string(i) + ", which is none");
        return head.members(i);
    };
    const auto receivers = [&](std::int32_t i) {
        if (i < 0 || i >= head.receiver_sets_size())
            throw PlanError("plan " + head.plan_id() + " names receiver set " + std::to_string(i) + ", which is none");
        std::vector<std::string> out;
        for (const auto m : head.receiver_sets(i).members())
            out.push_back(member(m));
        return out;
    };
    const auto box = [&](const auto &ranges, std::int32_t tensor) {
        Box out;
        for (const auto &r : ranges)
            out.emplace_back(r.start(), r.stop());
        if (!out.empty())
            return out;
        if (tensor < 0 || static_cast<std::size_t>(tensor) >= manifest.tensors.size())
            throw PlanError("plan " + head.plan_id() + " names tensor " + std::to_string(tensor) + ", which is none");
        return full_box(manifest.tensors[static_cast<std::size_t>(tensor)].shape);
    };
    Plan plan;
    plan.id = head.plan_id();
    plan.manifest_id = head.manifest_id();
    plan.bucket_bytes = static_cast<std::uint64_t>(head.bucket_bytes());
    for (const auto &page : pages) {
        for (const auto &r : page.regions())
            plan.regions.push_back({r.tensor(), box(r.piece_box(), r.tensor()), box(r.box(), r.tensor()),
                                    member(r.sender()), receivers(r.receiver_set()),
                                    static_cast<std::uint64_t>(r.nbytes())});
        for (const auto &b : page.buckets()) {
            Bucket bucket{static_cast<std::int32_t>(plan.buckets.size()), member(b.sender()),
                          receivers(b.receiver_set()), {}, 0};
            for (const auto &s : b.segments()) {
                bucket.segments.push_back(
                    {s.region(), static_cast<std::uint64_t>(s.offset()), static_cast<std::uint64_t>(s.nbytes())});
                bucket.nbytes += static_cast<std::uint64_t>(s.nbytes());
            }
            plan.buckets.push_back(std::move(bucket));
        }
    }
    plan.check(manifest);
    return plan;
}

// Indices of the regions that VERIFY_LEVEL_SAMPLED hashes: splitmix64, seeded by the FNV-1a hash of the update's id,
// drives a selection by Floyd.
inline std::set<std::size_t> sampled_regions(const std::string &update_id, std::size_t regions) {
    const std::size_t count = std::min(regions, std::max<std::size_t>(16, std::min<std::size_t>(4096, regions / 16)));
    std::uint64_t seed = 0xCBF29CE484222325;
    for (const char c : update_id)
        seed = (seed ^ static_cast<unsigned char>(c)) * 0x100000001B3;
    std::set<std::size_t> chosen;
    for (std::size_t j = regions - count; j < regions; ++j) {
        seed += 0x9E3779B97F4A7C15;
        std::uint64_t z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9;
        z = (z ^ z >> 27) * 0x94D049BB133111EB;
        const std::size_t pick = (z ^ z >> 31) % (j + 1);
        chosen.insert(chosen.count(pick) > 0 ? j : pick);
    }
    return chosen;
}

} // namespace weightplane
