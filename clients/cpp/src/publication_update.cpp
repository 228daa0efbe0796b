// The update itself: plans, the senders of its channels, the bytes and their digests.
#include <algorithm>
#include <thread>

#include "digests.hpp"
#include "publication.hpp"

namespace {

namespace v1 = weightplane::v1;
using Stub = ControlPlane::Stub;

constexpr int kPageDigests = 100'000;
constexpr double kCall = 30; // seconds for a call that moves nothing
constexpr double kGrace = 1; // seconds in which the control plane says why a receiver is gone

// Stops everything when it is left by an exception.
class StopOnError {
public:
    explicit StopOnError(Stop &stop) : stop_(stop), before_(std::uncaught_exceptions()) {}
    ~StopOnError() {
        if (std::uncaught_exceptions() > before_)
            stop_.set(Error(Exit::failed, "TRANSPORT", "another part of the publish failed"));
    }
    StopOnError(const StopOnError &) = delete;
    StopOnError &operator=(const StopOnError &) = delete;

private:
    Stop &stop_;
    const int before_;
};

} // namespace

Transport &Publication::transport_of(const std::string &name) {
    for (const auto &transport : transports_)
        if (transport->name() == name)
            return *transport;
    throw Error(Exit::failed, "INTERNAL", "a channel was bound to " + name + ", which this program did not offer");
}

weightplane::Plan Publication::plan_of(const std::string &plan_id) {
    std::vector<v1::PlanPage> pages;
    do {
        v1::GetPlanRequest ask;
        ask.set_group(options_.group);
        ask.set_plan_id(plan_id);
        ask.set_page(static_cast<std::int32_t>(pages.size()));
        pages.push_back(plane_.call("GetPlan", &Stub::GetPlan, ask, std::min(deadline_, in_seconds(kCall)), stop_).page());
    } while (static_cast<std::int32_t>(pages.size()) < pages.front().pages());
    try {
        return weightplane::read_plan(pages, source_.manifest());
    } catch (const weightplane::PlanError &e) {
        throw Error(Exit::failed, "INTERNAL", e.what());
    }
}

// In-place channels come after the staged ones, whose replicas have voted by then.
void Publication::update() {
    std::vector<int> staged, in_place;
    for (int i = 0; i < started_.channels_size(); ++i)
        (started_.channels(i).mode() == v1::MODE_IN_PLACE ? in_place : staged).push_back(i);
    std::int64_t seq = 0;
    for (const auto *channels : {&staged, &in_place})
        if (!channels->empty())
            round(*channels, ++seq, staged.empty() || in_place.empty());
}

// One call of UpdateWeights: everyone is armed, the bytes move, the digests are delivered.
void Publication::round(const std::vector<int> &channels, std::int64_t seq, bool all) {
    auto &[plans, senders] = rounds_.emplace_back(); // where nothing moves: senders refer to plans
    for (const int i : channels)
        plans.emplace(started_.channels(i).channel_id(), plan_of(started_.channels(i).plan_id()));
    for (const auto &binding : bound_.channels()) {
        const auto plan = plans.find(binding.channel_id());
        if (plan == plans.end())
            continue;
        senders.emplace_back(binding.channel_id(), transport_of(binding.transport())
                                                       .sender({binding, plan->second, source_, member_, token_,
                                                                deadline_}));
    }
    if (senders.size() != plans.size())
        throw Error(Exit::failed, "INTERNAL", "the update has channels that InitTransfer did not bind");

    auto arm = request<v1::UpdateWeightsRequest>();
    arm.set_update_id(token_.update_id);
    arm.set_epoch(token_.epoch);
    arm.set_seq(seq);
    for (const auto &[channel, plan] : plans)
        if (!all)
            arm.add_buckets()->set_channel_id(channel);
    const auto armed = plane_.call("UpdateWeights", &Stub::UpdateWeights, arm, deadline_, stop_);
    for (const auto &channel : armed.excluded_channels())
        senders.erase(std::remove_if(senders.begin(), senders.end(), [&](const auto &s) { return s.first == channel; }),
                      senders.end());

    std::vector<std::pair<const weightplane::Plan *, std::future<std::vector<std::uint64_t>>>> hashing;
    std::vector<std::future<void>> sending;
    // Where the bytes move without our processor, the digests are what is waited for.
    const unsigned threads = transports_.front()->device_uuid().empty() ? 1 : std::thread::hardware_concurrency();
    const StopOnError all_end(stop_); // before we wait, in a destructor, for what still runs
    for (const auto &[channel, plan] : plans) {
        std::set<std::size_t> wanted;
        if (started_.verify() == v1::VERIFY_LEVEL_SAMPLED)
            wanted = weightplane::sampled_regions(token_.update_id, plan.regions.size());
        else
            for (std::size_t i = 0; i < plan.regions.size(); ++i)
                wanted.insert(i);
        if (started_.verify() != v1::VERIFY_LEVEL_OFF)
            hashing.emplace_back(&plan, std::async(std::launch::async, region_digests, std::cref(plan),
                                                   std::cref(source_), member_, wanted, std::cref(stop_), threads));
    }
    for (auto &[channel, sender] : senders) {
        const auto &plan = plans.at(channel);
        for (const auto &r : plan.regions)
            bytes_ += r.sender == member_ ? r.nbytes : 0;
        sending.push_back(std::async(std::launch::async, [this, s = sender.get()] {
            try {
                s->send(stop_);
            } catch (const Error &why) {
                lost(why);
                throw;
            }
        }));
    }
    for (auto &[plan, digests] : hashing)
        put_digests(*plan, digests.get());
    for (auto &sent : sending)
        sent.get();
}

// A receiver is gone. The control plane knows why, within the second; if it says nothing, this ends the update.
void Publication::lost(const Error &why) {
    if (stop_.is_set())
        return;
    const auto end = in_seconds(kGrace);
    while (!stop_.is_set() && Clock::now() < end)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    stop_.set(why);
    stop_.check(); // the control plane's word, if it came
}

void Publication::put_digests(const weightplane::Plan &plan, const std::vector<std::uint64_t> &digests) {
    const int total = static_cast<int>(digests.size());
    for (int first = 0; first == 0 || first < total; first += kPageDigests) {
        auto page = request<v1::PutDigestsRequest>();
        page.set_update_id(token_.update_id);
        page.set_epoch(token_.epoch);
        page.set_plan_id(plan.id);
        page.set_first(first);
        page.set_total(total);
        page.mutable_digests()->Add(digests.begin() + first, digests.begin() + std::min(total, first + kPageDigests));
        plane_.call("PutDigests", &Stub::PutDigests, page, deadline_, stop_);
    }
}
