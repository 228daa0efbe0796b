#include "shm_sender.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "digests.hpp"
#include "shm_segment.hpp"

namespace {

using weightplane::Bucket;

constexpr auto kPeerCheck = std::chrono::milliseconds(20); // between two looks at whether a receiver lives

class ShmSender : public Sender {
public:
    explicit ShmSender(const Shipment &shipment)
        : s_(shipment), receivers_(s_.channel.receivers().begin(), s_.channel.receivers().end()),
          fence_(shm_fence(s_.token.update_id, s_.token.epoch, s_.token.generation)),
          segment_(s_.channel.key(), s_.channel.channel_id(), s_.member, receivers_), counts_(receivers_.size()) {
        for (const auto &[member, offer] : s_.channel.offers()) {
            const auto &host = offer.shm().host_id();
            if (!host.empty() && host != shm_host())
                throw Error(Exit::failed, "TRANSPORT",
                            member + " is at " + host + " and " + s_.member + " at " + shm_host() +
                                ": shm needs one host, one mount of /dev/shm and one user; use grpc between them",
                            member);
        }
    }

    ~ShmSender() override {
        segment_.set_state(finished_ ? ShmSegment::closed : ShmSegment::aborted);
        for (std::size_t rank = 0; rank < receivers_.size(); ++rank)
            segment_.wake_receiver(rank);
    }

    void send(Stop &stop) override {
        const Stop::Listener end(stop, [this] { segment_.set_state(ShmSegment::aborted); });
        for (const auto &bucket : s_.plan.buckets)
            if (bucket.sender == s_.member)
                send(bucket, stop);
        for (std::size_t rank = 0; rank < counts_.size(); ++rank) {
            wait_read(rank, counts_[rank], stop);
            if (segment_.skipped(rank) > 0)
                lost(rank, "left this update before it had read everything");
        }
        finished_ = true;
    }

private:
    void send(const Bucket &bucket, Stop &stop) {
        std::vector<std::size_t> ranks;
        for (const auto &receiver : bucket.receivers) {
            const auto at = std::find(receivers_.begin(), receivers_.end(), receiver);
            if (at == receivers_.end())
                throw Error(Exit::failed, "INTERNAL", receiver + " is no receiver of " + s_.channel.channel_id());
            ranks.push_back(static_cast<std::size_t>(at - receivers_.begin()));
            wait_armed(ranks.back(), stop);
        }
        bucket_ = bucket.index;
        std::size_t segment = 0;
        std::uint64_t within = 0;
        for (std::uint64_t offset = 0; offset < bucket.nbytes;) {
            const auto slot = seq_ % ShmSegment::kSlots, n = std::min(ShmSegment::kSlotBytes, bucket.nbytes - offset);
            for (const auto &[rank, count] : occupants_[slot])
                wait_read(rank, count, stop);
            stop.check();
            segment_.invalidate(slot);
            auto *to = segment_.slot(slot);
            for (std::uint64_t left = n; left > 0;) {
                const auto &s = bucket.segments[segment];
                const auto take = std::min(left, s.nbytes - within);
                each_span(s_.plan, s_.source, static_cast<std::size_t>(s.region), s.offset + within, take,
                          [&](const std::uint8_t *data, std::uint64_t size) {
                              std::memcpy(to, data, size);
                              to += size;
                          });
                left -= take;
                within += take;
                if (within == s.nbytes) {
                    ++segment;
                    within = 0;
                }
            }
            segment_.write_header(slot, static_cast<std::uint64_t>(bucket.index), offset, n, fence_, ++seq_);
            occupants_[slot].clear();
            for (const auto rank : ranks) {
                counts_[rank] = segment_.post(rank, seq_);
                occupants_[slot].emplace_back(rank, counts_[rank]);
            }
            segment_.ring(seq_);
            offset += n;
        }
    }

    void wait_read(std::size_t rank, std::uint64_t count, Stop &stop) {
        for (auto seen = segment_.read(rank); seen < count; seen = segment_.read(rank)) {
            look(rank, stop);
            segment_.wait_read(rank, seen);
        }
    }

    void wait_armed(std::size_t rank, Stop &stop) {
        while (armed_.count(rank) == 0) {
            const auto seen = segment_.arms(rank);
            if (segment_.armed_for(rank, fence_)) {
                if (!segment_.knows_key(rank))
                    lost(rank, "attached without the channel's key");
                armed_.insert(rank);
                return;
            }
            look(rank, stop);
            segment_.wait_arm(rank, seen);
        }
    }

    // Throws if this side has to end, or the receiver is gone.
    void look(std::size_t rank, Stop &stop) {
        stop.check();
        const auto now = Clock::now();
        if (now >= s_.deadline)
            throw Error(Exit::failed, "DEADLINE", "waited for " + receivers_[rank] + " in bucket " +
                                                      std::to_string(bucket_) + " until the deadline",
                        receivers_[rank]);
        switch (segment_.receiver_state(rank)) {
        case ShmSegment::none: return;
        case ShmSegment::open: break;
        case ShmSegment::aborted: lost(rank, "aborted its side");
        case ShmSegment::closed: lost(rank, "closed its side");
        }
        if (now - looked_ < kPeerCheck)
            return;
        looked_ = now;
        if (segment_.dead(rank))
            lost(rank, "died");
    }

    [[noreturn]] void lost(std::size_t rank, const std::string &why) const {
        throw Error(Exit::failed, "TRANSPORT",
                    receivers_[rank] + " " + why + " (bucket " + std::to_string(bucket_) + ")", receivers_[rank]);
    }

    const Shipment s_;
    const std::vector<std::string> receivers_;
    const std::string fence_;
    ShmSegment segment_;
    std::vector<std::uint64_t> counts_; // slots posted to each receiver
    std::array<std::vector<std::pair<std::size_t, std::uint64_t>>, ShmSegment::kSlots> occupants_;
    std::set<std::size_t> armed_;
    std::uint64_t seq_ = 0;
    std::int32_t bucket_ = -1;
    Clock::time_point looked_{};
    bool finished_ = false;
};

} // namespace

std::unique_ptr<Sender> shm_sender(const Shipment &shipment) { return std::make_unique<ShmSender>(shipment); }
