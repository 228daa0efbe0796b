#include "device_copy.hpp"

namespace {

constexpr std::uint64_t kAlign = 256; // as the driver's own allocations: copies go in the largest words

} // namespace

DeviceCopy::DeviceCopy(const Cuda &cuda, const Safetensors &source) : cuda_(cuda), source_(source) {
    const auto &tensors = source.manifest().tensors;
    for (const auto &t : tensors) {
        at_.push_back(nbytes_);
        nbytes_ += (t.nbytes() + kAlign - 1) / kAlign * kAlign;
    }
    nbytes_ = std::max(nbytes_, kAlign); // a model may have no bytes, an allocation has
    cuda_.make_current();
    base_ = cuda_.allocate(nbytes_);
    Cuda::Stream stream = nullptr;
    try {
        stream = cuda_.new_stream();
        for (std::size_t i = 0; i < tensors.size(); ++i)
            if (const auto n = tensors[i].nbytes(); n > 0)
                cuda_.to_device(base_ + at_[i], source.bytes(i), n, stream);
        cuda_.synchronize(stream);
    } catch (...) {
        if (stream != nullptr)
            cuda_.drop_stream(stream);
        cuda_.release(base_);
        throw;
    }
    cuda_.drop_stream(stream);
}

DeviceCopy::~DeviceCopy() { cuda_.release(base_); }
