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

void Watch::follow(const std::string &update_id) {
    const std::lock_guard held(lock_);
    update_id_ = update_id;
    judge(latest_);
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
        if (const auto refused = refusal_of(status)) {
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
    const std::lock_guard held(lock_);
    if (event.has_update())
        latest_ = event.update();
    judge(latest_);
}

void Watch::judge(const v1::UpdateInfo &update) {
    const bool ends = update.phase() == v1::UPDATE_PHASE_ABORTING || update.phase() == v1::UPDATE_PHASE_ABORTED;
    if (ends && !update_id_.empty() && update.update_id() == update_id_)
        stop_.set(aborted(update));
}
