"""The few calls of the CUDA driver that ``cuda_ipc`` makes, typed, by ctypes: nothing to install where CUDA works.

Every failure is a ``TransportError`` that names the call, the device and what to do. Calls release the GIL. What needs
a current GPU is made inside ``with cuda.on(device)``, which makes the device's primary context (torch's) the thread's
current one meanwhile. Devices are ordinals as torch counts them; streams and events are the driver's handles, as torch
shows them too (``stream.cuda_stream``). Any thread; one and the same handle by one thread at a time.

The driver and not ``cuda.bindings``: that one turns Python lists into arrays at each call, which costs as much as the
copies of 4,719 tensors; here an array is made once.

Signatures are checked against CUDA 13.0's ``cuda.h``; run on H200 with driver 580.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from contextlib import AbstractContextManager
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import cuda_abi as abi
from .base import TransportError
from .cuda_abi import Allocation, Batch, CudaError

if TYPE_CHECKING:
    import torch

    from .gather_table import Rows

__all__ = ["Allocation", "Batch", "Cuda", "CudaError", "driver"]

log = logging.getLogger(__name__)


@cache
def driver() -> Cuda:
    """The driver, loaded and initialised once. ``TransportError`` says why not."""
    return Cuda()


class Cuda:
    """See the module text."""

    #: The kind of torch device whose memory it moves.
    kind = "cuda"

    def __init__(self) -> None:
        try:
            self._lib: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            raise TransportError(f"no NVIDIA driver here: libcuda.so.1: {e}") from e
        for name, arguments in abi.PROTOTYPES.items():
            function = getattr(self._lib, name, None)
            if function is None:
                raise TransportError(f"the NVIDIA driver here has no {name}: expected one of CUDA 12 or newer")
            function.argtypes, function.restype = arguments, c_int
        self._call("cuInit", 0)
        self._lock = threading.Lock()
        self._contexts: dict[int, c_void_p] = {}
        self._torch_streams: dict[int, Any] = {}
        self._attributes = abi.CopyAttributes(order=abi.IN_STREAM_ORDER)
        self._zero = c_size_t(0)
        self._batch, self._batch_fails = self._find_batch()

    def _call(self, name: str, *arguments: Any, of: str = "") -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            raise self._error(name, code, of)

    def _error(self, name: str, code: int, of: str = "") -> CudaError:
        word, text = c_char_p(), c_char_p()
        self._lib.cuGetErrorName(code, byref(word))
        self._lib.cuGetErrorString(code, byref(text))
        said = f"{(word.value or b'?').decode()} ({code}: {(text.value or b'?').decode()})"
        advice = f": {abi.ADVICE[code]}" if code in abi.ADVICE else ""
        return CudaError(f"{name}{f' of {of}' if of else ''} failed: {said}{advice}", code)

    def _find_batch(self) -> tuple[Any, bool]:
        """The batched copy of this driver, and whether it takes the index of what fails (CUDA 12.8's did)."""
        for version, fails in ((13000, False), (12080, True)):
            found, status = c_void_p(), c_int()
            code = self._lib.cuGetProcAddress_v2(b"cuMemcpyBatchAsync", byref(found), version, 0, byref(status))
            if not code and found.value:
                arguments = (*abi.BATCH, POINTER(c_size_t), c_void_p) if fails else (*abi.BATCH, c_void_p)
                return ctypes.CFUNCTYPE(c_int, *arguments)(found.value), fails
        return None, False

    # --- devices

    @property
    def version(self) -> int:
        """The newest CUDA that the driver serves (13000 = 13.0)."""
        found = c_int()
        self._call("cuDriverGetVersion", byref(found))
        return found.value

    def count(self) -> int:
        """Visible GPUs."""
        found = c_int()
        self._call("cuDeviceGetCount", byref(found))
        return found.value

    def uuid(self, device: int) -> str:
        """As ``torch.cuda.get_device_properties(device).uuid`` writes it; of a MIG slice: the slice's."""
        raw = (c_char * 16)()
        self._call("cuDeviceGetUuid_v2", raw, self._device(device), of=f"GPU {device}")
        text = bytes(raw).hex()
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def name(self, device: int) -> str:
        """The card's name; of a MIG slice it ends in its profile (``… MIG 1g.10gb``)."""
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, 256, self._device(device), of=f"GPU {device}")
        return text.value.decode(errors="replace")

    def compute(self, device: int) -> tuple[int, int]:
        """Compute capability."""
        return self._attribute(device, abi.MAJOR), self._attribute(device, abi.MINOR)

    def processors(self, device: int) -> int:
        """Multiprocessors."""
        return self._attribute(device, abi.PROCESSORS)

    def ipc_events(self, device: int) -> bool:
        """Whether events of the device can be shared between processes."""
        return bool(self._attribute(device, abi.IPC_EVENTS))

    def _attribute(self, device: int, number: int) -> int:
        found = c_int()
        self._call("cuDeviceGetAttribute", byref(found), number, self._device(device), of=f"GPU {device}")
        return found.value

    def can_access(self, device: int, peer: int) -> bool:
        """Whether ``device`` can address the memory of ``peer``, another one."""
        found = c_int()
        pair = self._device(device), self._device(peer)
        self._call("cuDeviceCanAccessPeer", byref(found), *pair, of=f"GPU {device} and GPU {peer}")
        return bool(found.value)

    def active(self, device: int) -> bool:
        """Whether this process has a context on the device already (some 500 MB of its memory)."""
        flags, active = c_uint(), c_int()
        self._call("cuDevicePrimaryCtxGetState", self._device(device), byref(flags), byref(active), of=f"GPU {device}")
        return bool(active.value)

    def _device(self, device: int) -> c_int:
        found = c_int()
        self._call("cuDeviceGet", byref(found), device, of=f"GPU {device}")
        return found

    def on(self, device: int) -> AbstractContextManager[None]:
        """Makes the device current for the calling thread, inside a ``with``."""
        return _On(self, self._context(device))

    def _context(self, device: int) -> c_void_p:
        with self._lock:
            found = self._contexts.get(device)
            if found is None:
                found = c_void_p()
                self._call("cuDevicePrimaryCtxRetain", byref(found), self._device(device), of=f"GPU {device}")
                self._contexts[device] = found
            return found

    # --- memory

    def allocation(self, address: int, nbytes: int) -> Allocation:
        """The allocation in which ``nbytes`` from ``address`` on lie."""
        base, size = c_uint64(), c_size_t()
        of = f"{nbytes} bytes at {address:#x}"
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address, of=of)
        return Allocation(base.value, size.value, self.serial(base.value))

    def serial(self, address: int) -> int:
        """The serial number of the allocation at an address; 0 if there is none (any more)."""
        found = c_ulonglong()
        return 0 if self._lib.cuPointerGetAttribute(byref(found), abi.BUFFER_ID, address) else found.value

    def shareable(self, address: int) -> bool:
        """Whether the allocation can be shared by a handle (what ``cuMemCreate`` or a pool made cannot)."""
        found = c_int()
        code = self._lib.cuPointerGetAttribute(byref(found), abi.IS_LEGACY_CUDA_IPC_CAPABLE, address)
        return bool(code) or bool(found.value)  # if it cannot be asked: try

    def handle_of(self, base: int) -> bytes:
        """The handle that other processes open an allocation by."""
        made = abi.Handle()
        self._call("cuIpcGetMemHandle", byref(made), base, of=f"memory at {base:#x}")
        return bytes(bytearray(made))

    def open(self, handle: bytes) -> int:
        """Map another process's allocation for the current GPU; its address here. Once per ``close``."""
        found = c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2", byref(found), abi.handle(handle), abi.LAZY_PEER_ACCESS, of="another process"
        )
        return found.value

    def close(self, address: int) -> None:
        """Undo one ``open``."""
        self._call("cuIpcCloseMemHandle", address, of=f"memory mapped at {address:#x}")

    def enable_peer(self, peer: int) -> None:
        """Let the current GPU address memory that this process allocated on ``peer``."""
        code = self._lib.cuCtxEnablePeerAccess(self._context(peer), 0)
        if code and code != abi.PEER_ALREADY_ENABLED:
            raise self._error("cuCtxEnablePeerAccess", code, f"GPU {peer}")

    # --- streams and events, of the current GPU

    def new_stream(self) -> int:
        """A stream that waits for nobody else's."""
        made = c_void_p()
        self._call("cuStreamCreate", byref(made), abi.NON_BLOCKING)
        return made.value or 0

    def drop_stream(self, stream: int) -> None:
        """Free a stream; what is queued on it still runs."""
        with self._lock:
            self._torch_streams.pop(stream, None)
        self._call("cuStreamDestroy_v2", stream)

    def current_stream(self, device: int) -> int:
        """The calling thread's current stream, as torch sees it."""
        import torch

        return int(torch.cuda.current_stream(device).cuda_stream)

    def idle(self, stream: int) -> bool:
        """Whether everything queued on the stream has run."""
        code = self._lib.cuStreamQuery(stream)
        if code and code != abi.NOT_READY:
            raise self._error("cuStreamQuery", code)
        return not code

    def synchronize(self, stream: int) -> None:
        """Block until the stream is idle."""
        self._call("cuStreamSynchronize", stream)

    def new_event(self, *, shared: bool = False) -> int:
        """An event; ``shared``: one that other processes can open."""
        made = c_void_p()
        self._call("cuEventCreate", byref(made), abi.DISABLE_TIMING | (abi.INTERPROCESS if shared else 0))
        return made.value or 0

    def event_handle(self, event: int) -> bytes:
        """The handle of a shared event."""
        made = abi.Handle()
        self._call("cuIpcGetEventHandle", byref(made), event)
        return bytes(bytearray(made))

    def open_event(self, handle: bytes) -> int:
        """Another process's event."""
        found = c_void_p()
        self._call("cuIpcOpenEventHandle", byref(found), abi.handle(handle), of="another process")
        return found.value or 0

    def record(self, event: int, stream: int) -> None:
        """The event has passed once what is on the stream now has run."""
        self._call("cuEventRecord", event, stream)

    def passed(self, event: int) -> bool:
        """Whether the event has; one that was never recorded has."""
        code = self._lib.cuEventQuery(event)
        if code and code != abi.NOT_READY:
            raise self._error("cuEventQuery", code)
        return not code

    def wait(self, stream: int, event: int) -> None:
        """What is queued on the stream from now on runs after the event."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def drop_event(self, event: int) -> None:
        """Free an event."""
        self._call("cuEventDestroy_v2", event)

    # --- copies

    @property
    def batches(self) -> bool:
        """Whether the driver copies in batches (CUDA 12.8 and newer)."""
        return self._batch is not None

    def copy_batch(self, batch: Batch, stream: int) -> None:
        """Queue a batch; its copies run in no order among themselves."""
        first, fails = self._zero, c_size_t()
        arguments = (batch.targets, batch.sources, batch.nbytes, batch.count, byref(self._attributes), byref(first), 1)
        code = self._batch(*arguments, *((byref(fails),) if self._batch_fails else ()), stream)
        if code:
            raise self._error("cuMemcpyBatchAsync", code, f"{batch.count} copies")

    def copy_each(self, batch: Batch, stream: int) -> None:
        """Queue the same one by one: for drivers without batches."""
        copy = self._lib.cuMemcpyAsync
        for target, source, nbytes in zip(batch.targets, batch.sources, batch.nbytes, strict=True):
            code = copy(target, source, nbytes, stream)
            if code:
                raise self._error("cuMemcpyAsync", code, f"{nbytes} bytes")

    # --- through torch

    def gather_problem(self, device: int) -> str:
        """Why the gather kernel does not work on the device; empty if it does. The first call compiles it."""
        import torch

        from .gather import unusable

        return unusable(torch.device("cuda", device))

    def table(self, columns: torch.Tensor, device: int) -> torch.Tensor:
        """A table on the device; see ``settle_tables``."""
        return columns.to(f"cuda:{device}")

    def settle_tables(self, device: int) -> None:
        """Wait until every table made by this thread is there."""
        self.synchronize(self.current_stream(device))

    def gather(self, device: int, table: torch.Tensor, rows: Rows, programs: int, stream: int) -> None:
        """Queue the kernel on a stream (see ``gather.gather``)."""
        import torch

        from .gather import gather

        with self._lock:
            known = self._torch_streams.get(stream)
            if known is None:
                known = self._torch_streams[stream] = torch.cuda.ExternalStream(stream, f"cuda:{device}")  # type: ignore[no-untyped-call]
        with torch.cuda.stream(known):
            gather(table, rows, programs)

    def segments(self) -> frozenset[int]:
        """Where the allocations of torch's allocator begin, on all devices."""
        import torch

        try:
            return frozenset(int(s["address"]) for s in torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
        except Exception as e:  # an allocator that was plugged in keeps no books
            log.debug("torch's allocator tells nothing of its segments: %s", e)
            return frozenset()


class _On(AbstractContextManager[None]):
    """See ``Cuda.on``."""

    __slots__ = ("_context", "_cuda")

    def __init__(self, cuda: Cuda, context: c_void_p) -> None:
        self._cuda, self._context = cuda, context

    def __enter__(self) -> None:
        self._cuda._call("cuCtxPushCurrent_v2", self._context)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        popped = c_void_p()
        self._cuda._lib.cuCtxPopCurrent_v2(byref(popped))
