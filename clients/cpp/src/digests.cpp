#include "digests.hpp"

#include <algorithm>
#include <atomic>

#include "weightplane/digest.hpp"

namespace {

constexpr std::uint64_t kPortion = 64 << 20; // bytes between two looks at `stop`

} // namespace

std::vector<std::uint64_t> region_digests(const weightplane::Plan &plan, const Safetensors &source,
                                          const std::string &member, const std::set<std::size_t> &wanted,
                                          const Stop &stop, unsigned threads) {
    const auto regions = plan.regions_from(member);
    std::vector<std::uint64_t> out(regions.size());
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t n = next++; n < regions.size(); n = next++) {
            const auto i = regions[n];
            if (wanted.count(i) == 0)
                continue;
            weightplane::Digest digest;
            const std::uint64_t nbytes = plan.regions[i].nbytes;
            for (std::uint64_t at = 0; at < nbytes; at += kPortion) {
                stop.check();
                each_span(plan, source, i, at, std::min(kPortion, nbytes - at),
                          [&](const std::uint8_t *data, std::uint64_t size) { digest.update(data, size); });
            }
            out[n] = digest.finish();
        }
    };
    std::vector<std::future<void>> others;
    for (unsigned i = 1; i < std::min<std::size_t>(threads, regions.size()); ++i)
        others.push_back(std::async(std::launch::async, work));
    work();
    for (auto &other : others)
        other.get();
    return out;
}
