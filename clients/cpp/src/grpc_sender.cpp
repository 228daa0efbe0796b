#include "grpc_sender.hpp"

#include <grpcpp/generic/generic_stub.h>

#include <set>

#include "call.hpp"
#include "chunks.hpp"

namespace {

namespace v1 = weightplane::v1;

constexpr double kRetry = 0.05; // seconds before an opening is tried again while the receiver has not opened the channel
constexpr double kGoodbye = 1;  // seconds for a stream's orderly end

using Stub = grpc::TemplatedGenericStub<grpc::ByteBuffer, v1::TransferResponse>;

// What all streams of a channel share.
struct Board {
    std::mutex lock;
    std::condition_variable changed;
};

// One call of Transfer. gRPC's threads run it; the sender's thread looks at it under the board's lock.
class Attempt : public grpc::ClientBidiReactor<grpc::ByteBuffer, v1::TransferResponse> {
public:
    Attempt(Board &board, const Shipment &s, const std::string &receiver,
            const std::vector<const weightplane::Bucket *> &buckets, Stub &stub)
        : board_(board), chunks_(s.plan, s.source, buckets), expected_(buckets.size()) {
        context_.AddMetadata(weightplane::kKeyMetadata, s.channel.key());
        context_.set_deadline(grpc_deadline(s.deadline));
        v1::TransferRequest opening;
        auto &open = *opening.mutable_open();
        open.set_channel_id(s.channel.channel_id());
        open.set_update_id(s.token.update_id);
        open.set_epoch(s.token.epoch);
        open.set_generation(s.token.generation);
        open.set_sender(s.member);
        open.set_receiver(receiver);
        const grpc::Slice bytes(opening.SerializeAsString());
        message_ = grpc::ByteBuffer(&bytes, 1);
        stub.PrepareBidiStreamingCall(&context_, weightplane::kTransferMethod, {}, this);
        StartWrite(&message_);
        StartRead(&answer_);
        StartCall();
    }

    void OnWriteDone(bool ok) override {
        const std::lock_guard held(board_.lock);
        idle_ = ok;
        pump();
    }

    void OnReadDone(bool ok) override {
        if (!ok)
            return;
        const std::lock_guard held(board_.lock);
        if (answer_.bucket() < 0)
            opened = true;
        else
            landed_.insert(answer_.bucket());
        pump();
        StartRead(&answer_);
        board_.changed.notify_all();
    }

    void OnDone(const grpc::Status &status) override {
        const std::lock_guard held(board_.lock);
        result = status;
        done = true;
        board_.changed.notify_all();
    }

    void cancel() { context_.TryCancel(); }
    bool complete() const { return opened && landed_.size() == expected_; }

    // Under the board's lock.
    bool opened = false, done = false;
    grpc::Status result;

private:
    // Whatever may be written now. Under the lock.
    void pump() {
        if (!opened || !idle_)
            return;
        if (chunks_.next(message_)) {
            idle_ = false;
            StartWrite(&message_);
        } else if (complete()) {
            idle_ = false;
            StartWritesDone();
        }
    }

    Board &board_;
    Chunks chunks_;
    const std::size_t expected_;
    std::set<std::int32_t> landed_;
    bool idle_ = false;
    grpc::ClientContext context_;
    grpc::ByteBuffer message_;
    v1::TransferResponse answer_;
};

struct Stream {
    std::string receiver;
    std::vector<const weightplane::Bucket *> buckets;
    std::unique_ptr<Stub> stub;
    std::unique_ptr<Attempt> attempt;
    Deadline retry_at{};
};

class GrpcSender : public Sender {
public:
    GrpcSender(const Shipment &shipment, const Identity &own) : s_(shipment) {
        std::set<std::string> receivers;
        for (const auto &b : s_.plan.buckets)
            if (b.sender == s_.member)
                receivers.insert(b.receivers.begin(), b.receivers.end());
        for (const auto &receiver : receivers) {
            Stream stream;
            stream.receiver = receiver;
            for (const auto &b : s_.plan.buckets)
                if (b.sender == s_.member && b.goes_to(receiver))
                    stream.buckets.push_back(&b);
            const auto &port = port_of(receiver);
            auto shown = own; // the receiver says whom to trust; ours is what it asks for
            shown.ca = port.ca_pem();
            stream.stub = std::make_unique<Stub>(reach(receiver, port.address(), shown));
            streams_.push_back(std::move(stream));
        }
    }

