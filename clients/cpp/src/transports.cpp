#include "transport.hpp"

#include <unistd.h>

#include "cuda_ipc.hpp"
#include "grpc_sender.hpp"
#include "nccl_transport.hpp"
#include "shm_segment.hpp"
#include "shm_sender.hpp"

namespace {

namespace v1 = weightplane::v1;

class Shm : public Transport {
public:
    std::string name() const override { return "shm"; }

    v1::Rendezvous offer() override {
        check_shm_room();
        v1::Rendezvous out;
        out.set_transport(name());
        out.mutable_shm()->set_host_id(shm_host());
        out.mutable_shm()->set_pid(getpid());
        return out;
    }

    std::unique_ptr<Sender> sender(const Shipment &shipment) override { return shm_sender(shipment); }
};

class Grpc : public Transport {
public:
    explicit Grpc(const Identity &identity) : identity_(identity) {}

    std::string name() const override { return "grpc"; }

    v1::Rendezvous offer() override {
        v1::Rendezvous out;
        out.set_transport(name());
        out.mutable_grpc(); // a sender dials: it has no address to tell
        return out;
    }

    std::unique_ptr<Sender> sender(const Shipment &shipment) override { return grpc_sender(shipment, identity_); }

private:
    const Identity &identity_;
};

} // namespace

std::vector<std::unique_ptr<Transport>> transports(const Options &options, const Safetensors &source) {
    const auto wanted = [&](const char *name) { return options.transport == "auto" || options.transport == name; };
    std::vector<std::unique_ptr<Transport>> out;
    if (wanted("shm"))
        out.push_back(std::make_unique<Shm>());
    if (wanted("grpc"))
        out.push_back(std::make_unique<Grpc>(options.identity));
    if (options.transport == "cuda_ipc")
        out.push_back(cuda_ipc(options.device, source));
    if (options.transport == "nccl")
        out.push_back(nccl(options.device, source));
    return out;
}
