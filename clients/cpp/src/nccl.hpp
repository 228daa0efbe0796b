// The few calls of NCCL that a sender makes, found in libnccl.so.2 when they are first wanted. Communicators are
// nonblocking: no call waits for a peer, so each can be given up at any time. As in nccl.h of 2.28; the same from 2.18 on.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cuda.hpp"
#include "library.hpp"

class Nccl {
public:
    Nccl();

    int version() const; // 22809 = 2.28.9
    std::string mint() const; // a unique id: 128 bytes, for one communicator

    struct Piece {
        Cuda::Address at;
        std::uint64_t nbytes;
        int peer; // not of a broadcast
    };

    // Rank 0 of one communicator. Calls queue work on its stream; `check` is called while the library is busy with one,
    // and may throw. Its own failures are Errors with reason TRANSPORT.
    class Communicator {
    public:
        Communicator(const Nccl &nccl, const std::string &unique_id, int ranks, Cuda::Stream stream,
                     std::function<void()> check);
        ~Communicator(); // ends what is queued or runs
        Communicator(const Communicator &) = delete;
        Communicator &operator=(const Communicator &) = delete;

        void broadcast(const std::vector<Piece> &pieces);
        void exchange(const std::vector<Piece> &sends, const std::vector<Piece> &receives);
        void reduce(Cuda::Address byte);
        // What the library noticed meanwhile, or nothing.
        std::string problem() const;

    private:
        template <class F> void group(F &&calls);
        void settle();
        int state() const;

        const Nccl &nccl_;
        const Cuda::Stream stream_;
        const std::function<void()> check_;
        void *made_ = nullptr;
    };

private:
    struct Id {
        char bytes[128];
    };
    // The head of ncclConfig_t. The library takes the rest, of which a version before 2.17 knows nothing, as it likes.
    struct Config {
        std::size_t size;
        unsigned magic, version;
        int blocking;
    };

    void check(const char *call, int code, void *communicator) const;

    Library library_;
    int (*ncclGetVersion_)(int *) = nullptr;
    int (*ncclGetUniqueId_)(Id *) = nullptr;
    int (*ncclCommInitRankConfig_)(void **, int, Id, int, Config *) = nullptr;
    int (*ncclCommGetAsyncError_)(void *, int *) = nullptr;
    int (*ncclCommAbort_)(void *) = nullptr;
    const char *(*ncclGetErrorString_)(int) = nullptr;
    const char *(*ncclGetLastError_)(void *) = nullptr;
    int (*ncclGroupStart_)() = nullptr;
    int (*ncclGroupEnd_)() = nullptr;
    int (*ncclBroadcast_)(const void *, void *, std::size_t, int, int, void *, Cuda::Stream) = nullptr;
    int (*ncclReduce_)(const void *, void *, std::size_t, int, int, int, void *, Cuda::Stream) = nullptr;
    int (*ncclSend_)(const void *, std::size_t, int, int, void *, Cuda::Stream) = nullptr;
    int (*ncclRecv_)(void *, std::size_t, int, int, void *, Cuda::Stream) = nullptr;
};
