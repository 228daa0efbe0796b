// A card played by the host, as libcuda.so.1: enough of the driver for this client. Device memory is the process's own,
// and a handle is what tests/transports/host_card.py reads it by: process, address, serial. What only a card can show is
// not shown: rates, and what becomes of mappings when their exporter dies.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

extern "C" {

using Address = unsigned long long;

int cuInit(unsigned) { return 0; }

int cuGetErrorName(int code, const char **out) {
    *out = code == 101 ? "CUDA_ERROR_INVALID_DEVICE" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
    return 0;
}

int cuGetErrorString(int, const char **out) {
    *out = "as the test has it";
    return 0;
}

int cuDeviceGet(int *out, int device) {
    *out = device;
    return device == 0 ? 0 : 101;
}

int cuDeviceGetUuid_v2(void *out, int) {
    for (int i = 0; i < 16; ++i)
        static_cast<unsigned char *>(out)[i] = static_cast<unsigned char>(16 * i + i);
    return 0;
}

int cuDevicePrimaryCtxRetain(void **out, int) {
    static int context;
    *out = &context;
    return 0;
}

int cuCtxSetCurrent(void *) { return 0; }

int cuMemAlloc_v2(Address *out, std::size_t nbytes) {
    const char *full = std::getenv("HOST_CARD_BYTES");
    if (full != nullptr && nbytes > std::strtoull(full, nullptr, 10))
        return 2;
    *out = reinterpret_cast<Address>(std::aligned_alloc(256, (nbytes + 255) / 256 * 256));
    return 0;
}

int cuMemFree_v2(Address at) {
    std::free(reinterpret_cast<void *>(at));
    return 0;
}

int cuMemcpyHtoDAsync_v2(Address to, const void *from, std::size_t nbytes, void *) {
    std::memcpy(reinterpret_cast<void *>(to), from, nbytes);
    return 0;
}

int cuMemcpyDtoDAsync_v2(Address to, Address from, std::size_t nbytes, void *) {
    std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), nbytes);
    return 0;
}

int cuIpcGetMemHandle(void *out, Address base) {
    const std::int64_t facts[] = {getpid(), static_cast<std::int64_t>(base), 1};
    std::memset(out, 0, 64);
    std::memcpy(out, facts, sizeof facts);
    return 0;
}

int cuStreamCreate(void **out, unsigned) {
    static int stream;
    *out = &stream;
    return 0;
}

int cuStreamDestroy_v2(void *) { return 0; }
int cuStreamSynchronize(void *) { return 0; }
int cuStreamWaitEvent(void *, void *, unsigned) { return 0; }

int cuEventCreate(void **out, unsigned) {
    static int event;
    *out = &event;
    return 0;
}

int cuEventDestroy_v2(void *) { return 0; }
int cuEventRecord(void *, void *) { return 0; }
int cuEventQuery(void *) { return 0; }

} // extern "C"
