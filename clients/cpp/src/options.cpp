#include "options.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "errors.hpp"

const char kUsage[] = R"(publish_checkpoint --group NAME --file MODEL.safetensors [options]

Puts a checkpoint on every replica of a group that may take part, or on none. Ctrl-C aborts cleanly.

  --address HOST:PORT    the control plane (default 127.0.0.1:7450)
  --transport NAME       auto (default): the best for each replica, of shm (replicas of this host and user) and grpc;
                         shm or grpc: this one for all; from a GPU's memory, into which the file is copied first:
                         cuda_ipc (replicas of this host, on the same GPU or its peers), nccl (on GPUs of their own)
  --device N             the GPU, as CUDA_VISIBLE_DEVICES numbers them (default 0)
  --step N               the trainer's own number of this checkpoint (default 0)
  --takeover             fence a trainer that still holds the group
  --timeout SECONDS      for the whole update (default 120)
  --wait SECONDS         for a replica that may take part (default 30)
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
        refuse(name + ": expected seconds, found '" + text + "'");
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

} // namespace

Options parse(int argc, char **argv) {
    Options o;
    Identity paths{environment("WEIGHTPLANE_CA"), environment("WEIGHTPLANE_CERT"), environment("WEIGHTPLANE_KEY"),
                   environment("WEIGHTPLANE_TOKEN")};
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
        if (i + 1 == argc)
            refuse(name.rfind("--", 0) == 0 ? name + " needs a value" : "what is '" + name + "'? See --help");
        const std::string value = argv[++i];
        if (name == "--address")
            o.address = value;
        else if (name == "--group")
            o.group = value;
        else if (name == "--file")
            o.file = value;
        else if (name == "--transport")
            o.transport = value;
        else if (name == "--trainer-id")
            o.trainer_id = value;
        else if (name == "--device")
            o.device = static_cast<int>(std::min<std::int64_t>(whole(name, value), 1'000'000));
        else if (name == "--tls-ca")
            paths.ca = value;
        else if (name == "--tls-cert")
            paths.cert = value;
        else if (name == "--tls-key")
            paths.key = value;
        else if (name == "--token")
            paths.token = value;
        else if (name == "--step")
            o.step = whole(name, value);
        else if (name == "--timeout")
            o.timeout = seconds(name, value, 1);
        else if (name == "--wait")
            o.wait = seconds(name, value, 0);
        else
            refuse("what is '" + name + "'? See --help");
    }
    if (o.group.empty() || o.file.empty())
        refuse("--group and --file are needed; see --help");
    o.identity = identity(paths);
    for (const char *known : {"auto", "shm", "grpc", "cuda_ipc", "nccl"})
        if (o.transport == known)
            return o;
    refuse("--transport '" + o.transport + "': this program has auto, shm, grpc, cuda_ipc and nccl");
}
