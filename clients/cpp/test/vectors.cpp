// Compares this library with tests/vectors/*.json: `vectors FOLDER`. Says every difference; exit status 1 if there is one.
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "errors.hpp"
#include "shm_segment.hpp"
#include "weightplane/collective.hpp"
#include "weightplane/digest.hpp"
#include "weightplane/framing.hpp"
#include "weightplane/plan.hpp"
#include "weightplane/pull.hpp"
#include "weightplane/v1/tensor.pb.h"
#include "weightplane/v1/transport.pb.h"

namespace {

using nlohmann::json;
namespace v1 = weightplane::v1;

int differences = 0, compared = 0;

template <class A, class B> void expect(const std::string &what, const A &found, const B &wanted) {
    ++compared;
    if (found == wanted)
        return;
    ++differences;
    std::cerr << what << ": expected " << json(wanted).dump() << ", found " << json(found).dump() << "\n";
}

json load(const std::string &path) {
    std::ifstream file(path);
    if (!file)
        throw std::runtime_error(path + " cannot be read");
    return json::parse(file);
}

using weightplane::hex;

std::string unhex(const std::string &text) {
    std::string out;
    for (std::size_t i = 0; i + 1 < text.size(); i += 2)
        out += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
    return out;
}

std::string pattern(std::size_t n) {
    std::string out(n, 0);
    for (std::size_t i = 0; i < n; ++i)
        out[i] = static_cast<char>(131 * i + i / 251);
    return out;
}

weightplane::Box box_of(const json &rows) {
    weightplane::Box out;
    for (const auto &row : rows)
        out.emplace_back(row.at(0).get<std::int64_t>(), row.at(1).get<std::int64_t>());
    return out;
}

void digests(const json &file) {
    for (const auto &row : file.at("bytes")) {
        const auto bytes = pattern(row.at("nbytes"));
        const std::string wanted = row.at("digest");
        expect("digest of " + row.dump(), weightplane::hex_digest(weightplane::digest_of(bytes.data(), bytes.size())), wanted);
        weightplane::Digest portions; // the same in portions of an odd size
        for (std::size_t at = 0; at < bytes.size(); at += 70001)
            portions.update(bytes.data() + at, std::min<std::size_t>(70001, bytes.size() - at));
        expect("digest in portions of " + row.dump(), weightplane::hex_digest(portions.finish()), wanted);
    }
    for (const auto &row : file.at("tensors")) {
        const auto bytes = pattern(row.at("nbytes"));
        const weightplane::Runs runs(row.at("shape").get<weightplane::Shape>(), box_of(row.at("slice")),
                                     weightplane::dtype_bytes(row.at("dtype")));
        weightplane::Digest digest;
        runs.each(0, runs.nbytes(), [&](std::uint64_t at, std::uint64_t n) { digest.update(bytes.data() + at, n); });
        expect("digest of " + row.dump(), weightplane::hex_digest(digest.finish()), row.at("digest").get<std::string>());
    }
}

std::map<std::string, weightplane::Manifest> manifests(const json &file) {
    std::map<std::string, weightplane::Manifest> out;
    for (const auto &row : file) {
        weightplane::Manifest manifest;
        for (const auto &t : row.at("tensors"))
            manifest.tensors.push_back({t.at(0), t.at(1), t.at(2).get<weightplane::Shape>(), t.at(3)});
        const std::string name = row.at("case");
        expect("manifest '" + name + "'", manifest.id(), row.at("id").get<std::string>());
        expect("bytes of manifest '" + name + "'", manifest.nbytes(), row.at("nbytes").get<std::uint64_t>());
        out[name] = manifest;
    }
    return out;
}

template <class Ranges> void put_box(const weightplane::Box &box, const weightplane::Shape &shape, Ranges *out) {
    if (box == weightplane::full_box(shape))
        return; // the contract's short form
    for (const auto &[start, stop] : box) {
        auto &range = *out->Add();
        range.set_start(start);
        range.set_stop(stop);
    }
}

// The plan of a vector as the contract's pages: regions in one, each bucket in one of its own.
std::vector<v1::PlanPage> pages_of(const json &row, const weightplane::Manifest &manifest) {
    v1::PlanPage head;
    head.set_plan_id(row.at("id"));
    head.set_manifest_id(row.at("manifest_id"));
    head.set_bucket_bytes(row.at("bucket_bytes"));
    std::map<std::string, std::int32_t> members;
    const auto member = [&](const std::string &name) {
        const auto [at, fresh] = members.try_emplace(name, static_cast<std::int32_t>(members.size()));
        if (fresh)
            head.add_members(name);
        return at->second;
    };
    std::vector<std::int32_t> senders;
    for (const auto &stream : row.at("streams")) {
        senders.push_back(member(stream.at(0)));
        auto &set = *head.add_receiver_sets();
        for (const auto &receiver : stream.at(1))
            set.add_members(member(receiver));
    }
    for (const auto &r : row.at("regions")) {
        auto &region = *head.add_regions();
        const auto &shape = manifest.tensors.at(r.at(0).get<std::size_t>()).shape;
        region.set_tensor(r.at(0));
        put_box(box_of(r.at(1)), shape, region.mutable_piece_box());
        put_box(box_of(r.at(2)), shape, region.mutable_box());
        region.set_receiver_set(r.at(3));
        region.set_sender(senders.at(r.at(3)));
        region.set_nbytes(r.at(4));
    }
    std::vector<v1::PlanPage> out{head};
    for (const auto &segments : row.at("buckets")) {
        v1::PlanPage page;
        auto &bucket = *page.add_buckets();
        const auto &first = head.regions(segments.at(0).at(0));
        bucket.set_sender(first.sender());
        bucket.set_receiver_set(first.receiver_set());
        for (const auto &s : segments) {
            auto &segment = *bucket.add_segments();
            segment.set_region(s.at(0));
            segment.set_offset(s.at(1));
            segment.set_nbytes(s.at(2));
        }
        out.push_back(page);
    }
    return out;
}

void plans(const json &file, const std::map<std::string, weightplane::Manifest> &manifests) {
    for (const auto &row : file) {
        const std::string name = "plan '" + row.at("case").get<std::string>() + "'";
        const auto &manifest = manifests.at(row.at("manifest"));
        auto pages = pages_of(row.at("plan"), manifest);
        const auto plan = weightplane::read_plan(pages, manifest); // throws if the id is not its content's
        expect(name, plan.content_id(), row.at("plan").at("id").get<std::string>());
        json buckets = json::array();
        for (const auto &b : plan.buckets) {
            buckets.push_back(json::array());
            for (const auto &s : b.segments)
                buckets.back().push_back({s.region, s.offset, s.nbytes});
        }
        expect("buckets of " + name, buckets, row.at("plan").at("buckets"));
        pages[0].set_bucket_bytes(row.at("bucket_bytes").get<std::int64_t>() + 1);
        bool refused = false;
        try {
            weightplane::read_plan(pages, manifest);
        } catch (const weightplane::PlanError &) {
            refused = true;
        }
        expect(name + " with other content is refused", refused, true);
    }
}

void framing(const json &file) {
    for (const auto &row : file.at("chunks")) {
        const auto header = weightplane::chunk_header(row.at("bucket"), row.at("offset"), row.at("nbytes"));
        expect("header of chunk " + row.dump(), hex(header), row.at("header").get<std::string>());
        v1::TransferRequest read;
        read.ParseFromString(header + pattern(row.at("nbytes")));
        expect("offset in chunk " + row.dump(), read.offset(), row.at("offset").get<std::int64_t>());
        expect("payload of chunk " + row.dump(), read.data() == pattern(row.at("nbytes")), true);
    }
    for (const auto &row : file.at("errors")) {
        const auto found = refusal_of(unhex(row.at("details")));
        const std::string what = "error '" + row.at("case").get<std::string>() + "'";
        expect(what + " is one", found.has_value(), true);
        if (!found)
            continue;
        expect("reason of " + what, found->reason, row.at("reason").get<std::string>());
        expect("message of " + what, std::string(found->what()), row.at("message").get<std::string>());
        expect("member of " + what, found->member, row.at("member").get<std::string>());
        expect("update of " + what, found->update ? found->update->update_id() : "", row.at("update_id").get<std::string>());
    }
    for (const auto &row : file.at("shm")) {
        const std::string channel = row.at("channel_id"), sender = row.at("sender");
        expect("shm name of " + row.dump(), shm_name(channel, sender), row.at("name").get<std::string>());
        const auto fence = shm_fence(row.at("update_id"), row.at("epoch"), row.at("generation"));
        expect("shm fence of " + row.dump(), hex(fence), row.at("fence").get<std::string>());
        expect("shm proof of " + row.dump(), hex(shm_proof(unhex(row.at("key")), "sender", channel, sender)),
               row.at("proof").get<std::string>());
    }
    for (const auto &row : file.at("pulls"))
        for (const char *side : {"sender", "receiver"})
            expect("proof of the " + std::string(side) + " in " + row.dump(),
                   hex(weightplane::pull_proof(unhex(row.at("key")), side, row.at("channel_id"), row.at("member"),
                                               row.at("peer"), unhex(row.at("nonce")), unhex(row.at("sender_nonce")))),
                   row.at(side).get<std::string>());
    for (const auto &row : file.at("steps")) {
        const auto &t = row.at("tuning");
        weightplane::Bucket bucket;
        for (const std::uint64_t n : row.at("segments"))
            bucket.segments.push_back({0, 0, n});
        json found = json::array();
        for (const auto &step : weightplane::steps_of(bucket, {t.at(0), t.at(1), t.at(2)})) {
            json parts = json::array();
            for (const auto &p : step.parts)
                parts.push_back({p.offset, p.nbytes, p.at});
            found.push_back({{"large", step.large}, {"parts", parts}});
        }
        expect("steps of segments " + row.at("segments").dump(), found, row.at("steps"));
    }
    for (const auto &row : file.at("fences")) {
        const auto found = weightplane::fence_text(row.at("channel_id"), row.at("update_id"), row.at("epoch"),
                                                   row.at("generation"), row.at("first"), row.at("buckets"),
                                                   row.at("bytes"), {});
        expect("bytes of a fence", found.size(), std::size_t{weightplane::kFenceBytes});
        expect("fence of " + row.at("update_id").dump(), std::string(found.c_str()), row.at("text").get<std::string>());
    }
    for (const auto &row : file.at("samples")) {
        const auto chosen = weightplane::sampled_regions(row.at("update_id"), row.at("regions"));
        expect("sample of " + row.at("update_id").dump(), json(chosen), row.at("chosen"));
    }
}

} // namespace

int main(int argc, char **argv) {
    try {
        const std::string folder = argc > 1 ? argv[1] : "tests/vectors";
        digests(load(folder + "/digests.json"));
        plans(load(folder + "/plans.json"), manifests(load(folder + "/manifests.json")));
        framing(load(folder + "/framing.json"));
    } catch (const std::exception &e) {
        std::cerr << "the vectors cannot be compared: " << e.what() << "\n";
        return 2;
    }
    std::cout << compared << " values compared, " << differences << " differ\n";
    return differences == 0 ? 0 : 1;
}
