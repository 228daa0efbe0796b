#include "cuda_ipc.hpp"

#include "device_copy.hpp"
#include "pull_sender.hpp"
#include "shm_segment.hpp"

namespace {

namespace v1 = weightplane::v1;

class CudaIpc : public Transport, private PullMemory {
public:
    CudaIpc(int device, const Safetensors &source) : device_(device), source_(source) {}

    std::string name() const override { return "cuda_ipc"; }

    // Which other GPUs can read ours is for the receivers to say: this process may not see them.
    v1::Rendezvous offer() override {
        if (!listener_) {
            cuda_ = std::make_unique<Cuda>(device_);
            copy_ = std::make_unique<DeviceCopy>(*cuda_, source_);
            handle_ = cuda_->handle_of(copy_->base());
            listener_ = std::make_unique<PullListener>();
        }
        v1::Rendezvous out;
        out.set_transport(name());
        out.set_same_host(true);
        out.mutable_cuda_ipc()->set_host_id(shm_host());
        out.mutable_cuda_ipc()->set_device_uuid(cuda_->uuid());
        *out.mutable_cuda_ipc()->mutable_endpoint() = listener_->endpoint();
        return out;
    }

    std::string device_uuid() const override { return cuda_ ? cuda_->uuid() : ""; }

    std::unique_ptr<Sender> sender(const Shipment &shipment) override {
        return pull_sender(shipment, *listener_, *this);
    }

private:
    // No event goes with the memory: its bytes are complete since before the offer.
    v1::PullWelcome welcome() const override {
        v1::PullWelcome out;
        out.mutable_cuda_ipc()->set_device_uuid(cuda_->uuid());
        return out;
    }

    v1::PullRegion region() const override {
        v1::PullRegion out;
        out.set_id(1);
        auto &told = *out.mutable_cuda_ipc();
        told.set_handle(handle_);
        told.set_storage_bytes(static_cast<std::int64_t>(copy_->nbytes()));
        told.set_memory_generation(1);
        told.set_device_uuid(cuda_->uuid());
        return out;
    }

    std::vector<PullChunk> chunks(const weightplane::Plan &plan, const weightplane::Bucket &bucket) const override {
        std::vector<PullChunk> out;
        for (const auto &s : bucket.segments)
            copy_->each(plan, static_cast<std::size_t>(s.region), s.offset, s.nbytes,
                        [&](std::uint64_t at, std::uint64_t n) {
                            if (!out.empty() && out.back().offset + out.back().nbytes == at)
                                out.back().nbytes += n;
                            else
                                out.push_back({at, n});
                        });
        return out;
    }

    const int device_;
    const Safetensors &source_;
    std::unique_ptr<Cuda> cuda_;
    std::unique_ptr<DeviceCopy> copy_;
    std::string handle_;
    std::unique_ptr<PullListener> listener_;
};

} // namespace

std::unique_ptr<Transport> cuda_ipc(int device, const Safetensors &source) {
    return std::make_unique<CudaIpc>(device, source);
}
