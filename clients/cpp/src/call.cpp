#include "call.hpp"

#include <cstdlib>
#include <random>

namespace {

constexpr int kConnectMs = 1000, kHandshakeMs = 5000, kAgainMs = 100;
constexpr double kLook = 0.05; // seconds between looks at whether to stop

std::string environment(const char *name) {
    const char *value = std::getenv(name);
    return value == nullptr ? "" : value;
}

bool is_loopback(const std::string &address) {
    if (address.rfind("unix:", 0) == 0)
        return true;
    const auto host = address.substr(0, address.rfind(':'));
    return host == "localhost" || host == "[::1]" ||
           (host.rfind("127.", 0) == 0 && host.find_first_not_of("0123456789.") == std::string::npos);
}

} // namespace

Clock::duration seconds_of(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

Deadline in_seconds(double seconds) { return Clock::now() + seconds_of(seconds); }

gpr_timespec grpc_deadline(Deadline deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count();
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_micros(left, GPR_TIMESPAN));
}

std::string random_id() {
    static const char digits[] = "0123456789abcdef";
    std::random_device source;
    std::string out;
    for (int i = 0; i < 4; ++i)
        for (unsigned bits = source(), n = 0; n < 8; ++n, bits >>= 4)
            out += digits[bits & 15];
    return out;
}

std::shared_ptr<grpc::Channel> dial(const std::string &address, const Identity &identity) {
    grpc::ChannelArguments options;
    options.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    options.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    options.SetMaxSendMessageSize(4 << 20);
    // gRPC gives an attempt to connect this long, under that option's odd name: a busy server's TLS takes its time.
    options.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, identity.ca.empty() ? kConnectMs : kHandshakeMs);
    options.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kAgainMs);
    if (!identity.ca.empty()) {
        const auto credentials = grpc::SslCredentials({identity.ca, identity.key, identity.cert});
        return grpc::CreateCustomChannel(address, credentials, options);
    }
    if (!is_loopback(address) && environment("WEIGHTPLANE_INSECURE") != "1")
        throw Error(Exit::usage, "INVALID_ARGUMENT",
                    address + " is not this machine's, and no --tls-ca is given: set WEIGHTPLANE_INSECURE=1 where the "
                              "network between is trusted with plaintext");
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), options);
}

ControlPlane::ControlPlane(const std::string &address, const Identity &identity)
    : channel_(dial(address, identity)), stub_(weightplane::v1::WeightTransferService::NewStub(channel_)),
      agents_(weightplane::v1::AgentService::NewStub(channel_)),
      fleet_(weightplane::v1::FleetService::NewStub(channel_)), secure_(!identity.ca.empty()), token_(identity.token),
      address_(address) {}

std::string ControlPlane::advice(const grpc::Status &status) const {
    const auto code = status.error_code();
    for (const char *other : {"http1.x", "parsing HTTP/2"}) // gRPC's own words, of what comes after the connection
        if (!secure_ && status.error_message().find(other) != std::string::npos)
            return "what answers at " + address_ + " is not gRPC: the port of --gateway or --probes, perhaps; name the one "
                   "that the control plane listens on (--listen)";
    if (answered_ ? code != grpc::StatusCode::UNAVAILABLE
                  : code != grpc::StatusCode::UNAVAILABLE && code != grpc::StatusCode::DEADLINE_EXCEEDED)
        return "";
    auto out = address_ + (secure_ ? ", with TLS: is its certificate for this name, from this authority, and does it ask "
                                     "for one of ours?"
                                   : ": does a control plane listen there? If it speaks TLS: --tls-ca");
    if (!answered_)
        out += "; start one (weightplane controlplane), or name its address (--address or WEIGHTPLANE_ADDRESS)";
    return out;
}

bool ControlPlane::reached(double seconds, Stop &stop) {
    const Deadline end = in_seconds(seconds);
    const Deadline shaken = std::max(end, secure_ ? Clock::now() + std::chrono::milliseconds(kHandshakeMs) : end);
    while (true) {
        const auto state = channel_->GetState(true);
        if (state == GRPC_CHANNEL_READY)
            return true;
        // An attempt that nothing has answered yet may be a busy server's handshake.
        if (Clock::now() >= (state == GRPC_CHANNEL_CONNECTING ? shaken : end))
            return false;
        stop.check();
        channel_->WaitForStateChange(state, grpc_deadline(in_seconds(kLook))); // gRPC does nothing but in a call that waits
    }
}

void ControlPlane::begin(grpc::ClientContext &context) const {
    if (!token_.empty())
        context.AddMetadata("authorization", "Bearer " + token_);
}

void ControlPlane::begin(grpc::ClientContext &context, Deadline deadline) const {
    context.set_deadline(grpc_deadline(deadline));
    begin(context);
}
