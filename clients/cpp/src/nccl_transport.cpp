#include "nccl_transport.hpp"

#include "nccl_sender.hpp"

namespace {

namespace v1 = weightplane::v1;

constexpr int kIds = 4; // channels of one kind that can be bound together; each has a thread of NCCL's till it is used

class NcclTransport : public Transport {
public:
    NcclTransport(int device, const Safetensors &source) : device_(device), source_(source) {}

    std::string name() const override { return "nccl"; }

    v1::Rendezvous offer() override {
        if (!card_)
            card_ = std::make_unique<Card>(device_, source_);
        card_->cuda.make_current();
        while (ids_.size() < kIds) // each serves one channel, and this program opens each of its channels once
            ids_.push_back(card_->nccl.mint());
        v1::Rendezvous out;
        out.set_transport(name());
        out.set_collective(true);
        out.mutable_nccl()->set_device_uuid(card_->cuda.uuid());
        out.mutable_nccl()->set_version(card_->nccl.version());
        for (const auto &id : ids_)
            out.mutable_nccl()->add_unique_ids(id);
        return out;
    }

    std::string device_uuid() const override { return card_ ? card_->cuda.uuid() : ""; }

    std::unique_ptr<Sender> sender(const Shipment &shipment) override {
        return nccl_sender(shipment, *card_);
    }

private:
    const int device_;
    const Safetensors &source_;
    std::unique_ptr<Card> card_;
    std::vector<std::string> ids_;
};

} // namespace

std::unique_ptr<Transport> nccl(int device, const Safetensors &source) {
    return std::make_unique<NcclTransport>(device, source);
}
