#include "watch.hpp"

namespace v1 = weightplane::v1;

namespace {

constexpr double kRedial = 0.1; // seconds

} // namespace

Watch::Watch(ControlPlane &plane, std::string group, std::int64_t generation, Stop &stop)
    : plane_(plane), group_(std::move(group)), generation_(generation), stop_(stop), thread_([this] { run(); }) {}

Watch::~Watch() {
    over_.set(Error(Exit::ok, "", "the watch ends"));
    thread_.join();
}

void Watch::held_by(Deadline end) {
    {
        const Stop::Listener wake(stop_, [this] {
            const std::lock_guard held(lock_);
            heard_.notify_all();
        });
        std::unique_lock held(lock_);
        heard_.wait_until(held, end, [this] { return held_ || stop_.is_set(); });
    }
    stop_.check();
}

void Watch::follow(const std::string &update_id) {
    {
        const std::lock_guard held(lock_);
        update_id_ = update_id;
    }
    judge();
}

void Watch::run() {
    v1::WatchUpdateRequest request;
    request.set_group(group_);
    request.set_generation(generation_);
    while (!over_.is_set()) {
        grpc::ClientContext context;
        plane_.begin(context);
        grpc::Status status;
        {
            const Stop::Listener cancel(over_, [&] { context.TryCancel(); });
            const auto stream = plane_.stub().WatchUpdate(&context, request);
            v1::WatchUpdateResponse event;
            while (stream->Read(&event))
                hear(event);
            status = stream->Finish();
        }
        if (over_.is_set())
            return;
        if (const auto refused = refusal_of(status); refused && !refused->leaderless) {
            stop_.set(*refused);
            return;
        }
        try { // the control plane restarts, say: the lease lives for its TTL
            over_.sleep_until(in_seconds(kRedial));
        } catch (const Error &) {
            return; // it is over
        }
    }
}

void Watch::hear(const v1::WatchUpdateResponse &event) {
    if (event.fenced()) {
        stop_.set(Error(Exit::failed, "TRAINER_FENCED", "another trainer took the group over"));
        return;
    }
    {
        const std::lock_guard held(lock_);
        held_ = true;
        heard_.notify_all();
        if (event.has_update())
            latest_ = event.update();
    }
    judge();
}

// Sets `stop_` with no lock held: what listens to it takes the lock.
void Watch::judge() {
    std::unique_lock held(lock_);
    const auto phase = latest_.phase();
    const bool ends = phase == v1::UPDATE_PHASE_ABORTING || phase == v1::UPDATE_PHASE_ABORTED;
    if (!ends || update_id_.empty() || latest_.update_id() != update_id_)
        return;
    const auto why = aborted(latest_);
    held.unlock();
    stop_.set(why);
}
