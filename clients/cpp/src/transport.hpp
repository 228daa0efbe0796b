// The transports that this program has: what each offers the control plane, and what sends by it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "options.hpp"
#include "sender.hpp"

class Transport {
public:
    virtual ~Transport() = default;
    virtual std::string name() const = 0;
    // What InitTransfer is told. Throws Error with reason TRANSPORT: why it does not work here, and what is missing.
    virtual weightplane::v1::Rendezvous offer() = 0;
    // UUID of the GPU that it sends from; empty: host memory.
    virtual std::string device_uuid() const { return ""; }
    // For one channel and one call of UpdateWeights, before that is made: receivers look for it while they are armed.
    virtual std::unique_ptr<Sender> sender(const Shipment &shipment) = 0;
};

// Those to offer: the one that was named, or all that send from host memory. The source outlives them.
std::vector<std::unique_ptr<Transport>> transports(const Options &options, const Safetensors &source);
