#include "beats.hpp"

#include <algorithm>
#include <iostream>

namespace v1 = weightplane::v1;

namespace {

constexpr double kRedial = 0.2; // seconds

} // namespace

Beats::Beats(ControlPlane &plane, std::string group, std::string member, std::string incarnation,
             std::int64_t generation, const Stop &stop)
    : plane_(plane), group_(std::move(group)), member_(std::move(member)), incarnation_(std::move(incarnation)),
      generation_(generation), stop_(stop), thread_([this] { run(); }) {}

Beats::~Beats() {
    over_.set(Error(Exit::ok, "", "the beats end"));
    thread_.join();
}

void Beats::run() {
    try {
        while (true) {
            const auto status = session();
            over_.check();
            if (const auto refused = refusal_of(status); refused && !refused->leaderless) {
                if (refused->reason != "TRAINER_FENCED") // which is the end of all, and said as that
                    say(status);
                return; // it would be refused again; what it is refused for, other calls hear too
            }
            over_.sleep_until(in_seconds(kRedial)); // the control plane restarts, say
        }
    } catch (const Error &) { // it is over
    }
}

// One stream, from hello to its end.
grpc::Status Beats::session() {
    grpc::ClientContext context;
    plane_.begin(context);
    const Stop::Listener cancel(over_, [&] { context.TryCancel(); });
    const auto stream = plane_.agents().Session(&context);
    v1::SessionRequest said;
    auto &hello = *said.mutable_hello();
    hello.set_group(group_);
    hello.set_agent_id(member_);
    hello.set_incarnation(incarnation_);
    hello.set_kind(v1::SESSION_KIND_HEARTBEAT);
    hello.set_software("weightplane C++ trainer");
    hello.mutable_trainer()->set_generation(generation_);
    v1::SessionResponse heard;
    if (stream->Write(said) && stream->Read(&heard)) {
        const double interval = std::max(0.05, heard.welcome().heartbeat_ms() / 1000.0);
        for (auto due = Clock::now();; due = std::max(due + seconds_of(interval), Clock::now())) {
            try {
                over_.sleep_until(due);
            } catch (const Error &) {
                break;
            }
            auto &beat = *said.mutable_heartbeat();
            beat.set_sequence(++sequence_);
            beat.set_process(v1::PROCESS_STATE_RUNNING);
            if (!stream->Write(said))
                break;
        }
    }
    return stream->Finish();
}

void Beats::say(const grpc::Status &status) {
    if (!stop_.is_set() && !over_.is_set())
        std::cerr << "publish_checkpoint: no heartbeats (" << status.error_message()
                  << "): the lease rests on the connection alone, and a stop of this process is not seen\n";
}
