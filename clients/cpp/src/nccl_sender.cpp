#include "nccl_sender.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <thread>

#include "weightplane/collective.hpp"

namespace {

namespace v1 = weightplane::v1;
using weightplane::Bucket;
using weightplane::kFenceBytes;
using Piece = Nccl::Piece;

constexpr std::size_t kInFlight = 4; // buckets queued and not complete
constexpr auto kShort = std::chrono::microseconds(50), kLong = std::chrono::microseconds(1000);
constexpr auto kSpin = std::chrono::milliseconds(100), kAsk = std::chrono::milliseconds(50);

// Memory, streams and events of one channel. All is given back when nothing of it runs any more.
class Scratch {
public:
    explicit Scratch(const Cuda &cuda) : cuda_(cuda) {}
    ~Scratch() {
        for (auto *e : events_)
            cuda_.drop_event(e);
        for (auto *s : streams_)
            cuda_.drop_stream(s);
        for (const auto at : memory_)
            cuda_.release(at);
    }
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;

    Cuda::Address memory(std::uint64_t nbytes) { return memory_.emplace_back(cuda_.allocate(nbytes)); }
    Cuda::Stream stream() { return streams_.emplace_back(cuda_.new_stream()); }
    Cuda::Event event() { return events_.emplace_back(cuda_.new_event()); }

private:
    const Cuda &cuda_;
    std::vector<Cuda::Address> memory_;
    std::vector<Cuda::Stream> streams_;
    std::vector<Cuda::Event> events_;
};

class NcclSender : public Sender {
public:
    NcclSender(const Shipment &shipment, const Card &card) : s_(shipment), card_(card), scratch_(card.cuda) {
        const auto &offers = s_.channel.offers();
        if (s_.channel.senders_size() != 1)
            throw Error(Exit::failed, "TRANSPORT", "this program sends alone, and the channel has other senders");
        const auto &own = offers.at(s_.member).nccl();
        if (s_.channel.ordinal() >= own.unique_ids_size())
            throw Error(Exit::failed, "TRANSPORT", "more kinds of replicas at once than unique ids were offered");
        for (const auto &receiver : s_.channel.receivers()) {
            const auto at = offers.find(receiver);
            if (at != offers.end() && at->second.nccl().version() != own.version())
                throw Error(Exit::failed, "TRANSPORT",
                            receiver + " has NCCL " + std::to_string(at->second.nccl().version()) + " and this program " +
                                std::to_string(own.version()) + ": they must be equal; see LD_LIBRARY_PATH",
                            receiver);
            ranks_.emplace(receiver, static_cast<int>(ranks_.size()) + 1);
        }
        card_.cuda.make_current();
        wire_ = scratch_.stream();
        packing_ = scratch_.stream();
    }

    // A communicator first, whose end ends what is queued: then nothing of ours runs.
    ~NcclSender() override {
        card_.cuda.make_current();
        communicator_.reset();
        try {
            card_.cuda.synchronize(packing_);
            card_.cuda.synchronize(wire_);
        } catch (const Error &) {
            // a device that is broken runs nothing
        }
    }

