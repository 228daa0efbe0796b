#include "errors.hpp"

#include "rpc_status.pb.h"

namespace {

namespace v1 = weightplane::v1;

Exit exit_of(grpc::StatusCode code, const std::string &reason) {
    switch (code) {
    case grpc::StatusCode::INVALID_ARGUMENT: return Exit::usage;
    case grpc::StatusCode::NOT_FOUND: return Exit::not_found;
    case grpc::StatusCode::PERMISSION_DENIED: return reason == "TRAINER_FENCED" ? Exit::failed : Exit::denied;
    case grpc::StatusCode::UNAUTHENTICATED: return Exit::denied;
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::DEADLINE_EXCEEDED: return Exit::failed;
    case grpc::StatusCode::UNKNOWN: return Exit::unknown_outcome;
    case grpc::StatusCode::UNAVAILABLE: return Exit::unreachable;
    default: return Exit::refused;
    }
}

std::string bare(const std::string &name, const std::string &prefix) {
    return name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name;
}

template <class M> bool unpack(const google::protobuf::Any &any, const std::string &name, M &out) {
    const auto &url = any.type_url();
    return url.size() > name.size() && url.compare(url.size() - name.size() - 1, std::string::npos, "/" + name) == 0 &&
           out.ParseFromString(any.value());
}

} // namespace

Unanswered::Unanswered(const std::string &method, const grpc::Status &status, const std::string &advice)
    : Error(Exit::unreachable, "UNREACHABLE", // before FinishUpdate nothing commits; of that, Publication asks
            method + " got no answer: " + status.error_message() +
                (advice.empty() ? "" : " (" + advice + ")")),
      code(status.error_code()) {}

Refused::Refused(Exit exit, std::string reason, const std::string &message, std::string member,
                 std::optional<v1::UpdateInfo> update)
    : Error(exit, std::move(reason), message, std::move(member)), update(std::move(update)) {
    settled = this->update && over(*this->update);
}

bool over(const v1::UpdateInfo &update) {
    return update.phase() == v1::UPDATE_PHASE_ABORTING || update.phase() == v1::UPDATE_PHASE_ABORTED;
}

std::optional<Refused> refusal_of(const std::string &details) {
    weightplane::client::RpcStatus said;
    if (details.empty() || !said.ParseFromString(details))
        return std::nullopt;
    weightplane::client::ErrorInfo info;
    v1::Failure failure;
    std::optional<v1::UpdateInfo> update;
    bool found = false;
    for (const auto &any : said.details()) {
        weightplane::client::ErrorInfo i;
        v1::UpdateInfo u;
        if (unpack(any, "google.rpc.ErrorInfo", i) && i.domain() == "weightplane") {
            info = i;
            found = true;
        } else if (unpack(any, "weightplane.v1.UpdateInfo", u)) {
            update = u;
        } else {
            unpack(any, "weightplane.v1.Failure", failure); // what else there is, is of a newer contract
        }
    }
    if (!found)
        return std::nullopt;
    const auto &message = failure.message().empty() ? said.message() : failure.message();
    const auto member = info.metadata().find("member");
    Refused out(exit_of(static_cast<grpc::StatusCode>(said.code()), info.reason()), info.reason(), message,
                member == info.metadata().end() ? "" : member->second, update);
    out.leaderless = said.code() == static_cast<int>(grpc::StatusCode::UNAVAILABLE);
    return out;
}

std::optional<Refused> refusal_of(const grpc::Status &status) { return refusal_of(status.error_details()); }

Error aborted(const v1::UpdateInfo &update) {
    const auto &f = update.failure();
    const auto reason = bare(v1::Reason_Name(f.reason()), "REASON_");
    Error out(Exit::failed, reason, "update " + update.update_id() + " was aborted: " + f.message(), f.member());
    out.settled = true;
    return out;
}
