#include "publication.hpp"

#include <algorithm>
#include <iostream>
#include <map>

namespace {

namespace v1 = weightplane::v1;
using Stub = ControlPlane::Stub;

constexpr std::size_t kPageBytes = 3 << 19; // of a manifest's page: well under 2 MiB
constexpr double kCall = 30;  // seconds for a call that moves nothing
constexpr double kTidy = 10;  // seconds for what is asked or tidied up at the end
constexpr double kGrace = 8;  // the same after the update's deadline; with two short tries more, 10 in all
constexpr double kShort = 1;  // seconds for a call to a control plane that answered nothing before
constexpr double kMargin = 2; // seconds by which a client waits longer than an update lives
constexpr double kPoll = 0.2;

bool decided(const v1::UpdateInfo &update) { return update.phase() == v1::UPDATE_PHASE_COMMITTED; }

// What a stream or a digest fails of where the file changed meanwhile.
Error cause_of(const Error &error, const Safetensors &source) {
    if (error.exit != Exit::failed)
        return error;
    try {
        source.check_unchanged();
    } catch (const Error &changed) {
        return changed;
    }
    return error;
}

} // namespace

Publication::Publication(const Options &options, const Safetensors &source, Stop &stop)
    : options_(options), source_(source), stop_(stop), manifest_id_(source.manifest().id()),
      plane_(options.address, options.identity), transports_(transports(options, source)) {}

Publication::~Publication() = default;

Outcome Publication::run() {
    try {
        patience_ = in_seconds(options_.wait);
        do {
            gather();
            hold();
        } while (!reached());
        announce();
        start();
        const auto began = Clock::now();
        update();
        source_.check_unchanged();
        const auto info = finish();
        const std::chrono::duration<double> took = Clock::now() - began;
        rounds_.clear();
        close();
        return {info, bytes_, took.count(), used()};
    } catch (const Error &error) {
        rounds_.clear(); // our side first: it may hold receivers up
        gone_ = gone_ || dynamic_cast<const Unanswered *>(&error) != nullptr;
        Error why = cause_of(error, source_);
        if (opening_) {
            auto stands = abort(why.what());
            if (finishing_ && !why.settled && !stands && !asked_)
                stands = ask();
            if (stands && decided(*stands)) { // it was decided before: that counts
                close();
                return {*stands, bytes_, 0, used()};
            }
            if (finishing_ && !why.settled) {
                if (!stands)
                    why = unknown(why);
                else if (why.exit == Exit::unreachable || why.exit == Exit::unknown_outcome)
                    why = aborted(*stands);
            }
        }
        close();
        throw why;
    }
}

// The manifest in pages, and that this trainer holds all of it.
void Publication::announce() {
    const auto &tensors = source_.manifest().tensors;
    std::size_t first = 0;
    do {
        auto page = request<v1::PutManifestRequest>();
        page.set_manifest_id(manifest_id_);
        page.set_first(static_cast<std::int32_t>(first));
        page.set_total(static_cast<std::int32_t>(tensors.size()));
        for (std::size_t size = 0; first < tensors.size() && size < kPageBytes; ++first) {
            auto &t = *page.add_tensors();
            t.set_name(tensors[first].name);
            t.set_dtype(tensors[first].dtype);
            t.mutable_shape()->Add(tensors[first].shape.begin(), tensors[first].shape.end());
            size += t.ByteSizeLong() + 8;
        }
        if (plane_.call("PutManifest", &Stub::PutManifest, page, in_seconds(kCall), stop_).complete())
            break;
    } while (first < tensors.size());
    auto placed = request<v1::PutPlacementRequest>();
    placed.set_manifest_id(manifest_id_);
    placed.mutable_placement()->set_member(member_);
    placed.mutable_placement()->set_full(true);
    placed.set_total(static_cast<std::int32_t>(tensors.size()));
    plane_.call("PutPlacement", &Stub::PutPlacement, placed, in_seconds(kCall), stop_);
}

// Opens the update; binds again as replicas come, and waits for the first.
void Publication::start() {
    auto ask = request<v1::StartUpdateRequest>();
    ask.set_request_id(start_id_);
    ask.set_manifest_id(manifest_id_);
    ask.set_trainer_step(options_.step);
    ask.set_on_busy(v1::ON_BUSY_REFUSE);
    ask.set_update_timeout_ms(static_cast<std::int64_t>(options_.timeout * 1000));
    while (true) {
        opening_ = true;
        deadline_ = in_seconds(options_.timeout);
        try {
            started_ = plane_.call("StartUpdate", &Stub::StartUpdate, ask, deadline_ + seconds_of(kMargin), stop_);
            break;
        } catch (const Refused &e) {
            opening_ = e.leaderless || (e.update && !over(*e.update)); // an attempt before may have opened it
            if (e.update)
                token_.update_id = e.update->update_id();
            if ((e.reason != "REBIND_REQUIRED" && e.reason != "NOT_ENOUGH_REPLICAS") || Clock::now() >= patience_)
                throw;
        }
        stop_.sleep_until(in_seconds(kPoll));
        ask.set_request_id(random_id());
        init();
    }
    token_.update_id = started_.update_id();
    token_.epoch = started_.epoch();
    deadline_ = in_seconds(static_cast<double>(started_.remaining_ms()) / 1000);
    watch_->follow(token_.update_id);
}

