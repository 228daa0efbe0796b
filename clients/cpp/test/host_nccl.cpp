// A collective library over TCP, as libnccl.so.2: rank 0 of one that tests/transports/collective_tcp.py speaks with. Like
// NCCL it connects only when everybody has come, and waits for a dead peer until it is aborted. It knows no GPU.
#include <arpa/inet.h>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <poll.h>
#include <random>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

constexpr int kInProgress = 7, kLookMs = 5;

struct Id {
    char bytes[128];
};

struct __attribute__((packed)) Hello {
    std::int32_t rank;
    std::uint16_t port; // of its own listener
    std::int64_t purpose;
};

std::mutex lock;
std::map<std::string, int> listeners; // by unique id

struct Communicator {
    int ranks = 0, listener = -1;
    std::string id;
    std::map<int, int> peers; // sockets, by rank
    std::atomic<bool> busy{true}, aborted{false};
    std::vector<std::function<bool(Communicator &)>> calls; // of the open group
    std::thread thread;

    bool ready(int fd) { // to be read, or closed
        pollfd wait{fd, POLLIN, 0};
        while (!aborted)
            if (poll(&wait, 1, kLookMs) > 0)
                return true;
        return false;
    }

    bool read(int fd, void *to, std::size_t n) {
        for (auto *at = static_cast<char *>(to); n > 0;) {
            const auto got = ready(fd) ? recv(fd, at, n, 0) : -1;
            if (got <= 0)
                return false;
            at += got;
            n -= static_cast<std::size_t>(got);
        }
        return true;
    }

    bool write(int fd, const void *from, std::size_t n) {
        for (auto *at = static_cast<const char *>(from); n > 0;) {
            const auto put = send(fd, at, n, MSG_NOSIGNAL); // an abort shuts the socket down
            if (put <= 0)
                return false;
            at += put;
            n -= static_cast<std::size_t>(put);
        }
        return true;
    }

    bool connect() {
        std::vector<std::uint16_t> ports(static_cast<std::size_t>(ranks));
        std::memcpy(ports.data(), id.data(), 2);
        std::map<int, int> came;
        for (auto *found : {&came, &peers}) {
            while (static_cast<int>(found->size()) < ranks - 1) {
                Hello said{};
                const int fd = ready(listener) ? accept(listener, nullptr, nullptr) : -1;
                if (fd < 0 || !read(fd, &said, sizeof said))
                    return false;
                (*found)[said.rank] = fd;
                if (found == &came)
                    ports[static_cast<std::size_t>(said.rank)] = said.port;
            }
            if (found == &came)
                for (const auto &[rank, fd] : came)
                    if (!write(fd, ports.data(), 2 * ports.size()))
                        return false;
        }
        for (const auto &[rank, fd] : came)
            close(fd);
        return true;
    }

    // Busy until it has succeeded: what fails waits, as NCCL does.
    void run(std::function<bool()> work) {
        if (thread.joinable())
            thread.join();
        busy = true;
        thread = std::thread([this, work = std::move(work)] {
            if (work())
                busy = false;
        });
    }
};

thread_local Communicator *open_group = nullptr;

int queue(void *made, std::function<bool(Communicator &)> call) {
    open_group = static_cast<Communicator *>(made);
    open_group->calls.push_back(std::move(call));
    return 0;
}

} // namespace

extern "C" {

int ncclGetVersion(int *out) {
    *out = 22809;
    return 0;
}

const char *ncclGetErrorString(int) { return "an error, as the test has it"; }
const char *ncclGetLastError(void *) { return ""; }

int ncclGetUniqueId(Id *out) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    if (bind(fd, reinterpret_cast<sockaddr *>(&at), size) != 0 || listen(fd, 64) != 0 ||
        getsockname(fd, reinterpret_cast<sockaddr *>(&at), &size) != 0)
        return 2;
    std::random_device random;
    for (auto &byte : out->bytes)
        byte = static_cast<char>(random());
    const std::uint16_t port = ntohs(at.sin_port);
    std::memcpy(out->bytes, &port, sizeof port);
    const std::lock_guard held(lock);
    listeners[{out->bytes, sizeof out->bytes}] = fd;
    return 0;
}

int ncclCommInitRankConfig(void **out, int ranks, Id id, int, void *) {
    auto *made = new Communicator;
    made->ranks = ranks;
    made->id.assign(id.bytes, sizeof id.bytes);
    {
        const std::lock_guard held(lock);
        made->listener = listeners.at(made->id);
        listeners.erase(made->id);
    }
    made->run([made] { return made->connect(); });
    *out = made;
    return kInProgress;
}

int ncclCommGetAsyncError(void *made, int *out) {
    *out = static_cast<Communicator *>(made)->busy ? kInProgress : 0;
    return 0;
}

int ncclCommAbort(void *made) {
    auto *c = static_cast<Communicator *>(made);
    c->aborted = true;
    for (const auto &[rank, fd] : c->peers)
        shutdown(fd, SHUT_RDWR);
    c->thread.join();
    for (const auto &[rank, fd] : c->peers)
        close(fd);
    close(c->listener);
    delete c;
    return 0;
}

int ncclGroupStart() { return 0; }

int ncclGroupEnd() {
    auto *c = open_group;
    if (c == nullptr)
        return 0;
    open_group = nullptr;
    c->run([c, calls = std::move(c->calls)] {
        for (const auto &call : calls)
            if (!call(*c))
                return false;
        return true;
    });
    c->calls.clear();
    return kInProgress;
}

int ncclBroadcast(const void *from, void *, std::size_t n, int, int, void *made, void *) {
    return queue(made, [=](Communicator &c) {
        for (const auto &[rank, fd] : c.peers)
            if (!c.write(fd, from, n))
                return false;
        return true;
    });
}

int ncclReduce(const void *, void *, std::size_t, int, int, int, void *made, void *) {
    return queue(made, [](Communicator &c) {
        for (const auto &[rank, fd] : c.peers)
            if (char byte = 0; !c.read(fd, &byte, 1))
                return false;
        return true;
    });
}

int ncclSend(const void *from, std::size_t n, int, int peer, void *made, void *) {
    return queue(made, [=](Communicator &c) { return c.write(c.peers.at(peer), from, n); });
}

int ncclRecv(void *to, std::size_t n, int, int peer, void *made, void *) {
    return queue(made, [=](Communicator &c) { return c.read(c.peers.at(peer), to, n); });
}

} // extern "C"
