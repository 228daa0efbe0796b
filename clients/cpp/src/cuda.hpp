// The few calls of the CUDA driver that this program makes, found in libcuda.so.1 when a GPU is first wanted: nothing of
// CUDA is needed to build it. Declared as in CUDA 13.0's cuda.h; the same in 12.
#pragma once

#include <cstdint>
#include <string>

#include "library.hpp"

// One GPU, current in whichever thread calls. Every failure is an Error with reason TRANSPORT that names the call.
class Cuda {
public:
    using Address = unsigned long long; // CUdeviceptr
    using Stream = void *;
    using Event = void *;

    // `device`: as CUDA_VISIBLE_DEVICES numbers them.
    explicit Cuda(int device);

    const std::string &uuid() const { return uuid_; }
    void make_current() const;

    Address allocate(std::uint64_t nbytes) const;
    void release(Address at) const noexcept;
    // From host memory, queued; `wait` before the host's bytes change.
    void to_device(Address to, const void *from, std::uint64_t nbytes, Stream stream) const;
    void inside(Address to, Address from, std::uint64_t nbytes, Stream stream) const;
    // 64 bytes by which another process maps an allocation, from its first byte.
    std::string handle_of(Address base) const;

    Stream new_stream() const;
    void drop_stream(Stream stream) const noexcept;
    Event new_event() const;
    void drop_event(Event event) const noexcept;
    void record(Event event, Stream stream) const;
    void wait(Stream stream, Event event) const; // what is queued from now on runs after the event
    bool passed(Event event) const;
    void synchronize(Stream stream) const;

private:
    struct Handle {
        char bytes[64];
    };

    void check(const char *call, int code) const;

    Library library_;
    int device_ = 0;
    void *context_ = nullptr;
    std::string uuid_;
    int (*cuGetErrorName_)(int, const char **) = nullptr;
    int (*cuGetErrorString_)(int, const char **) = nullptr;
    int (*cuCtxSetCurrent_)(void *) = nullptr;
    int (*cuMemAlloc_)(Address *, std::size_t) = nullptr;
    int (*cuMemFree_)(Address) = nullptr;
    int (*cuMemcpyHtoDAsync_)(Address, const void *, std::size_t, Stream) = nullptr;
    int (*cuMemcpyDtoDAsync_)(Address, Address, std::size_t, Stream) = nullptr;
    int (*cuIpcGetMemHandle_)(Handle *, Address) = nullptr;
    int (*cuStreamCreate_)(Stream *, unsigned) = nullptr;
    int (*cuStreamDestroy_)(Stream) = nullptr;
    int (*cuStreamSynchronize_)(Stream) = nullptr;
    int (*cuStreamWaitEvent_)(Stream, Event, unsigned) = nullptr;
    int (*cuEventCreate_)(Event *, unsigned) = nullptr;
    int (*cuEventDestroy_)(Event) = nullptr;
    int (*cuEventRecord_)(Event, Stream) = nullptr;
    int (*cuEventQuery_)(Event) = nullptr;
};
