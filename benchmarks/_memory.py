"""How much memory something takes at its peak: of this process on the host, of everybody on a card."""

from __future__ import annotations

import threading
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["CardPeak", "HostPeak"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_EVERY_S = 0.0005


class HostPeak:
    """The kernel's own high-water mark of this process's resident memory (shared memory included)."""

    def begin(self) -> None:
        """From here on."""
        _CLEAR.write_text("5")  # the mark falls to what is resident now
        self._before = _resident("VmRSS")

    def extra(self) -> int:
        """Bytes above what was resident at ``begin``, at the peak since."""
        return max(0, _resident("VmHWM") - self._before)


def _resident(what: str) -> int:
    line = next(x for x in _STATUS.read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) * 1024


class CardPeak:
    """Memory in use on some cards, by whatever process, looked at many times a second through NVML: what torch does not
    count (contexts, mappings, a transport's own) is in it. Needs no CUDA context. Without NVML it knows nothing."""

    def __init__(self, uuids: list[str]) -> None:
        self._cards: list[Any] = []
        try:
            self._nvml: Any = import_module("pynvml")
            self._nvml.nvmlInit()
            for uuid in uuids:
                full = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
                self._cards.append(self._nvml.nvmlDeviceGetHandleByUUID(full))
        except Exception as e:
            print(f"memory in use on the cards is not measured: {type(e).__name__}: {e}")
            self._cards = []

    def _used(self) -> list[int]:
        return [int(self._nvml.nvmlDeviceGetMemoryInfo(card).used) for card in self._cards]

    def begin(self) -> None:
        """From here on."""
        self._before = self._used()
        self._most = list(self._before)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._cards and not self._over.wait(_EVERY_S):
            self._most = [max(a, b) for a, b in zip(self._most, self._used(), strict=True)]

    def extra(self) -> list[int]:
        """Bytes above what was in use at ``begin``, at the peak since, by card; empty without NVML."""
        self._over.set()
        self._thread.join()
        return [most - before for most, before in zip(self._most, self._before, strict=True)]
