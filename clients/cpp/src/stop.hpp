// Why everything stops: the first word counts, from any thread, and what blocks is told at once.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>

#include "errors.hpp"

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

class Stop {
public:
    // Runs `told` once stopped (at once if it is already), from the stopping thread, until this object ends.
    class Listener {
    public:
        Listener(Stop &stop, std::function<void()> told);
        ~Listener();
        Listener(const Listener &) = delete;
        Listener &operator=(const Listener &) = delete;

    private:
        Stop &stop_;
        std::list<std::function<void()>>::iterator at_;
    };

    void set(const Error &why);
    bool is_set() const { return set_; }
    // Throws why.
    void check() const;
    // Sleeps; throws why as soon as there is a reason.
    void sleep_until(Deadline end);

private:
    mutable std::mutex lock_;
    std::condition_variable changed_;
    std::atomic<bool> set_{false};
    std::optional<Error> why_;
    std::mutex listening_; // held while listeners run: one that ends waits for them
    std::list<std::function<void()>> listeners_;
};
