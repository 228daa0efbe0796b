// The expected digests of what this trainer sends, hashed beside the wire.
#pragma once

#include <cstdint>
#include <future>
#include <set>
#include <vector>

#include "safetensors.hpp"
#include "stop.hpp"
#include "weightplane/plan.hpp"

// wpd1 of each region that `member` sends, in plan order; 0 for one that is not `wanted`, hashed by so many threads.
// Throws why `stop` was set.
std::vector<std::uint64_t> region_digests(const weightplane::Plan &plan, const Safetensors &source,
                                          const std::string &member, const std::set<std::size_t> &wanted,
                                          const Stop &stop, unsigned threads);

// Calls f(address, bytes) for bytes [offset, offset + nbytes) of a region, in order.
template <class F>
void each_span(const weightplane::Plan &plan, const Safetensors &source, std::size_t region, std::uint64_t offset,
               std::uint64_t nbytes, F &&f) {
    const auto &r = plan.regions[region];
    const auto tensor = static_cast<std::size_t>(r.tensor);
    const auto &meta = source.manifest().tensors[tensor];
    const weightplane::Runs runs(meta.shape, r.box, weightplane::dtype_bytes(meta.dtype));
    runs.each(offset, nbytes, [&](std::uint64_t at, std::uint64_t n) { f(source.bytes(tensor) + at, n); });
}