// What carried the bytes: a replica's workers may be reached in different ways.
std::map<std::string, std::set<std::string>> Publication::used() const {
    std::map<std::string, std::set<std::string>> out;
    for (const auto &channel : started_.channels())
        for (const auto &binding : bound_.channels())
            if (binding.channel_id() == channel.channel_id())
                for (const auto &receiver : binding.receivers())
                    out[receiver.substr(0, receiver.rfind('/'))].insert(binding.transport());
    return out;
}

v1::UpdateInfo Publication::finish() {
    auto ask = request<v1::FinishUpdateRequest>();
    ask.set_update_id(token_.update_id);
    ask.set_epoch(token_.epoch);
    finishing_ = true;
    try {
        return plane_.call("FinishUpdate", &Stub::FinishUpdate, ask, deadline_ + seconds_of(kMargin), stop_).update();
    } catch (const Unanswered &) { // unknown is not failed
        const auto info = this->ask();
        if (!info)
            throw;
        if (decided(*info))
            return *info;
        throw aborted(*info);
    } catch (const Refused &e) {
        // These may be the answer to a repeat, after a first call that was carried out.
        finishing_ = e.exit == Exit::unknown_outcome || e.exit == Exit::not_found || e.reason == "TRAINER_FENCED" ||
                     e.leaderless;
        throw;
    }
}

// By when the last word is spoken, however many there are.
Deadline Publication::last_word() const {
    const auto end = in_seconds(kTidy);
    const auto least = in_seconds(kShort);
    return deadline_ == Deadline{} ? end : std::max(least, std::min(end, deadline_ + seconds_of(kGrace)));
}

// What became of the update, once that is known; nothing if nobody says it in time.
std::optional<v1::UpdateInfo> Publication::ask() {
    asked_ = true;
    v1::GetUpdateRequest ask;
    ask.set_group(options_.group);
    ask.set_update_id(token_.update_id);
    const auto end = last_word();
    try {
        while (true) {
            const auto info = plane_.call("GetUpdate", &Stub::GetUpdate, ask, end, never_).update();
            if (decided(info) || over(info))
                return info;
            if (Clock::now() >= end)
                return std::nullopt;
            std::this_thread::sleep_for(std::chrono::duration<double>(kPoll));
        }
    } catch (const Unanswered &) {
        gone_ = true;
    } catch (const Refused &) { // it knows of no such update, say: one with another store
    }
    return std::nullopt;
}

// FinishUpdate may have been carried out, and nobody says whether.
Error Publication::unknown(const Error &why) const {
    return Error(Exit::unknown_outcome, "UNKNOWN_OUTCOME",
                 "whether update " + token_.update_id + " committed is not known: " + why.what() +
                     "; `weightplane updates -g " + options_.group + "` tells once a control plane answers");
}

// Ends the update, whatever is open of ours. What fails here is said; the lease ends by itself.
std::optional<v1::UpdateInfo> Publication::abort(const std::string &reason) {
    auto ask = request<v1::AbortUpdateRequest>();
    ask.set_update_id(token_.update_id);
    ask.set_reason(reason.substr(0, 500));
    try {
        const auto info = tidy("AbortUpdate", &Stub::AbortUpdate, ask).update();
        return decided(info) || over(info) ? std::optional(info) : std::nullopt;
    } catch (const Error &e) {
        if (e.reason != "TRAINER_FENCED") // there is nothing of ours left
            std::cerr << "publish_checkpoint: the update was not aborted: " << e.reason << ": " << e.what() << "\n";
        return std::nullopt;
    }
}

void Publication::close() {
    if (!watch_)
        return;
    const auto ask = request<v1::CloseTransferRequest>();
    try {
        tidy("CloseTransfer", &Stub::CloseTransfer, ask);
    } catch (const Error &e) {
        if (e.reason != "TRAINER_FENCED")
            std::cerr << "publish_checkpoint: the hold was not given up: " << e.reason << ": " << e.what() << "\n";
    }
    beats_.reset();
    watch_.reset();
}
