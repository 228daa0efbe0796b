// The lease: a WatchUpdate stream that lives as long as this object, and tells of aborts and of being fenced.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "call.hpp"

class Watch {
public:
    // `stop` is set when the trainer is fenced, or once the update named by `follow` is being aborted.
    Watch(ControlPlane &plane, std::string group, std::int64_t generation, Stop &stop);
    ~Watch();
    Watch(const Watch &) = delete;
    Watch &operator=(const Watch &) = delete;

    // Returns once the control plane has answered, so that the lease is held, or at `end`; throws why all stops.
    void held_by(Deadline end);
    void follow(const std::string &update_id);

private:
    void run();
    void hear(const weightplane::v1::WatchUpdateResponse &event);
    void judge();

    ControlPlane &plane_;
    const std::string group_;
    const std::int64_t generation_;
    Stop &stop_;
    Stop over_; // this object ends
    std::mutex lock_;
    std::condition_variable heard_;
    bool held_ = false;
    std::string update_id_;
    weightplane::v1::UpdateInfo latest_;
    std::thread thread_;
};
