#include "signals.hpp"

#include <csignal>
#include <ctime>
#include <string>
#include <unistd.h>

namespace {

sigset_t ours() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    return set;
}

} // namespace

void Signals::block() {
    std::signal(SIGINT, SIG_DFL); // a shell starts background jobs with it ignored
    const sigset_t set = ours();
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

Signals::Signals(Stop &stop) {
    thread_ = std::thread([this, &stop] { wait(stop); });
}

Signals::~Signals() {
    over_ = true;
    thread_.join();
}

void Signals::wait(Stop &stop) {
    const sigset_t set = ours();
    const timespec slice{0, 50'000'000};
    while (!over_) {
        const int heard = sigtimedwait(&set, nullptr, &slice);
        if (heard < 0)
            continue;
        if (stop.is_set())
            _exit(static_cast<int>(Exit::interrupted)); // the second time, or while it ends: at once
        const std::string name = heard == SIGINT ? "SIGINT" : "SIGTERM";
        stop.set(Error(Exit::interrupted, "ABORTED_BY_CALLER", "interrupted by " + name));
    }
}