    ~GrpcSender() override { end(); }

    void send(Stop &stop) override {
        const Stop::Listener wake(stop, [this] {
            const std::lock_guard held(board_.lock);
            board_.changed.notify_all();
        });
        for (auto &stream : streams_)
            start(stream);
        std::unique_lock held(board_.lock);
        while (!stop.is_set() && !all_landed()) {
            const auto retry = look();
            board_.changed.wait_until(held, std::min(retry, s_.deadline));
            if (Clock::now() >= s_.deadline && !all_landed())
                throw Error(Exit::failed, "DEADLINE", "the bytes were not all in place at the deadline");
        }
        held.unlock();
        end();
        stop.check();
    }

private:
    const v1::GrpcRendezvous &port_of(const std::string &receiver) const {
        const auto offer = s_.channel.offers().find(receiver);
        if (offer == s_.channel.offers().end() || offer->second.grpc().address().empty())
            throw Error(Exit::failed, "TRANSPORT", receiver + " offers no data port", receiver);
        return offer->second.grpc();
    }

    static std::shared_ptr<grpc::Channel> reach(const std::string &receiver, const std::string &address,
                                                const Identity &shown) {
        try {
            return dial(address, shown);
        } catch (const Error &why) { // no matter of our command line
            throw Error(Exit::failed, "TRANSPORT", "the data port of " + receiver + ": " + why.what(), receiver);
        }
    }

    void start(Stream &stream) {
        stream.attempt = std::make_unique<Attempt>(board_, s_, stream.receiver, stream.buckets, *stream.stub);
    }

    // Under the lock.
    bool all_landed() const {
        for (const auto &stream : streams_)
            if (!stream.attempt->complete())
                return false;
        return true;
    }

    // Tries openings again that came too early; throws for a stream that ended. Under the lock.
    Deadline look() {
        auto next = Deadline::max();
        for (auto &stream : streams_) {
            auto &attempt = *stream.attempt;
            if (!attempt.done || attempt.complete())
                continue;
            if (attempt.opened || attempt.result.error_code() != grpc::StatusCode::NOT_FOUND)
                throw Error(Exit::failed, "TRANSPORT",
                            "the stream to " + stream.receiver + " ended: " + attempt.result.error_message(),
                            stream.receiver);
            if (stream.retry_at == Deadline{})
                stream.retry_at = in_seconds(kRetry);
            if (Clock::now() >= stream.retry_at) {
                stream.retry_at = {};
                start(stream);
            } else {
                next = std::min(next, stream.retry_at);
            }
        }
        return next;
    }

    // Where all is acknowledged the streams end in good order, within a second; else they are cancelled. What gRPC still
    // runs must not outlive us.
    void end() {
        std::unique_lock held(board_.lock);
        const auto ended = [&] {
            for (const auto &stream : streams_)
                if (stream.attempt && !stream.attempt->done)
                    return false;
            return true;
        };
        bool landed = true;
        for (const auto &stream : streams_)
            landed = landed && stream.attempt && stream.attempt->complete();
        if (landed)
            board_.changed.wait_until(held, in_seconds(kGoodbye), ended);
        for (const auto &stream : streams_)
            if (stream.attempt && !stream.attempt->done)
                stream.attempt->cancel();
        board_.changed.wait(held, ended);
    }

    const Shipment s_;
    Board board_;
    std::vector<Stream> streams_;
};

} // namespace

std::unique_ptr<Sender> grpc_sender(const Shipment &shipment, const Identity &own) {
    return std::make_unique<GrpcSender>(shipment, own);
}
