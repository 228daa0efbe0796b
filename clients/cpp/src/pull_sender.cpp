#include "pull_sender.hpp"

#include <algorithm>
#include <map>
#include <set>

namespace {

namespace v1 = weightplane::v1;

constexpr std::size_t kSplit = 20'000; // chunks in one message: a few hundred KiB

class PullSender : public Sender, private PullChannel {
public:
    PullSender(const Shipment &shipment, PullListener &listener, const PullMemory &memory)
        : s_(shipment), listener_(listener), memory_(memory) {
        const std::lock_guard held(listener_.lock);
        listener_.add(*this);
    }

    ~PullSender() override {
        const std::lock_guard held(listener_.lock);
        listener_.remove(*this, finished_ ? "closed" : "aborted: " + why_);
    }

    void send(Stop &stop) override {
        try {
            const Stop::Listener wake(stop, [this] {
                const std::lock_guard held(listener_.lock);
                listener_.changed.notify_all();
            });
            std::unique_lock held(listener_.lock);
            for (const auto &bucket : s_.plan.buckets)
                if (bucket.sender == s_.member)
                    tell(bucket, held, stop);
            for (const auto &[receiver, told] : told_)
                for (const auto index : told)
                    wait(receiver, index, held, stop, [&] { return is_done(receiver, index); });
            finished_ = true;
        } catch (const Error &e) {
            why_ = e.what();
            throw;
        }
    }

private:
    // --- the listener's thread

    const std::string &key() const override { return s_.channel.key(); }

    bool is(const v1::PullHello &hello) const override {
        const auto &known = s_.channel.receivers();
        return hello.channel_id() == s_.channel.channel_id() && hello.sender() == s_.member &&
               std::find(known.begin(), known.end(), hello.receiver()) != known.end();
    }

    v1::PullWelcome welcome() const override { return memory_.welcome(); }

    void admit(PullLink &link) override { // a newer connection takes an older one's place, and what that was told is lost
        const auto &receiver = link.hello->receiver();
        const auto old = links_.find(receiver);
        if (old != links_.end())
            lost_.emplace(receiver, "connected anew");
        links_[receiver] = &link;
        if (told_[receiver] == done_[receiver])
            lost_.erase(receiver);
    }

    void said(PullLink &link, const v1::PullMessage &message) override {
        const auto &receiver = link.hello->receiver();
        if (links_.count(receiver) == 0 || links_[receiver] != &link)
            return;
        if (message.has_armed()) {
            link.armed = message.armed();
        } else if (message.has_done()) {
            const auto &done = message.done();
            if (is_armed(receiver) && done.armed() == link.armed->number() && told_[receiver].count(done.bucket()) > 0)
                done_[receiver].insert(done.bucket());
        } else if (message.has_bye()) {
            lost_.emplace(receiver, "left: " + message.bye().reason().substr(0, 1000));
        }
    }

    void ended(PullLink &link) override {
        const auto &receiver = link.hello->receiver();
        const auto at = links_.find(receiver);
        if (at != links_.end() && at->second == &link) {
            links_.erase(at);
            lost_.emplace(receiver, link.gone);
        }
    }

    // --- the sending thread, with the lock

    void tell(const weightplane::Bucket &bucket, std::unique_lock<std::mutex> &held, Stop &stop) {
        held.unlock(); // a large model's chunks take their time
        const auto chunks = memory_.chunks(s_.plan, bucket);
        held.lock();
        for (const auto &receiver : bucket.receivers) {
            wait(receiver, bucket.index, held, stop, [&] { return is_armed(receiver); });
            auto &link = *links_.at(receiver);
            if (told_[receiver].empty()) {
                v1::PullMessage table;
                *table.mutable_table()->add_regions() = memory_.region();
                listener_.post(link, table);
            }
            for (std::size_t first = 0; first < chunks.size(); first += kSplit) {
                v1::PullMessage table;
                auto &part = *table.mutable_table()->add_buckets();
                part.set_bucket(bucket.index);
                part.set_version(kVersion);
                for (auto i = first; i < std::min(chunks.size(), first + kSplit); ++i) {
                    part.add_regions(1);
                    part.add_offsets(chunks[i].offset);
                    part.add_sizes(chunks[i].nbytes);
                }
                listener_.post(link, table);
            }
            v1::PullMessage ready;
            ready.mutable_ready()->set_bucket(bucket.index);
            ready.mutable_ready()->set_armed(link.armed->number());
            ready.mutable_ready()->set_version(kVersion);
            listener_.post(link, ready);
            told_[receiver].insert(bucket.index);
        }
    }

    bool is_armed(const std::string &receiver) const {
        const auto at = links_.find(receiver);
        if (at == links_.end() || !at->second->armed)
            return false;
        const auto &armed = *at->second->armed;
        return armed.update_id() == s_.token.update_id && armed.epoch() == s_.token.epoch &&
               armed.generation() == s_.token.generation;
    }

    bool is_done(const std::string &receiver, std::int32_t bucket) {
        if (done_[receiver].count(bucket) > 0)
            return true;
        const auto at = links_.find(receiver);
        if (at != links_.end() && at->second->armed && !is_armed(receiver))
            lost(receiver, "left this update before it had read everything", bucket);
        return false;
    }

    template <class Done>
    void wait(const std::string &receiver, std::int32_t bucket, std::unique_lock<std::mutex> &held, Stop &stop,
              Done &&done) {
        while (true) {
            stop.check();
            if (done())
                return;
            if (const auto at = lost_.find(receiver); at != lost_.end())
                lost(receiver, at->second, bucket);
            if (Clock::now() >= s_.deadline)
                throw Error(Exit::failed, "DEADLINE", "waited for " + receiver + " in bucket " + std::to_string(bucket) +
                                                          " until the deadline",
                            receiver);
            listener_.changed.wait_until(held, s_.deadline);
        }
    }

    [[noreturn]] static void lost(const std::string &receiver, const std::string &why, std::int32_t bucket) {
        throw Error(Exit::failed, "TRANSPORT", receiver + " " + why + " (bucket " + std::to_string(bucket) + ")",
                    receiver);
    }

    static constexpr std::uint32_t kVersion = 1; // of a bucket's chunks: they never change

    const Shipment s_;
    PullListener &listener_;
    const PullMemory &memory_;
    std::map<std::string, PullLink *> links_; // by receiver
    std::map<std::string, std::string> lost_;
    std::map<std::string, std::set<std::int32_t>> told_, done_;
    bool finished_ = false;
    std::string why_ = "given up";
};

} // namespace

std::unique_ptr<Sender> pull_sender(const Shipment &shipment, PullListener &listener, const PullMemory &memory) {
    return std::make_unique<PullSender>(shipment, listener, memory);
}
