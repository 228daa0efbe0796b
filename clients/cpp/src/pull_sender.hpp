// Transports whose receivers pull: each is told which bytes it may read, and answers when it has them.
#pragma once

#include <memory>
#include <vector>

#include "pull_listener.hpp"
#include "sender.hpp"

// Where a bucket's bytes lie, chunk after chunk.
struct PullChunk {
    std::uint64_t offset, nbytes;
};

// The sender's memory as its receivers see it: one region.
class PullMemory {
public:
    virtual ~PullMemory() = default;
    virtual weightplane::v1::PullWelcome welcome() const = 0;
    virtual weightplane::v1::PullRegion region() const = 0; // its id is 1
    virtual std::vector<PullChunk> chunks(const weightplane::Plan &plan, const weightplane::Bucket &bucket) const = 0;
};

std::unique_ptr<Sender> pull_sender(const Shipment &shipment, PullListener &listener, const PullMemory &memory);
