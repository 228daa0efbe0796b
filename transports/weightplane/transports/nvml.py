"""The GPUs of a host and which of them can read each other's memory, by NVML: also those hidden from CUDA here."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Gpu", "NvmlError", "gpus"]

_READ: Final = 0  # NVML_P2P_CAPS_INDEX_READ
_PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "nvmlInit_v2": (),
    "nvmlShutdown": (),
    "nvmlDeviceGetCount_v2": (POINTER(c_uint),),
    "nvmlDeviceGetHandleByIndex_v2": (c_uint, POINTER(c_void_p)),
    "nvmlDeviceGetUUID": (c_void_p, c_char_p, c_uint),
    "nvmlDeviceGetName": (c_void_p, c_char_p, c_uint),
    "nvmlDeviceGetMigMode": (c_void_p, POINTER(c_uint), POINTER(c_uint)),
    "nvmlDeviceGetP2PStatus": (c_void_p, c_void_p, c_int, POINTER(c_int)),
}


class NvmlError(Exception):
    """NVML is not here or did not answer."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """``uuid`` as CUDA writes it (without ``GPU-``). ``peers``: whose memory it can read. ``mig``: it is sliced."""

    uuid: str
    name: str
    mig: bool
    peers: frozenset[str]


def gpus() -> list[Gpu]:
    """Every GPU that NVML shows. ``NvmlError`` if it does not answer."""
    try:
        lib: Any = ctypes.CDLL("libnvidia-ml.so.1")
        for name, arguments in _PROTOTYPES.items():
            function = getattr(lib, name)
            function.argtypes, function.restype = arguments, c_int
    except (OSError, AttributeError) as e:
        raise NvmlError(str(e)) from e
    _check("nvmlInit_v2", lib.nvmlInit_v2())
    try:
        return _all(lib)
    finally:
        lib.nvmlShutdown()


def _check(call: str, code: int) -> None:
    if code:
        raise NvmlError(f"{call} failed: {code}")


def _all(lib: Any) -> list[Gpu]:
    count = c_uint()
    _check("nvmlDeviceGetCount_v2", lib.nvmlDeviceGetCount_v2(byref(count)))
    handles = []
    for i in range(count.value):
        handle = c_void_p()
        _check("nvmlDeviceGetHandleByIndex_v2", lib.nvmlDeviceGetHandleByIndex_v2(i, byref(handle)))
        handles.append(handle)
    uuids = [_text(lib.nvmlDeviceGetUUID, h).removeprefix("GPU-") for h in handles]
    found = []
    for handle, uuid in zip(handles, uuids, strict=True):
        peers = set()
        for other, name in zip(handles, uuids, strict=True):
            status = c_int(-1)
            if name != uuid:
                _check("nvmlDeviceGetP2PStatus", lib.nvmlDeviceGetP2PStatus(handle, other, _READ, byref(status)))
                if status.value == 0:
                    peers.add(name)
        mode, pending = c_uint(), c_uint()
        mig = not lib.nvmlDeviceGetMigMode(handle, byref(mode), byref(pending)) and mode.value == 1
        found.append(Gpu(uuid, _text(lib.nvmlDeviceGetName, handle), mig, frozenset(peers)))
    return found


def _text(call: Any, handle: c_void_p) -> str:
    text = ctypes.create_string_buffer(96)
    _check(call.__name__, call(handle, text, 96))
    return text.value.decode(errors="replace")
