#include "options.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>

#include "errors.hpp"

const char kUsage[] = R"(publish_checkpoint --group NAME --file MODEL.safetensors [options]

Puts a checkpoint on every replica of a group that may take part, or on none. Ctrl-C aborts cleanly.

  --group NAME           the group (or WEIGHTPLANE_GROUP)
  --address HOST:PORT    the control plane (or WEIGHTPLANE_ADDRESS; default 127.0.0.1:7450)
  --transport NAME       auto (default): the best for each replica, of shm (replicas of this host and user) and grpc;
                         shm or grpc: this one for all; from a GPU's memory, into which the file is copied first:
                         cuda_ipc (replicas of this host, on the same GPU or its peers), nccl (on GPUs of their own)
  --device N             the GPU, as CUDA_VISIBLE_DEVICES numbers them (default 0)
  --step N               the trainer's own number of this checkpoint (default 0)
  --replicas N           wait until this many may take part (default 1); later ones join the next
  --takeover             fence a trainer that still holds the group
  --timeout SECONDS      for the whole update (default 120)
  --wait SECONDS         for the replicas, for a dead trainer's hold to end, for a control plane that stands by to lead
                         (default 30)
  --trainer-id NAME      who holds the group, for people (default publish_checkpoint)
  --tls-ca FILE          speak TLS, and trust this authority (or WEIGHTPLANE_CA)
  --tls-cert FILE        the certificate that is shown (or WEIGHTPLANE_CERT), and
  --tls-key FILE         its key (or WEIGHTPLANE_KEY)
  --token TOKEN          bearer token (or WEIGHTPLANE_TOKEN, which no list of processes shows)

Prints one line of JSON. Exit status: 0 committed, 2 usage or file, 3 unreachable, 4 refused, 5 aborted or fenced,
6 outcome unknown, 7 not found, 8 denied, 130 interrupted.
)";

namespace {

[[noreturn]] void refuse(const std::string &text) { throw Error(Exit::usage, "INVALID_ARGUMENT", text); }

double seconds(const std::string &name, const std::string &text, double least) {
    char *end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (end == text.c_str() || *end != '\0' || !std::isfinite(value) || value < least || value > 1e6)
        refuse(name + ": expected seconds from " + std::string(least > 0 ? "1" : "0") + " to 1000000, found '" + text + "'");
    return value;
}

std::int64_t whole(const std::string &name, const std::string &text) {
    try {
        std::size_t used = 0;
        const std::int64_t value = std::stoll(text, &used);
        if (used == text.size() && value >= 0)
            return value;
    } catch (const std::logic_error &) { // no number, or too large a one: said below
    }
    refuse(name + ": expected a whole number from 0, found '" + text + "'");
}

std::string environment(const char *name) {
    const char *value = std::getenv(name);
    return value == nullptr ? "" : value;
}

std::string content(const std::string &path) {
    if (path.empty())
        return "";
    std::ifstream file(path, std::ios::binary);
    std::ostringstream out;
    if (!file || !(out << file.rdbuf()))
        refuse(path + ": " + std::strerror(errno) + "; --tls-ca, --tls-cert and --tls-key name PEM files");
    if (out.str().find("-----BEGIN ") == std::string::npos) // gRPC would say that nobody can be reached
        refuse(path + ": expected PEM, with -----BEGIN in it, found none; --tls-ca, --tls-cert and --tls-key name PEM files");
    return out.str();
}

// `paths`: as in Identity. Half a pair would be a server's puzzle, and a certificate is shown over TLS alone.
Identity identity(const Identity &paths) {
    if (paths.cert.empty() != paths.key.empty())
        refuse("a certificate and its key come together: --tls-cert and --tls-key");
    if (!paths.cert.empty() && paths.ca.empty())
        refuse("--tls-cert and --tls-key are shown over TLS, which --tls-ca turns on");
    return {content(paths.ca), content(paths.cert), content(paths.key), paths.token};
}

// gRPC would take a missing port for another one, and one that is too large modulo 65536.
void check_address(const std::string &address) {
    if (address.rfind("unix:", 0) == 0)
        return;
    const auto colon = address.rfind(':');
    const auto port = colon == std::string::npos ? "" : address.substr(colon + 1);
    const bool digits = !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == std::string::npos;
    const auto host = address.substr(0, colon == std::string::npos ? 0 : colon);
    const bool scheme = address.find('/') != std::string::npos || address.rfind("dns:", 0) == 0;
    const bool bare = host.find(':') != std::string::npos && (host.front() != '[' || host.back() != ']'); // IPv6
    if (!digits || scheme || bare || host.empty() || std::stoi(port) < 1 || std::stoi(port) > 65535)
        refuse("--address: expected host:port with a port from 1 to 65535, found '" + address + "'" +
               (bare && !scheme ? "; an IPv6 address stands in brackets: [::1]:7450" : ""));
}

using Setter = std::function<void(const std::string &)>;

// What each option that has a value does with it.
std::map<std::string, Setter> setters(Options &o, Identity &paths) {
    const auto text = [](std::string &to) { return [&to](const std::string &value) { to = value; }; };
    return {
        {"--address", text(o.address)},
        {"--group", text(o.group)},
        {"--file", text(o.file)},
        {"--transport", text(o.transport)},
        {"--trainer-id", text(o.trainer_id)},
        {"--tls-ca", text(paths.ca)},
        {"--tls-cert", text(paths.cert)},
        {"--tls-key", text(paths.key)},
        {"--token", text(paths.token)},
        {"--device",
         [&o](const auto &v) { o.device = static_cast<int>(std::min<std::int64_t>(whole("--device", v), 1'000'000)); }},
        {"--step", [&o](const auto &v) { o.step = whole("--step", v); }},
        {"--replicas",
         [&o](const auto &v) {
             o.replicas = whole("--replicas", v);
             if (o.replicas == 0)
                 refuse("--replicas: expected a whole number from 1, found '0'");
         }},
        {"--timeout", [&o](const auto &v) { o.timeout = seconds("--timeout", v, 1); }},
        {"--wait", [&o](const auto &v) { o.wait = seconds("--wait", v, 0); }},
    };
}

} // namespace

Options parse(int argc, char **argv) {
    Options o;
    o.group = environment("WEIGHTPLANE_GROUP");
    if (const auto address = environment("WEIGHTPLANE_ADDRESS"); !address.empty())
        o.address = address;
    Identity paths{environment("WEIGHTPLANE_CA"), environment("WEIGHTPLANE_CERT"), environment("WEIGHTPLANE_KEY"),
                   environment("WEIGHTPLANE_TOKEN")};
    const auto known = setters(o, paths);
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--help" || name == "-h") {
            o.help = true;
            return o;
        }
        if (name == "--takeover") {
            o.takeover = true;
            continue;
        }
        const auto setter = known.find(name);
        if (setter == known.end())
            refuse("what is '" + name + "'? See --help");
        if (i + 1 == argc)
            refuse(name + " needs a value");
        setter->second(argv[++i]);
    }
    if (o.group.empty() || o.file.empty())
        refuse("--group and --file are needed; see --help");
    check_address(o.address);
    o.identity = identity(paths);
    for (const char *transport : {"auto", "shm", "grpc", "cuda_ipc", "nccl"})
        if (o.transport == transport)
            return o;
    refuse("--transport '" + o.transport + "': this program has auto, shm, grpc, cuda_ipc and nccl");
}
