// SIGINT and SIGTERM become a reason to stop.
#pragma once

#include <atomic>
#include <thread>

#include "stop.hpp"

// Make it before any other thread: they inherit its mask.
class Signals {
public:
    explicit Signals(Stop &stop);
    ~Signals();
    Signals(const Signals &) = delete;
    Signals &operator=(const Signals &) = delete;

private:
    void wait(Stop &stop);

    std::atomic<bool> over_{false};
    std::thread thread_;
};
