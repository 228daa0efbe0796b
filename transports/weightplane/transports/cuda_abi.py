"""What of the CUDA driver's binary interface ``cuda_driver`` uses: constants, structures, prototypes.

Checked against CUDA 13.0's ``cuda.h`` by a library made from its prototypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Final

from .base import TransportError

HANDLE_BYTES: Final = 64  # of a memory handle and of an event handle
NOT_READY, PEER_ALREADY_ENABLED = 600, 704
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
DISABLE_TIMING, INTERPROCESS = 2, 4  # CU_EVENT_*
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
BUFFER_ID, IS_LEGACY_CUDA_IPC_CAPABLE = 7, 10  # CU_POINTER_ATTRIBUTE_*
PROCESSORS, MAJOR, MINOR, IPC_EVENTS = 16, 75, 76, 125  # CU_DEVICE_ATTRIBUTE_*
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

ADVICE: Final = {
    2: "the GPU's memory is full",
    3: "this process was forked after CUDA was first used: start it with 'spawn'",
    46: "the GPU is used by another process that has it to itself",
    100: "no GPU is visible: see CUDA_VISIBLE_DEVICES and nvidia-smi",
    201: "the memory belongs to this very process, or the GPU was reset",
    205: "in containers, both sides must share the IPC namespace (--ipc=host) and see the GPU",
    217: "the two GPUs have no peer access (nvidia-smi topo -p2p r): use nccl or ucx",
    304: "the operating system refused it: in containers share the IPC and PID namespaces (--ipc=host --pid=host)",
    400: "what the handle names is gone: its process freed it or ended",
    700: "an address that is no memory was used on this GPU; the process must be started anew",
    711: "the GPU has peer access to as many others as it can",
    801: "this memory, GPU or platform (WSL 2, say) cannot share memory between processes: use nccl or ucx",
}


class CudaError(TransportError):
    """A call of the driver failed. ``code`` is its CUresult."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Allocation:
    """What an address lies in. ``serial`` differs for every allocation of a process's life."""

    base: int
    nbytes: int
    serial: int


class Handle(ctypes.Structure):
    """``CUipcMemHandle`` and ``CUipcEventHandle``."""

    _fields_ = [("reserved", c_char * HANDLE_BYTES)]


class Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = [("type", c_int), ("id", c_int)]


class CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = [("order", c_int), ("source", Location), ("target", Location), ("flags", c_uint)]


class Batch:
    """Copies as the driver takes them. Build once, copy as often as they stay right."""

    def __init__(self, targets: Sequence[int], sources: Sequence[int], nbytes: Sequence[int]) -> None:
        n = self.count = len(nbytes)
        self.targets, self.sources = (c_uint64 * n)(*targets), (c_uint64 * n)(*sources)
        self.nbytes = (c_size_t * n)(*nbytes)


PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuGetProcAddress_v2": (c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxGetState": (c_int, POINTER(c_uint), POINTER(c_int)),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxEnablePeerAccess": (c_void_p, c_uint),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuIpcGetMemHandle": (POINTER(Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuIpcGetEventHandle": (POINTER(Handle), c_void_p),
    "cuIpcOpenEventHandle": (POINTER(c_void_p), Handle),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamQuery": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
}
BATCH: Final[tuple[Any, ...]] = (POINTER(c_uint64), POINTER(c_uint64), POINTER(c_size_t), c_size_t,
                                  POINTER(CopyAttributes), POINTER(c_size_t), c_size_t)  # fmt: skip


def handle(raw: bytes) -> Handle:
    """A handle from its bytes. ``TransportError`` if there are not 64."""
    if len(raw) != HANDLE_BYTES:
        raise TransportError(f"a handle of {len(raw)} bytes; expected {HANDLE_BYTES}")
    made = Handle()
    ctypes.memmove(byref(made), raw, HANDLE_BYTES)
    return made
