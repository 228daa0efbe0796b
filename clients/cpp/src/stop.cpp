#include "stop.hpp"

Stop::Listener::Listener(Stop &stop, std::function<void()> told) : stop_(stop) {
    const std::lock_guard held(stop_.listening_);
    at_ = stop_.listeners_.insert(stop_.listeners_.end(), std::move(told));
    if (stop_.is_set())
        (*at_)();
}

Stop::Listener::~Listener() {
    const std::lock_guard held(stop_.listening_);
    stop_.listeners_.erase(at_);
}

void Stop::set(const Error &why) {
    {
        const std::lock_guard held(lock_);
        if (set_)
            return;
        why_ = why;
        set_ = true;
        changed_.notify_all();
    }
    const std::lock_guard held(listening_);
    for (const auto &told : listeners_)
        told();
}

void Stop::check() const {
    if (!set_)
        return;
    const std::lock_guard held(lock_);
    throw *why_;
}

void Stop::sleep_until(Deadline end) {
    {
        std::unique_lock held(lock_);
        changed_.wait_until(held, end, [&] { return set_.load(); });
    }
    check();
}
