// What moves the bytes of one channel's plan from this trainer.
#pragma once

#include <cstdint>
#include <string>

#include "safetensors.hpp"
#include "stop.hpp"
#include "weightplane/plan.hpp"
#include "weightplane/v1/transport.pb.h"

// What fences the bytes of one update.
struct Token {
    std::string update_id;
    std::int64_t epoch = 0, generation = 0;
};

// What a sender sends, and for whom. All of it outlives the sender.
struct Shipment {
    const weightplane::v1::ChannelBinding &channel;
    const weightplane::Plan &plan;
    const Safetensors &source;
    const std::string &member;
    const Token &token;
    Deadline deadline;
};

class Sender {
public:
    virtual ~Sender() = default;
    // Sends every bucket of ours and returns once each receiver has it. Throws why `stop` was set, or an Error with
    // reason TRANSPORT that names the receiver.
    virtual void send(Stop &stop) = 0;
};
