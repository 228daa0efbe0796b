// Unary calls to the control plane: a deadline each, repeated only where no answer came, every answer typed.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <string>
#include <type_traits>

#include "identity.hpp"
#include "stop.hpp"
#include "weightplane/v1/agent.grpc.pb.h"
#include "weightplane/v1/fleet.grpc.pb.h"
#include "weightplane/v1/weight_transfer.grpc.pb.h"

Clock::duration seconds_of(double seconds);
Deadline in_seconds(double seconds);

// For a call's context: on a clock that nobody sets.
gpr_timespec grpc_deadline(Deadline deadline);

// 128 random bits in hex: a request_id, an incarnation.
std::string random_id();

// A connection that no other shares: TLS where an authority is given, else plaintext, and that to loopback alone unless
// WEIGHTPLANE_INSECURE=1. Throws Error.
std::shared_ptr<grpc::Channel> dial(const std::string &address, const Identity &identity);

class ControlPlane {
public:
    using Stub = weightplane::v1::WeightTransferService::Stub;

    ControlPlane(const std::string &address, const Identity &identity);

    Stub &stub() { return *stub_; }
    weightplane::v1::AgentService::Stub &agents() { return *agents_; }

    // Waits for a connection for `seconds` at most. Without one the next call may still say why.
    bool reached(double seconds, Stop &stop);

    // One logical call, tried again on UNAVAILABLE for `patience` seconds, also where one says so that stands by: its
    // request_id makes a repeat harmless. Throws Refused, Unanswered, or why `stop` was set, as soon as it is.
    template <class Service, class Request, class Answer>
    Answer call(const char *method, grpc::Status (Service::*function)(grpc::ClientContext *, const Request &, Answer *),
                const Request &request, Deadline deadline, Stop &stop, double patience = kPatience) {
        const Deadline last = std::min(deadline, in_seconds(patience));
        for (double pause = 0.05;; pause = std::min(2 * pause, 1.0)) {
            stop.check();
            grpc::ClientContext context;
            begin(context, deadline);
            Answer answer;
            grpc::Status status;
            {
                const Stop::Listener cancel(stop, [&] { context.TryCancel(); });
                status = (of<Service>().*function)(&context, request, &answer);
            }
            if (status.ok()) {
                answered_ = true;
                return answer;
            }
            stop.check();
            const Deadline again = in_seconds(pause);
            if (const auto refused = refusal_of(status)) {
                answered_ = true;
                if (!refused->leaderless || again >= last)
                    throw *refused;
                stop.sleep_until(again);
                continue;
            }
            if (status.error_code() != grpc::StatusCode::UNAVAILABLE || again >= last)
                throw Unanswered(method, status, advice(status));
            stop.sleep_until(again);
        }
    }

    // Deadline and bearer token of a call.
    void begin(grpc::ClientContext &context, Deadline deadline) const;
    // The token alone: for a stream.
    void begin(grpc::ClientContext &context) const;

    static constexpr double kPatience = 10; // seconds in which a control plane is back, or is gone

private:
    template <class Service> Service &of() {
        if constexpr (std::is_same_v<Service, Stub>)
            return *stub_;
        else
            return *fleet_;
    }

    // What to try where nobody answers.
    std::string advice(const grpc::Status &status) const;

    std::shared_ptr<grpc::Channel> channel_;
    std::unique_ptr<Stub> stub_;
    std::unique_ptr<weightplane::v1::AgentService::Stub> agents_;
    std::unique_ptr<weightplane::v1::FleetService::Stub> fleet_;
    const bool secure_;
    std::string token_, address_;
    std::atomic<bool> answered_{false}; // any call
};
