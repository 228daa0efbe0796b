#include "nccl.hpp"

#include <cstring>
#include <thread>

#include "errors.hpp"

namespace {

constexpr int kInProgress = 7, kUint8 = 1, kSum = 0; // ncclInProgress, ncclUint8, ncclSum
constexpr unsigned kMagic = 0xcafebeef, kConfigVersion = 21400;
constexpr int kSpins = 200; // looks without a pause: a queued operation is there within some tens of microseconds
constexpr auto kPause = std::chrono::microseconds(500);
const char kAdvice[] = "NCCL 2.18 or newer is needed, the version that the replicas' torch uses: put the folder of its "
                       "nvidia/nccl/lib into LD_LIBRARY_PATH; use shm or grpc without it";

void *pointer(Cuda::Address at) { return reinterpret_cast<void *>(at); }

} // namespace

Nccl::Nccl() : library_({"libnccl.so.2"}, kAdvice) {
    library_.find("ncclGetVersion", ncclGetVersion_);
    library_.find("ncclGetUniqueId", ncclGetUniqueId_);
    library_.find("ncclCommInitRankConfig", ncclCommInitRankConfig_);
    library_.find("ncclCommGetAsyncError", ncclCommGetAsyncError_);
    library_.find("ncclCommAbort", ncclCommAbort_);
    library_.find("ncclGetErrorString", ncclGetErrorString_);
    library_.find("ncclGetLastError", ncclGetLastError_);
    library_.find("ncclGroupStart", ncclGroupStart_);
    library_.find("ncclGroupEnd", ncclGroupEnd_);
    library_.find("ncclBroadcast", ncclBroadcast_);
    library_.find("ncclReduce", ncclReduce_);
    library_.find("ncclSend", ncclSend_);
    library_.find("ncclRecv", ncclRecv_);
}

void Nccl::check(const char *call, int code, void *communicator) const {
    if (code == 0 || code == kInProgress)
        return;
    const char *more = ncclGetLastError_(communicator);
    throw Error(Exit::failed, "TRANSPORT",
                std::string(call) + " failed: " + ncclGetErrorString_(code) +
                    (more != nullptr && *more != '\0' ? " (" + std::string(more).substr(0, 300) + ")" : ""));
}

int Nccl::version() const {
    int out = 0;
    check("ncclGetVersion", ncclGetVersion_(&out), nullptr);
    return out;
}

std::string Nccl::mint() const {
    Id out{};
    check("ncclGetUniqueId (it needs a network interface, see NCCL_SOCKET_IFNAME)", ncclGetUniqueId_(&out), nullptr);
    return {out.bytes, sizeof out.bytes};
}

Nccl::Communicator::Communicator(const Nccl &nccl, const std::string &unique_id, int ranks, Cuda::Stream stream,
                                 std::function<void()> check)
    : nccl_(nccl), stream_(stream), check_(std::move(check)) {
    Id id{};
    std::memcpy(id.bytes, unique_id.data(), std::min(unique_id.size(), sizeof id.bytes));
    Config config{sizeof config, kMagic, kConfigVersion, 0};
    nccl_.check("ncclCommInitRankConfig", nccl_.ncclCommInitRankConfig_(&made_, ranks, id, 0, &config), nullptr);
    try {
        settle();
    } catch (...) {
        nccl_.ncclCommAbort_(made_);
        throw;
    }
}

Nccl::Communicator::~Communicator() { nccl_.ncclCommAbort_(made_); }

int Nccl::Communicator::state() const {
    int out = 0;
    nccl_.check("ncclCommGetAsyncError", nccl_.ncclCommGetAsyncError_(made_, &out), made_);
    return out;
}

// Returns when the library is done with the last call (not: with what it queued).
void Nccl::Communicator::settle() {
    for (int n = 0;; ++n) {
        const int now = state();
        nccl_.check("NCCL's communicator", now, made_);
        if (now != kInProgress)
            return;
        if (n >= kSpins) {
            check_();
            std::this_thread::sleep_for(kPause); // it tells nobody: it has to be asked
        }
    }
}

std::string Nccl::Communicator::problem() const {
    try {
        nccl_.check("NCCL's communicator", state(), made_);
        return "";
    } catch (const Error &e) {
        return e.what();
    }
}

// Calls inside are begun together at the end.
template <class F> void Nccl::Communicator::group(F &&calls) {
    nccl_.check("ncclGroupStart", nccl_.ncclGroupStart_(), made_);
    try {
        calls();
    } catch (...) {
        nccl_.ncclGroupEnd_();
        throw;
    }
    nccl_.check("ncclGroupEnd", nccl_.ncclGroupEnd_(), made_);
    settle();
}

void Nccl::Communicator::broadcast(const std::vector<Piece> &pieces) {
    group([&] {
        for (const auto &p : pieces)
            nccl_.check("ncclBroadcast",
                        nccl_.ncclBroadcast_(pointer(p.at), pointer(p.at), p.nbytes, kUint8, 0, made_, stream_), made_);
    });
}

void Nccl::Communicator::exchange(const std::vector<Piece> &sends, const std::vector<Piece> &receives) {
    group([&] {
        for (const auto &p : sends)
            nccl_.check("ncclSend", nccl_.ncclSend_(pointer(p.at), p.nbytes, kUint8, p.peer, made_, stream_), made_);
        for (const auto &p : receives)
            nccl_.check("ncclRecv", nccl_.ncclRecv_(pointer(p.at), p.nbytes, kUint8, p.peer, made_, stream_), made_);
    });
}

void Nccl::Communicator::reduce(Cuda::Address byte) {
    group([&] {
        nccl_.check("ncclReduce",
                    nccl_.ncclReduce_(pointer(byte), pointer(byte), 1, kUint8, kSum, 0, made_, stream_), made_);
    });
}
