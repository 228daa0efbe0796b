// One checkpoint on one group: init, start, update, finish.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "beats.hpp"
#include "call.hpp"
#include "options.hpp"
#include "safetensors.hpp"
#include "sender.hpp"
#include "transport.hpp"
#include "watch.hpp"

struct Outcome {
    weightplane::v1::UpdateInfo update;
    std::uint64_t bytes = 0; // that left this trainer, once per set of receivers
    double seconds = 0;      // from StartUpdate to FinishUpdate's answer
    std::map<std::string, std::set<std::string>> transports; // by replica
};

// One call of UpdateWeights: the plan and the sender of each channel. Senders live until the update is over: who receives
// may look at them until then.
struct Round {
    std::map<std::string, weightplane::Plan> plans; // by channel
    std::vector<std::pair<std::string, std::unique_ptr<Sender>>> senders;
};

class Publication {
public:
    Publication(const Options &options, const Safetensors &source, Stop &stop);
    ~Publication();
    Publication(const Publication &) = delete;
    Publication &operator=(const Publication &) = delete;

    // Throws Error, after the update was aborted here and the hold given up.
    Outcome run();

    // The update as far as it is known; empty before one was opened.
    const std::string &update_id() const { return token_.update_id; }

private:
    template <class Request> Request request() const {
        Request out;
        out.set_request_id(random_id());
        out.set_group(options_.group);
        out.set_generation(token_.generation);
        return out;
    }
    void gather();
    void hold();
    bool reached();
    void init();
    void announce();
    void start();
    std::map<std::string, std::set<std::string>> used() const;
    Transport &transport_of(const std::string &name);
    weightplane::Plan plan_of(const std::string &plan_id);
    void update();
    void round(const std::vector<int> &channels, std::int64_t seq, bool all);
    void put_digests(const weightplane::Plan &plan, const std::vector<std::uint64_t> &digests);
    void lost(const Error &why);
    weightplane::v1::UpdateInfo finish();
    std::optional<weightplane::v1::UpdateInfo> ask();
    Error unknown(const Error &why) const;
    Deadline last_word() const;
    // A call that tidies up: one short try where nobody answered before.
    template <class Request, class Answer>
    Answer tidy(const char *method,
                grpc::Status (ControlPlane::Stub::*function)(grpc::ClientContext *, const Request &, Answer *),
                const Request &request) {
        try {
            return plane_.call(method, function, request, gone_ ? in_seconds(1) : last_word(), never_, gone_ ? 0 : 1);
        } catch (const Unanswered &) {
            gone_ = true;
            throw;
        }
    }
    std::optional<weightplane::v1::UpdateInfo> abort(const std::string &reason);
    void close();

    const Options &options_;
    const Safetensors &source_;
    Stop &stop_;
    Stop never_; // for the calls that tidy up
    const std::string member_ = "rank/0", incarnation_ = random_id(), start_id_ = random_id(), manifest_id_;
    ControlPlane plane_;
    std::vector<std::unique_ptr<Transport>> transports_;
    std::unique_ptr<Watch> watch_;
    std::unique_ptr<Beats> beats_;
    Token token_;
    Deadline patience_{}; // of --wait
    std::set<std::string> ready_; // the replicas that may take part, as gather saw them
    bool opening_ = false;
    bool finishing_ = false; // FinishUpdate may have been carried out
    bool asked_ = false;     // what became of it, in vain
    bool gone_ = false;      // the control plane: a call had no answer
    Deadline deadline_{}; // of the whole update
    weightplane::v1::InitTransferResponse bound_;
    weightplane::v1::StartUpdateResponse started_;
    std::uint64_t bytes_ = 0;
    std::list<Round> rounds_;
};
