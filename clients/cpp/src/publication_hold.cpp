// Before an update: the replicas that are waited for, and the hold on the group.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "publication.hpp"
#include "shm_segment.hpp"

namespace {

namespace v1 = weightplane::v1;
using Stub = ControlPlane::Stub;

constexpr double kCall = 30; // seconds for a call that moves nothing
constexpr double kPoll = 0.2;
constexpr double kAgain = 1; // between two looks at who is within reach: each binds anew
constexpr double kReach = 1.5; // seconds in which a control plane that listens is reached for the first time
constexpr double kLate = 0.5; // seconds by which a lapse may be noticed late
constexpr char kLapses[] = "its lease ends in "; // of a hold that its trainer renews, or did: the control plane's words

// Which host this is, as the replicas' agents say it.
std::string host_id() {
    const char *given = std::getenv("WEIGHTPLANE_HOST_ID");
    return given != nullptr && *given != '\0' ? given : shm_host();
}

// What is said of too few replicas.
Error too_few(const std::string &group, std::int64_t expected, const std::set<std::string> &found, const std::string &others) {
    std::string names;
    for (const auto &name : found)
        names += (names.empty() ? "" : ", ") + name;
    return Error(Exit::refused, "NOT_ENOUGH_REPLICAS",
                 "group '" + group + "': expected " + std::to_string(expected) + " replica(s), found " +
                     std::to_string(found.size()) + " (" + (names.empty() ? "none" : names) + ")" + others);
}

// Seconds until a hold ends unless it is renewed, as a refusal says; below 0 if it says nothing of the kind.
double lapses_in(const std::string &said) {
    const auto at = said.find(kLapses);
    return at == std::string::npos ? -1 : std::strtod(said.c_str() + at + sizeof(kLapses) - 1, nullptr);
}

} // namespace

// Waits until --replicas of them may take part. For one StartUpdate waits, which says why there is none.
void Publication::gather() {
    if (options_.replicas == 1)
        return;
    if (!plane_.reached(std::min(kReach, options_.timeout), stop_))
        return; // nobody listens: InitTransfer says so, and why
    v1::ListReplicasRequest ask;
    ask.set_group(options_.group);
    while (true) {
        ready_.clear();
        std::string others;
        try {
            const auto answer = plane_.call("ListReplicas", &v1::FleetService::Stub::ListReplicas, ask, in_seconds(kCall),
                                            stop_, std::min(ControlPlane::kPatience, options_.wait));
            for (const auto &r : answer.replicas())
                if (r.may_not_join().empty())
                    ready_.insert(r.replica_id());
                else
                    others += "; " + r.replica_id() + ": " + r.may_not_join();
        } catch (const Refused &e) { // the group is made by its first replica, or by us
            if (e.reason != "UNKNOWN_GROUP" && (!e.leaderless || Clock::now() >= patience_))
                throw;
        }
        if (static_cast<std::int64_t>(ready_.size()) >= options_.replicas)
            return;
        if (Clock::now() >= patience_)
            throw too_few(options_.group, options_.replicas, ready_, others);
        stop_.sleep_until(std::min(in_seconds(kPoll), std::max(patience_, Clock::now())));
    }
}

// Takes the hold; within --wait once a dead trainer's has lapsed, or the control plane that answers leads.
void Publication::hold() {
    Deadline lapsed{};
    bool held = false; // by the same trainer, so far
    while (true) {
        try {
            return init();
        } catch (const Refused &e) {
            const double left = e.reason == "TRAINER_HELD" ? lapses_in(e.what()) : -1;
            if (left >= 0 && !held)
                lapsed = in_seconds(left + kLate);
            held = left >= 0 && !e.leaderless; // who leads next gives a dead trainer's hold a lease anew
            const bool wait = e.leaderless || (left >= 0 && Clock::now() < lapsed); // who renews it meanwhile lives
            if (!wait || Clock::now() >= patience_)
                throw;
        }
        stop_.sleep_until(in_seconds(kPoll));
    }
}

// Asks for the hold, or binds again under it.
void Publication::init() {
    auto ask = request<v1::InitTransferRequest>();
    ask.set_trainer_id(options_.trainer_id);
    ask.set_incarnation(incarnation_);
    ask.set_world_size(1);
    ask.set_takeover(options_.takeover && token_.generation == 0);
    ask.set_host_id(host_id());
    const bool forced = options_.transport != "auto";
    if (forced)
        ask.set_transport(options_.transport);
    for (const auto &transport : transports_) {
        try {
            ask.mutable_offers()->Add(transport->offer());
            if (const auto uuid = transport->device_uuid(); !uuid.empty())
                ask.set_device_uuid(uuid);
        } catch (const Error &why) {
            if (forced) // nothing was opened: refused, not failed
                throw why.exit == Exit::failed ? Error(Exit::refused, why.reason, why.what(), why.member) : why;
            auto &refusal = *ask.add_refusals(); // another one may do
            refusal.set_transport(transport->name());
            refusal.set_reason(why.what());
        }
    }
    if (!watch_ && !plane_.reached(std::min(kReach, options_.timeout), stop_)) // nobody listens: says so, and why
        plane_.call("InitTransfer", &Stub::InitTransfer, ask, in_seconds(kPoll), stop_, 0);
    const double patience = watch_ ? ControlPlane::kPatience : std::min(ControlPlane::kPatience, options_.wait);
    bound_ = plane_.call("InitTransfer", &Stub::InitTransfer, ask, in_seconds(kCall), stop_, patience);
    token_.generation = bound_.generation();
    if (!watch_)
        watch_ = std::make_unique<Watch>(plane_, options_.group, token_.generation, stop_);
    watch_->held_by(in_seconds(kCall));
    if (!beats_) // after the stream, which would else hold the lease by itself
        beats_ = std::make_unique<Beats>(plane_, options_.group, member_, incarnation_, token_.generation, stop_);
}

// Whether transports reach --replicas of those that may take part. If not, it refuses once --wait is over, before anything
// is opened; until then one may come that is reached, or that is taken in as it takes part.
bool Publication::reached() {
    std::map<std::string, std::string> out;
    std::set<std::string> bound;
    for (const auto &choice : bound_.choices()) {
        bound.insert(choice.replica_id());
        if (!choice.transport().empty())
            continue;
        std::string why = choice.reason();
        for (const auto &refusal : choice.refusals())
            why += ", " + refusal.transport() + ": " + refusal.reason();
        auto &said = out[choice.replica_id()];
        if (said.size() < why.size()) // of its workers, the one with the causes
            said = why;
        ready_.erase(choice.replica_id());
    }
    if (options_.replicas == 1) { // StartUpdate waits for one that comes, and says why who is there is out of reach
        if (bound.empty() || bound.size() > out.size() || in_seconds(kAgain) >= patience_)
            return true;
    } else {
        if (static_cast<std::int64_t>(ready_.size()) >= options_.replicas)
            return true;
        std::string others;
        for (const auto &[replica, why] : out)
            others += "; " + replica + ": " + why;
        if (in_seconds(kAgain) >= patience_)
            throw too_few(options_.group, options_.replicas, ready_, others);
    }
    stop_.sleep_until(in_seconds(kAgain));
    return false;
}
