// The sender's end of control connections: one unix socket and one thread for all channels of a transport that pulls
// (transports/weightplane/transports/pull_control.py). No peer is waited for, and a stranger can make us hold little.
#pragma once

#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "stop.hpp"
#include "weightplane/v1/transport.pb.h"

class PullChannel;

// A connection to one receiver. All of it under the listener's lock.
struct PullLink {
    int fd = -1;
    std::string in, out;
    std::optional<weightplane::v1::PullHello> hello;
    std::string nonce;              // ours
    PullChannel *channel = nullptr; // once the key was shown
    Deadline prove_by{}; // or leave by
    std::optional<weightplane::v1::PullArmed> armed;
    bool leaving = false; // what waits is written, then it ends
    std::string gone;     // why it is over
};

// What a listener serves: one channel and its sender. The listener's thread calls, under its lock.
class PullChannel {
public:
    virtual ~PullChannel() = default;
    virtual const std::string &key() const = 0;
    virtual bool is(const weightplane::v1::PullHello &hello) const = 0;
    virtual weightplane::v1::PullWelcome welcome() const = 0;
    virtual void admit(PullLink &link) = 0;
    virtual void said(PullLink &link, const weightplane::v1::PullMessage &message) = 0;
    virtual void ended(PullLink &link) = 0;
};

class PullListener {
public:
    // Listens from here on. Throws Error with reason TRANSPORT.
    PullListener();
    ~PullListener();
    PullListener(const PullListener &) = delete;
    PullListener &operator=(const PullListener &) = delete;

    const weightplane::v1::PullEndpoint &endpoint() const { return endpoint_; }

    std::mutex lock;
    std::condition_variable changed; // after every message, and every end

    // With the lock held.
    void add(PullChannel &channel) { channels_.push_back(&channel); }
    void post(PullLink &link, const weightplane::v1::PullMessage &message);
    // Tells its receivers why this side leaves, and forgets it.
    void remove(PullChannel &channel, const std::string &reason);

private:
    void listen();
    void run();
    void accept();
    void read(PullLink &link);
    void write(PullLink &link);
    void frames(PullLink &link);
    void handshake(PullLink &link, const weightplane::v1::PullMessage &message);
    void refuse(PullLink &link, const std::string &reason, bool retry);
    void end(PullLink &link, const std::string &why);
    PullChannel *find(const weightplane::v1::PullHello &hello) const;
    void wake();

    std::string directory_, path_;
    weightplane::v1::PullEndpoint endpoint_;
    std::vector<PullChannel *> channels_;
    std::list<PullLink> links_;
    bool over_ = false;
    int listening_ = -1, woken_ = -1;
    std::thread thread_;
};