    // All of it on this thread, which waits for nobody without looking at `stop` meanwhile.
    void send(Stop &stop) override {
        card_.cuda.make_current();
        prepare();
        const auto &id = s_.channel.offers().at(s_.member).nccl().unique_ids(s_.channel.ordinal());
        communicator_ = std::make_unique<Nccl::Communicator>(card_.nccl, id, s_.channel.receivers_size() + 1, wire_,
                                                             [&] { look(stop); });
        for (const auto *bucket : buckets_) {
            while (flights_.size() >= kInFlight)
                complete(stop);
            doing_ = bucket;
            move(*bucket, stop);
        }
        acknowledged();
        while (!flights_.empty())
            complete(stop);
    }

private:
    // What every member derives alike from the plan; and the memory that it takes.
    void prepare() {
        std::map<std::vector<std::string>, std::vector<const Bucket *>> together;
        std::uint64_t packed = 0;
        for (const auto &b : s_.plan.buckets) {
            if (b.sender != s_.member)
                continue;
            buckets_.push_back(&b);
            together[b.receivers].push_back(&b);
            for (const auto &step : steps_[b.index] = weightplane::steps_of(b, tuning_))
                packed = std::max(packed, step.large ? 0 : step.nbytes);
        }
        for (const auto &[receivers, some] : together) {
            std::uint64_t nbytes = 0;
            for (const auto *b : some)
                nbytes += b->nbytes;
            fences_[some.front()->index] =
                weightplane::fence_text(s_.channel.channel_id(), s_.token.update_id, s_.token.epoch,
                                        s_.token.generation, some.front()->index, some.size(), nbytes, tuning_);
        }
        const auto n = std::max<std::size_t>(fences_.size(), 1);
        auto at = scratch_.memory(n * kFenceBytes);
        for (const auto &[index, text] : fences_) {
            card_.cuda.to_device(at, text.data(), kFenceBytes, wire_);
            fence_at_[index] = at;
            at += kFenceBytes;
        }
        if (packed > 0)
            for (std::uint64_t i = 0; i < tuning_.slots; ++i)
                slots_.push_back({scratch_.memory(packed), nullptr});
        acks_ = scratch_.memory(1 + ranks_.size());
    }

    void move(const Bucket &bucket, Stop &stop) {
        std::vector<Piece> lies; // the bucket's bytes, in order
        for (const auto &s : bucket.segments)
            card_.copy.each(s_.plan, static_cast<std::size_t>(s.region), s.offset, s.nbytes,
                            [&](std::uint64_t at, std::uint64_t n) { lies.push_back({card_.copy.base() + at, n, 0}); });
        if (const auto fence = fence_at_.find(bucket.index); fence != fence_at_.end())
            to_all(bucket, {{fence->second, kFenceBytes, 0}});
        for (const auto &step : steps_.at(bucket.index)) {
            look(stop);
            if (step.large)
                to_all(bucket, straight(step, lies));
            else
                packed(bucket, step, lies);
        }
        flights_.push_back({&bucket, mark(wire_)});
    }

    // Packing a buffer goes on beside the wire; it is written again once the wire has taken what it held.
    void packed(const Bucket &bucket, const weightplane::Step &step, const std::vector<Piece> &lies) {
        auto &slot = slots_[next_++ % slots_.size()];
        if (slot.free != nullptr)
            card_.cuda.wait(packing_, slot.free);
        for (const auto &part : step.parts) {
            auto to = slot.at + part.at;
            each(part, lies, [&](Cuda::Address from, std::uint64_t n) {
                card_.cuda.inside(to, from, n, packing_);
                to += n;
            });
        }
        card_.cuda.wait(wire_, mark(packing_));
        to_all(bucket, {{slot.at, step.nbytes, 0}});
        slot.free = mark(wire_);
    }

    // Stretches that lie in one piece go from where they are; of others a packed copy is made.
    std::vector<Piece> straight(const weightplane::Step &step, const std::vector<Piece> &lies) {
        std::vector<Piece> out;
        for (const auto &part : step.parts) {
            std::vector<Piece> stretches;
            each(part, lies, [&](Cuda::Address from, std::uint64_t n) {
                if (!stretches.empty() && stretches.back().at + stretches.back().nbytes == from)
                    stretches.back().nbytes += n;
                else
                    stretches.push_back({from, n, 0});
            });
            if (stretches.size() == 1) {
                out.push_back(stretches.front());
                continue;
            }
            const auto copy = scratch_.memory(part.nbytes);
            auto to = copy;
            for (const auto &s : stretches) {
                card_.cuda.inside(to, s.at, s.nbytes, wire_);
                to += s.nbytes;
            }
            out.push_back({copy, part.nbytes, 0});
        }
        return out;
    }

    template <class F> static void each(const weightplane::Part &part, const std::vector<Piece> &lies, F &&f) {
        std::uint64_t begin = 0, offset = part.offset, left = part.nbytes;
        for (const auto &piece : lies) {
            if (left == 0)
                return;
            if (offset < begin + piece.nbytes) {
                const auto n = std::min(left, begin + piece.nbytes - offset);
                f(piece.at + (offset - begin), n);
                offset += n;
                left -= n;
            }
            begin += piece.nbytes;
        }
    }

