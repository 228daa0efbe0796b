#include "cuda.hpp"

#include <map>

#include "errors.hpp"
#include "weightplane/sha256.hpp"

namespace {

constexpr int kNotReady = 600;                     // CUDA_ERROR_NOT_READY
constexpr unsigned kNonBlocking = 1, kNoTiming = 2; // CU_STREAM_NON_BLOCKING, CU_EVENT_DISABLE_TIMING
const char kAdvice[] = "an NVIDIA driver for CUDA 12 or newer is needed; use shm or grpc without one";

// What to do about the failures that are usual (transports/weightplane/transports/cuda_abi.py).
const std::map<int, const char *> kHelp = {
    {2, "the GPU's memory is full: the whole file has to fit"},
    {46, "the GPU is used by another process that has it to itself"},
    {100, "no GPU is visible: see CUDA_VISIBLE_DEVICES and nvidia-smi"},
    {101, "there is no GPU of that number: see --device, CUDA_VISIBLE_DEVICES and nvidia-smi"},
    {304, "the operating system refused it: in containers share the IPC and PID namespaces (--ipc=host --pid=host)"},
    {801, "this GPU or platform (WSL 2, say) cannot share memory between processes: use nccl, shm or grpc"},
};

} // namespace

Cuda::Cuda(int device) : library_({"libcuda.so.1"}, kAdvice), device_(device) {
    int (*init)(unsigned) = nullptr, (*get)(int *, int) = nullptr;
    int (*retain)(void **, int) = nullptr, (*uuid)(void *, int) = nullptr;
    library_.find("cuGetErrorName", cuGetErrorName_);
    library_.find("cuGetErrorString", cuGetErrorString_);
    library_.find("cuInit", init);
    library_.find("cuDeviceGet", get);
    library_.find("cuDeviceGetUuid_v2", uuid);
    library_.find("cuDevicePrimaryCtxRetain", retain);
    library_.find("cuCtxSetCurrent", cuCtxSetCurrent_);
    library_.find("cuMemAlloc_v2", cuMemAlloc_);
    library_.find("cuMemFree_v2", cuMemFree_);
    library_.find("cuMemcpyHtoDAsync_v2", cuMemcpyHtoDAsync_);
    library_.find("cuMemcpyDtoDAsync_v2", cuMemcpyDtoDAsync_);
    library_.find("cuIpcGetMemHandle", cuIpcGetMemHandle_);
    library_.find("cuStreamCreate", cuStreamCreate_);
    library_.find("cuStreamDestroy_v2", cuStreamDestroy_);
    library_.find("cuStreamSynchronize", cuStreamSynchronize_);
    library_.find("cuStreamWaitEvent", cuStreamWaitEvent_);
    library_.find("cuEventCreate", cuEventCreate_);
    library_.find("cuEventDestroy_v2", cuEventDestroy_);
    library_.find("cuEventRecord", cuEventRecord_);
    library_.find("cuEventQuery", cuEventQuery_);
    check("cuInit", init(0));
    int found = 0;
    check("cuDeviceGet", get(&found, device));
    char raw[16];
    check("cuDeviceGetUuid", uuid(raw, found));
    const auto text = weightplane::hex({raw, sizeof raw});
    uuid_ = text.substr(0, 8) + "-" + text.substr(8, 4) + "-" + text.substr(12, 4) + "-" + text.substr(16, 4) + "-" +
            text.substr(20);
    check("cuDevicePrimaryCtxRetain", retain(&context_, found)); // for the process's life
    make_current();
}

void Cuda::check(const char *call, int code) const {
    if (code == 0)
        return;
    const char *name = nullptr, *text = nullptr;
    cuGetErrorName_(code, &name);
    cuGetErrorString_(code, &text);
    const auto help = kHelp.find(code);
    throw Error(Exit::failed, "TRANSPORT",
                std::string(call) + " of GPU " + std::to_string(device_) + " failed: " + (name ? name : "?") + " (" +
                    std::to_string(code) + ": " + (text ? text : "?") + ")" +
                    (help == kHelp.end() ? "" : std::string(": ") + help->second));
}

void Cuda::make_current() const { check("cuCtxSetCurrent", cuCtxSetCurrent_(context_)); }

Cuda::Address Cuda::allocate(std::uint64_t nbytes) const {
    Address out = 0;
    check("cuMemAlloc", cuMemAlloc_(&out, nbytes));
    return out;
}

void Cuda::release(Address at) const noexcept { cuMemFree_(at); }

void Cuda::to_device(Address to, const void *from, std::uint64_t nbytes, Stream stream) const {
    check("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_(to, from, nbytes, stream));
}

void Cuda::inside(Address to, Address from, std::uint64_t nbytes, Stream stream) const {
    check("cuMemcpyDtoDAsync", cuMemcpyDtoDAsync_(to, from, nbytes, stream));
}

std::string Cuda::handle_of(Address base) const {
    Handle out{};
    check("cuIpcGetMemHandle", cuIpcGetMemHandle_(&out, base));
    return {out.bytes, sizeof out.bytes};
}

Cuda::Stream Cuda::new_stream() const {
    Stream out = nullptr;
    check("cuStreamCreate", cuStreamCreate_(&out, kNonBlocking));
    return out;
}

void Cuda::drop_stream(Stream stream) const noexcept { cuStreamDestroy_(stream); }

Cuda::Event Cuda::new_event() const {
    Event out = nullptr;
    check("cuEventCreate", cuEventCreate_(&out, kNoTiming));
    return out;
}

void Cuda::drop_event(Event event) const noexcept { cuEventDestroy_(event); }
void Cuda::record(Event event, Stream stream) const { check("cuEventRecord", cuEventRecord_(event, stream)); }
void Cuda::wait(Stream stream, Event event) const { check("cuStreamWaitEvent", cuStreamWaitEvent_(stream, event, 0)); }

bool Cuda::passed(Event event) const {
    const int code = cuEventQuery_(event);
    if (code == kNotReady)
        return false;
    check("cuEventQuery", code);
    return true;
}

void Cuda::synchronize(Stream stream) const { check("cuStreamSynchronize", cuStreamSynchronize_(stream)); }
