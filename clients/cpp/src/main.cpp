// publish_checkpoint: puts a safetensors file on a fleet of inference engines. See kUsage in options.cpp.
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <grpc/grpc.h>
#include <iostream>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "publication.hpp"
#include "signals.hpp"

namespace {

namespace v1 = weightplane::v1;
using nlohmann::json;

json shown(const Outcome &outcome) {
    const auto &u = outcome.update;
    const double wire = u.timings().wire_s();
    json replicas = json::object();
    for (const auto &o : u.outcomes())
        replicas[o.replica_id()] = v1::WeightsState_Name(o.state()).substr(std::string("WEIGHTS_STATE_").size());
    json transports = json::object();
    for (const auto &[replica, names] : outcome.transports) {
        std::string text;
        for (const auto &name : names)
            text += (text.empty() ? "" : "+") + name;
        transports[replica] = text;
    }
    json absent = json::object();
    for (const auto &a : u.absent())
        absent[a.replica_id()] = a.reason();
    return {{"committed", true},
            {"version", u.version()},
            {"update_id", u.update_id()},
            {"step", u.trainer_step()},
            {"bytes", outcome.bytes},
            {"seconds", outcome.seconds},
            {"wire_s", wire},
            {"gbps", wire > 0 ? static_cast<double>(outcome.bytes) / wire / 1e9 : 0.0},
            {"replicas", replicas},
            {"absent", absent},
            {"transports", transports}};
}

json shown(const Error &error, const std::string &update_id) {
    json out = {{"committed", false}, {"reason", error.reason}, {"message", error.what()}};
    if (error.exit == Exit::unknown_outcome)
        out["committed"] = nullptr;
    if (!error.member.empty())
        out["member"] = error.member;
    if (!update_id.empty())
        out["update_id"] = update_id;
    return out;
}

void print(const json &line) { // text of others may be no UTF-8
    std::cout << line.dump(-1, ' ', false, json::error_handler_t::replace) << std::endl;
    if (!std::cout) // the status still says what became of the publish
        std::cerr << "publish_checkpoint: the line of JSON could not be written to standard output" << std::endl;
}

// Whatever we open must not become a standard stream that the caller has closed; who reads our output, or limits files,
// does not end us in the middle of an update.
void keep_to_ourselves() {
    while (true) {
        const int fd = open("/dev/null", O_RDWR);
        if (fd < 0 || fd > 2) {
            if (fd > 2)
                close(fd);
            break;
        }
    }
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN);
}

int publish(const Options &options, std::string &update_id) {
    Stop stop;
    const Signals signals(stop);
    const Safetensors source(options.file);
    Publication publication(options, source, stop);
    try {
        print(shown(publication.run()));
        return static_cast<int>(Exit::ok);
    } catch (...) {
        update_id = publication.update_id();
        throw;
    }
}

int run(int argc, char **argv) {
    std::string update_id;
    try {
        const auto options = parse(argc, argv);
        if (options.help) {
            std::cout << kUsage;
            return 0;
        }
        return publish(options, update_id);
    } catch (const Error &e) {
        std::cerr << "publish_checkpoint: " << e.reason << ": " << e.what() << "\n";
        print(shown(e, update_id));
        return static_cast<int>(e.exit);
    } catch (const std::exception &e) {
        std::cerr << "publish_checkpoint: " << e.what() << "\n";
        print({{"committed", false}, {"reason", "INTERNAL"}, {"message", e.what()}});
        return static_cast<int>(Exit::unexpected);
    }
}

} // namespace

// gRPC is never shut down: that waits for threads of its own without end where one of them could not be had.
int main(int argc, char **argv) {
    keep_to_ourselves();
    Signals::block();
    grpc_init();
    const int status = run(argc, argv);
    std::cout.flush();
    std::cerr.flush();
    std::_Exit(status);
}
