#include "pull_listener.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <memory>
#include <poll.h>
#include <random>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "shm_segment.hpp"
#include "weightplane/pull.hpp"

namespace {

namespace v1 = weightplane::v1;

constexpr char kPrefix[] = "weightplane-pull-";
constexpr std::size_t kUnproven = 64;      // connections that have not shown a key yet; the oldest goes first
constexpr auto kProve = std::chrono::seconds(5); // until which a connection must have shown it
constexpr auto kLeave = std::chrono::seconds(1); // in which a last word can be read
constexpr std::size_t kOutbox = 64 << 20;  // bytes that may wait for a receiver that does not read
constexpr int kBeingMade = 60;             // seconds in which a name that begins with a dot is somebody's work

std::string random_bytes(std::size_t n) {
    std::random_device source;
    std::string out;
    while (out.size() < n)
        out += static_cast<char>(source());
    return out;
}

bool equal(const std::string &a, const std::string &b) { // in a time that does not tell where they differ
    unsigned char differ = a.size() == b.size() ? 0 : 1;
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
        differ = static_cast<unsigned char>(differ | (a[i] ^ b[i]));
    return differ == 0;
}

// An address of a socket, however deep its directory lies: a path in it has 108 bytes.
class At {
public:
    At(const std::string &directory, const std::string &name)
        : fd_(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
        address.sun_family = AF_UNIX;
        const auto path = "/proc/self/fd/" + std::to_string(fd_) + "/" + name;
        std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
    }
    ~At() {
        if (fd_ >= 0)
            ::close(fd_);
    }
    At(const At &) = delete;
    At &operator=(const At &) = delete;
    const sockaddr *get() const { return reinterpret_cast<const sockaddr *>(&address); }

    sockaddr_un address{};

private:
    const int fd_;
};

// Removes sockets whose listener died.
void sweep(const std::string &directory) {
    const std::unique_ptr<DIR, int (*)(DIR *)> listing(opendir(directory.c_str()), closedir);
    while (const dirent *entry = listing ? readdir(listing.get()) : nullptr) {
        const std::string name = entry->d_name;
        const bool dotted = name[0] == '.';
        if (name.compare(dotted ? 1 : 0, sizeof kPrefix - 1, kPrefix) != 0)
            continue;
        const auto path = directory + "/" + name;
        struct stat facts {};
        if (stat(path.c_str(), &facts) != 0 || (dotted && time(nullptr) - facts.st_mtime < kBeingMade))
            continue;
        const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        const At at(directory, name);
        if (connect(probe, at.get(), sizeof at.address) != 0 && errno == ECONNREFUSED)
            unlink(path.c_str());
        ::close(probe);
    }
}

} // namespace

PullListener::PullListener() : directory_(shm_directory()) {
    listen();
    woken_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    endpoint_.set_host_id(shm_host());
    thread_ = std::thread([this] { run(); });
}

// Complete and private before it has its name.
void PullListener::listen() {
    sweep(directory_);
    const auto name = kPrefix + std::to_string(getpid()) + "-" + weightplane::hex(random_bytes(8));
    const auto made = directory_ + "/." + name;
    path_ = directory_ + "/" + name;
    listening_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const At at(directory_, "." + name);
    if (listening_ < 0 || bind(listening_, at.get(), sizeof at.address) != 0 || chmod(made.c_str(), 0600) != 0 ||
        ::listen(listening_, 128) != 0 || rename(made.c_str(), path_.c_str()) != 0) {
        const std::string why = std::strerror(errno);
        unlink(made.c_str());
        ::close(listening_);
        throw Error(Exit::failed, "TRANSPORT", "cannot listen in " + directory_ + ": " + why + "; set WEIGHTPLANE_SHM_DIR");
    }
    endpoint_.set_socket(name);
}

PullListener::~PullListener() {
    {
        const std::lock_guard held(lock);
        over_ = true;
        wake();
    }
    thread_.join();
    unlink(path_.c_str());
    ::close(listening_);
    ::close(woken_);
}

void PullListener::wake() { eventfd_write(woken_, 1); }

void PullListener::post(PullLink &link, const v1::PullMessage &message) {
    if (!link.gone.empty() || link.leaving)
        return;
    const auto data = message.SerializeAsString();
    for (std::uint32_t n = static_cast<std::uint32_t>(data.size()), i = 0; i < 4; ++i, n >>= 8)
        link.out += static_cast<char>(n & 255);
    link.out += data;
    if (link.out.size() > kOutbox)
        end(link, "does not read: " + std::to_string(link.out.size()) + " bytes wait for it");
    wake();
}

void PullListener::remove(PullChannel &channel, const std::string &reason) {
    channels_.erase(std::remove(channels_.begin(), channels_.end(), &channel), channels_.end());
    for (auto &link : links_)
        if (link.channel == &channel) {
            v1::PullMessage bye;
            bye.mutable_bye()->set_reason(reason.substr(0, 1000));
            post(link, bye);
            link.channel = nullptr;
            link.leaving = true;
            link.prove_by = Clock::now() + kLeave;
            write(link); // now, while it can be: the program may be about to end
        }
    wake();
}

