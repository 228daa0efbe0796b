// SIGINT and SIGTERM become a reason to stop.
#pragma once

#include <atomic>
#include <thread>

#include "stop.hpp"

class Signals {
public:
    // Before there is any other thread, gRPC's too: they inherit the mask, and a signal that one of them takes ends the process.
    static void block();
    // After `block`.
    explicit Signals(Stop &stop);
    ~Signals();
    Signals(const Signals &) = delete;
    Signals &operator=(const Signals &) = delete;

private:
    void wait(Stop &stop);

    std::atomic<bool> over_{false};
    std::thread thread_;
};