    bool for_all(const Bucket &bucket) const { return bucket.receivers.size() == ranks_.size(); }

    void to_all(const Bucket &bucket, const std::vector<Piece> &pieces) {
        if (for_all(bucket))
            return communicator_->broadcast(pieces);
        std::vector<Piece> sends;
        for (const auto &receiver : bucket.receivers)
            for (const auto &p : pieces)
                sends.push_back({p.at, p.nbytes, ranks_.at(receiver)});
        communicator_->exchange(sends, {});
    }

    // After the last bucket: every receiver joins once it has taken everything.
    void acknowledged() {
        const Bucket *last = nullptr;
        bool broad = false;
        std::vector<Piece> receives;
        for (const auto &receiver : s_.channel.receivers()) { // in the channel's order, as at the receivers
            bool some = false;
            for (const auto *b : buckets_) {
                last = b;
                broad = broad || for_all(*b);
                some = some || (!for_all(*b) && b->goes_to(receiver));
            }
            if (some)
                receives.push_back({acks_ + receives.size() + 1, 1, ranks_.at(receiver)});
        }
        if (broad)
            communicator_->reduce(acks_);
        if (!receives.empty())
            communicator_->exchange({}, receives);
        if (last != nullptr)
            flights_.push_back({last, mark(wire_)});
    }

    Cuda::Event mark(Cuda::Stream stream) {
        auto *event = scratch_.event();
        card_.cuda.record(event, stream);
        return event;
    }

    void complete(Stop &stop) {
        const auto flight = flights_.front();
        doing_ = flight.bucket;
        const auto begun = Clock::now();
        while (!card_.cuda.passed(flight.passed)) {
            look(stop);
            std::this_thread::sleep_for(Clock::now() - begun < kSpin ? kShort : kLong); // an event tells nobody
        }
        flights_.pop_front();
    }

    // Throws if this side has to end, or the library says that the communicator is of no more use.
    void look(Stop &stop) {
        stop.check();
        const auto now = Clock::now();
        const auto where = doing_ == nullptr ? std::string("to connect") : "in bucket " + std::to_string(doing_->index);
        std::string whom;
        for (const auto &[receiver, rank] : ranks_)
            whom += (whom.empty() ? "" : ", ") + receiver;
        if (now >= s_.deadline)
            throw Error(Exit::failed, "DEADLINE", "waited " + where + " until the deadline; it needs " + whom);
        if (!communicator_ || now - asked_ < kAsk)
            return;
        asked_ = now;
        if (const auto why = communicator_->problem(); !why.empty())
            throw Error(Exit::failed, "TRANSPORT", "lost one of " + whom + " " + where + ": " + why);
    }

    struct Slot {
        Cuda::Address at;
        Cuda::Event free;
    };
    struct Flight {
        const Bucket *bucket;
        Cuda::Event passed;
    };

    const Shipment s_;
    const Card &card_;
    const weightplane::Tuning tuning_;
    Scratch scratch_;
    Cuda::Stream wire_ = nullptr, packing_ = nullptr;
    std::map<std::string, int> ranks_; // of the receivers
    std::vector<const Bucket *> buckets_;
    std::map<std::int32_t, std::vector<weightplane::Step>> steps_;
    std::map<std::int32_t, std::string> fences_; // before which bucket; and where it lies
    std::map<std::int32_t, Cuda::Address> fence_at_;
    std::vector<Slot> slots_;
    std::size_t next_ = 0;
    Cuda::Address acks_ = 0;
    std::deque<Flight> flights_;
    const Bucket *doing_ = nullptr;
    Clock::time_point asked_{};
    std::unique_ptr<Nccl::Communicator> communicator_;
};

} // namespace

std::unique_ptr<Sender> nccl_sender(const Shipment &shipment, const Card &card) {
    return std::make_unique<NcclSender>(shipment, card);
}
