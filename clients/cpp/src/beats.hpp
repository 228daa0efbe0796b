// Heartbeats from a thread of their own, by which the control plane knows within its TTL that this process stands still:
// a stopped process's connections stay open, so the lease that hangs on one of them would not tell.
#pragma once

#include <string>
#include <thread>

#include "call.hpp"

class Beats {
public:
    // `stop`: the publish ends; nothing more is said of heartbeats that are refused.
    Beats(ControlPlane &plane, std::string group, std::string member, std::string incarnation, std::int64_t generation,
          const Stop &stop);
    ~Beats();
    Beats(const Beats &) = delete;
    Beats &operator=(const Beats &) = delete;

private:
    void run();
    grpc::Status session();
    void say(const grpc::Status &status);

    ControlPlane &plane_;
    const std::string group_, member_, incarnation_;
    const std::int64_t generation_;
    const Stop &stop_;
    std::int64_t sequence_ = 0;
    Stop over_; // this object ends
    std::thread thread_;
};