void PullListener::run() {
    std::vector<pollfd> waits;
    std::unique_lock held(lock);
    while (!over_) {
        waits = {{listening_, POLLIN, 0}, {woken_, POLLIN, 0}};
        Deadline next = Deadline::max();
        for (auto at = links_.begin(); at != links_.end();) {
            if (at->channel == nullptr && Clock::now() >= at->prove_by)
                end(*at, at->leaving ? "does not read what it is told last" : "showed no key in time");
            if (!at->gone.empty()) {
                ::close(at->fd);
                at = links_.erase(at);
                continue;
            }
            if (at->channel == nullptr)
                next = std::min(next, at->prove_by);
            const auto events = POLLIN | (at->out.empty() ? 0 : POLLOUT);
            waits.push_back({at->fd, static_cast<short>(events), 0});
            ++at;
        }
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(next - Clock::now()).count() + 1;
        held.unlock();
        poll(waits.data(), waits.size(), next == Deadline::max() ? -1 : static_cast<int>(std::max<long>(left, 0)));
        held.lock();
        eventfd_t seen = 0;
        eventfd_read(woken_, &seen);
        for (const auto &w : waits) // descriptors are closed by this thread alone: none has become another's
            for (auto &link : links_)
                if (link.fd == w.fd && link.gone.empty()) {
                    if (w.revents & (POLLIN | POLLHUP | POLLERR))
                        read(link);
                    write(link);
                }
        if (waits[0].revents & POLLIN)
            accept();
    }
    for (auto &link : links_)
        ::close(link.fd);
}

void PullListener::accept() {
    const int fd = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return; // it left again
    auto &link = links_.emplace_back();
    link.fd = fd;
    link.prove_by = Clock::now() + kProve;
    const auto unproven = [](const PullLink &l) { return l.channel == nullptr && l.gone.empty(); };
    if (static_cast<std::size_t>(std::count_if(links_.begin(), links_.end(), unproven)) > kUnproven)
        end(*std::find_if(links_.begin(), links_.end(), unproven), "too many connections show no key");
}

void PullListener::read(PullLink &link) {
    char data[64 << 10];
    const auto n = recv(link.fd, data, sizeof data, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        end(link, n == 0 ? "closed the connection, or died" : std::string("is gone (") + std::strerror(errno) + ")");
        return;
    }
    if (link.leaving)
        return; // what it says no longer matters
    link.in.append(data, static_cast<std::size_t>(n));
    frames(link);
}

void PullListener::frames(PullLink &link) {
    std::size_t at = 0;
    while (link.gone.empty() && link.in.size() - at >= 4) {
        std::size_t size = 0;
        for (std::size_t i = 0; i < 4; ++i)
            size |= std::size_t{static_cast<unsigned char>(link.in[at + i])} << (8 * i);
        if (size > (link.channel ? weightplane::kPullFrame : weightplane::kPullFirstFrame)) {
            end(link, "sent what it must not: a message of " + std::to_string(size) + " bytes");
            return;
        }
        if (link.in.size() - at - 4 < size)
            break;
        v1::PullMessage message;
        if (!message.ParseFromArray(link.in.data() + at + 4, static_cast<int>(size))) {
            end(link, "sent what is no message");
            return;
        }
        at += 4 + size;
        if (link.channel)
            link.channel->said(link, message);
        else
            handshake(link, message);
        changed.notify_all();
    }
    link.in.erase(0, at);
}

void PullListener::handshake(PullLink &link, const v1::PullMessage &message) {
    if (message.has_hello() && !link.hello) {
        link.hello = message.hello();
        const auto &hello = *link.hello;
        const auto *channel = find(hello);
        if (hello.protocol() != weightplane::kPullProtocol || hello.nonce().size() != 32)
            return refuse(link, "protocol " + std::to_string(hello.protocol()) + " is not ours (1)", false);
        if (channel == nullptr)
            return refuse(link, "no such channel is open here", true);
        link.nonce = random_bytes(32);
        v1::PullMessage answer;
        answer.mutable_challenge()->set_nonce(link.nonce);
        answer.mutable_challenge()->set_proof(weightplane::pull_proof(channel->key(), "sender", hello.channel_id(),
                                                                      hello.sender(), hello.receiver(), hello.nonce(),
                                                                      link.nonce));
        post(link, answer);
    } else if (message.has_proof() && link.hello) {
        const auto &hello = *link.hello;
        auto *channel = find(hello);
        if (channel == nullptr)
            return refuse(link, "no such channel is open here", true);
        const auto wanted = weightplane::pull_proof(channel->key(), "receiver", hello.channel_id(), hello.sender(),
                                                    hello.receiver(), hello.nonce(), link.nonce);
        if (link.nonce.empty() || !equal(wanted, message.proof().proof()))
            return refuse(link, "the channel's key was not shown", false);
        link.channel = channel;
        channel->admit(link);
        v1::PullMessage answer;
        *answer.mutable_welcome() = channel->welcome();
        post(link, answer);
    } else {
        end(link, "spoke before it had shown the key");
    }
}

PullChannel *PullListener::find(const v1::PullHello &hello) const {
    for (auto *channel : channels_)
        if (channel->is(hello))
            return channel;
    return nullptr;
}

void PullListener::refuse(PullLink &link, const std::string &reason, bool retry) {
    v1::PullMessage answer;
    answer.mutable_refused()->set_reason(reason);
    answer.mutable_refused()->set_retry(retry);
    post(link, answer);
    link.leaving = true;
    link.prove_by = Clock::now() + kLeave;
}

void PullListener::write(PullLink &link) {
    while (link.gone.empty() && !link.out.empty()) {
        const auto n = send(link.fd, link.out.data(), link.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            if (errno != EAGAIN && errno != EINTR)
                end(link, std::string("is gone (") + std::strerror(errno) + ")");
            return;
        }
        link.out.erase(0, static_cast<std::size_t>(n));
    }
    if (link.leaving && link.gone.empty())
        end(link, "was told to leave");
}

void PullListener::end(PullLink &link, const std::string &why) {
    if (!link.gone.empty())
        return;
    link.gone = why;
    shutdown(link.fd, SHUT_RDWR);
    if (auto *channel = link.channel) {
        link.channel = nullptr;
        channel->ended(link);
    }
    changed.notify_all();
    wake(); // it is taken off the list
}
