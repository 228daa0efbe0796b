#include "digests.hpp"

#include "weightplane/digest.hpp"

namespace {

constexpr std::uint64_t kPortion = 64 << 20; // bytes between two looks at `stop`

} // namespace

std::vector<std::uint64_t> region_digests(const weightplane::Plan &plan, const Safetensors &source,
                                          const std::string &member, const std::set<std::size_t> &wanted,
                                          const Stop &stop) {
    std::vector<std::uint64_t> out;
    for (const auto i : plan.regions_from(member)) {
        if (wanted.count(i) == 0) {
            out.push_back(0);
            continue;
        }
        weightplane::Digest digest;
        const std::uint64_t nbytes = plan.regions[i].nbytes;
        for (std::uint64_t at = 0; at < nbytes; at += kPortion) {
            stop.check();
            each_span(plan, source, i, at, std::min(kPortion, nbytes - at),
                      [&](const std::uint8_t *data, std::uint64_t n) { digest.update(data, n); });
        }
        out.push_back(digest.finish());
    }
    return out;
}
