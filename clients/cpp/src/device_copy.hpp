// The file's tensors in the memory of a GPU: one allocation, made and filled once, before any update begins.
#pragma once

#include <vector>

#include "cuda.hpp"
#include "digests.hpp"

class DeviceCopy {
public:
    // Returns once every byte is there. Throws Error with reason TRANSPORT: the memory is full, say.
    DeviceCopy(const Cuda &cuda, const Safetensors &source);
    ~DeviceCopy();
    DeviceCopy(const DeviceCopy &) = delete;
    DeviceCopy &operator=(const DeviceCopy &) = delete;

    Cuda::Address base() const { return base_; }
    std::uint64_t nbytes() const { return nbytes_; }

    // Calls f(offset in the allocation, bytes) for bytes [offset, offset + nbytes) of a region, in order.
    template <class F>
    void each(const weightplane::Plan &plan, std::size_t region, std::uint64_t offset, std::uint64_t nbytes,
              F &&f) const {
        const auto tensor = static_cast<std::size_t>(plan.regions[region].tensor);
        each_span(plan, source_, region, offset, nbytes, [&](const std::uint8_t *data, std::uint64_t n) {
            f(at_[tensor] + static_cast<std::uint64_t>(data - source_.bytes(tensor)), n);
        });
    }

private:
    const Cuda &cuda_;
    const Safetensors &source_;
    std::vector<std::uint64_t> at_; // of each tensor
    std::uint64_t nbytes_ = 0;
    Cuda::Address base_ = 0;
};
