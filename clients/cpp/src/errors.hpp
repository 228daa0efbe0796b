// What can go wrong, and how a person and a script are told.
#pragma once

#include <grpcpp/grpcpp.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "weightplane/v1/update.pb.h"

// Exit statuses, those of the command `weightplane` (docs/cli.md).
enum class Exit {
    ok = 0,
    unexpected = 1,
    usage = 2,
    unreachable = 3,
    refused = 4,
    failed = 5,
    unknown_outcome = 6,
    not_found = 7,
    denied = 8,
    interrupted = 130,
};

// The publish ends here. `reason` is one of the contract's, without its prefix.
class Error : public std::runtime_error {
public:
    Error(Exit exit, std::string reason, const std::string &message, std::string member = "")
        : std::runtime_error(message), exit(exit), reason(std::move(reason)), member(std::move(member)) {}

    Exit exit;
    std::string reason, member;
    bool settled = false; // the control plane said that the update is aborted
};

// A call's answer is a refusal (google.rpc.Status in the trailers).
class Refused : public Error {
public:
    Refused(Exit exit, std::string reason, const std::string &message, std::string member,
            std::optional<weightplane::v1::UpdateInfo> update);

    std::optional<weightplane::v1::UpdateInfo> update; // of an aborted one: names each replica and why
    bool leaderless = false; // it is of a control plane that does not lead now: another one does, or will
};

// A call got no answer: whether it took effect is unknown.
class Unanswered : public Error {
public:
    Unanswered(const std::string &method, const grpc::Status &status, const std::string &advice);

    grpc::StatusCode code;
};

// Whether an update is aborted, or is being so.
bool over(const weightplane::v1::UpdateInfo &update);

// A refusal that a status carries; none where the server did not speak.
std::optional<Refused> refusal_of(const grpc::Status &status);

// The same of the serialised google.rpc.Status alone (for the vectors).
std::optional<Refused> refusal_of(const std::string &details);

// What ended an update, as an exception of this program.
Error aborted(const weightplane::v1::UpdateInfo &update);
