"""NIXL, as ``ucx`` uses it: the package, UCX's settings, one agent, and which UCX transports it moves bytes by.

NIXL's wheels bundle UCX. Settings are taken by UCX from the environment as an agent is made; what the user has set is
left alone, the rest is ours (``settings``), and only while the agent is being made. An agent is used by any thread (it
is made in NIXL's strict mode) and has no thread of its own: a progress thread spins, and slows copies by half.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import itertools
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

from .base import TransportError

__all__ = ["Agent", "Memory", "UcxError", "is_rdma", "package", "rdma_devices", "settings"]

log = logging.getLogger(__name__)

#: ``("DRAM" or "VRAM", address, bytes, device index)``; host memory has device 0.
Memory = tuple[str, int, int, int]

_PACKAGES: Final = ("nixl_cu13", "nixl_cu12")  # the module names of the wheels, the newer CUDA first
#: UCX's names of transports that move bytes by RDMA hardware.
_RDMA: Final = re.compile(r"(rc|dc|ud|srd|gga|gda)[_/]")
#: Over TCP, untuned UCX loses to a plain socket: 0.5 against 2.3 GiB/s; with these it gives 2.7 to 4.
_TUNED: Final = {
    "UCX_RNDV_THRESH": "inf",
    "UCX_TCP_TX_SEG_SIZE": "256K",
    "UCX_TCP_RX_SEG_SIZE": "256K",
    # Left to itself UCX reads the memory of a GPU without NVLink over TCP, on the same GPU too: 2.4 GB/s.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}
_lock = threading.Lock()


def package() -> str:
    """The installed NIXL package's module name, or nothing; of two, the one of torch's CUDA. Imports nothing."""
    torch = sys.modules.get("torch")
    old = str(getattr(getattr(torch, "version", None), "cuda", "") or "").startswith("12.")
    for name in reversed(_PACKAGES) if old else _PACKAGES:
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(name) is not None:
                return name
    return ""


def rdma_devices() -> tuple[str, ...]:
    """InfiniBand, RoCE and EFA devices that this process sees."""
    with contextlib.suppress(OSError):
        return tuple(sorted(os.listdir("/sys/class/infiniband")))
    return ()


def is_rdma(transport: str) -> bool:
    """Whether UCX's ``transport`` (``rc_mlx5/mlx5_0:1``) is RDMA."""
    return _RDMA.match(transport) is not None


def settings(local: bool) -> dict[str, str]:
    """What is set for UCX beside the environment. ``local``: for this host alone, so nothing listens on a network."""
    wanted = dict(_TUNED)
    if local:
        wanted["UCX_NET_DEVICES"] = "lo"
    return {k: v for k, v in wanted.items() if k not in os.environ}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that are not set; take them away again."""
    added = {k: v for k, v in values.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


class UcxError(Exception):
    """NIXL or UCX failed; the text is theirs."""


class _Nixl:
    """Around calls of NIXL: what they raise becomes ``UcxError``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        del frames  # as ``_bare``: this very frame is held by the error below
        if isinstance(error, Exception):
            text = str(error).removeprefix("NIXL_ERR_") or type(error).__name__
            raise UcxError(f"{self._what}: {text}") from _bare(error)


def _bare(error: Exception) -> Exception:
    """Without its frames: they hold NIXL's agent, whose descriptors would stay open for as long as somebody keeps the
    error."""
    return error.with_traceback(None)


class Agent:
    """One NIXL agent: registers memory, reads from others. ``UcxError`` where that fails.

    Reads go by numbers: NIXL's handles hold its agent, and a caller's frame is held by any error that passed it.
    """

    def __init__(self, member: str, local: bool) -> None:
        self.name = secrets.token_hex(6)  # UCX cuts long names
        self.member, self.local = member, local
        self._reads: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        with _lock, _environment({"NIXL_LOG_LEVEL": "WARN", **settings(local), **_log.settings()}):
            self._api = _load()
            sync = self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync)
            try:
                self._agent: Any = self._api.nixl_agent(self.name, config)
            except Exception as e:
                raise TransportError(f"NIXL cannot make an agent with UCX: {e}; {_hint(_log.read())}") from _bare(e)
            finally:
                _log.read()
        if "UCX" not in self._agent.backends:
            raise TransportError(f"NIXL has no UCX plug-in: {self._agent.plugin_list}; {_hint()}")

    # --- memory

    def register(self, memory: Sequence[Memory]) -> None:
        """Make memory readable by others and fit to read into."""
        for kind in dict.fromkeys(m[0] for m in memory):
            rows = [(address, nbytes, device, "") for k, address, nbytes, device in memory if k == kind]
            with _Nixl("memory cannot be registered"):
                self._agent.register_memory(rows, kind, ["UCX"])

    def deregister(self, memory: Sequence[Memory]) -> None:
        """Undo ``register``, with the very values."""
        for kind in dict.fromkeys(m[0] for m in memory):
            rows = [(address, nbytes, device, "") for k, address, nbytes, device in memory if k == kind]
            with _Nixl("memory cannot be deregistered"):
                self._agent.deregister_memory(self._agent.get_reg_descs(rows, kind), ["UCX"])

    def metadata_of(self, memory: Memory) -> bytes:
        """What others need to read one registered stretch."""
        kind, address, nbytes, device = memory
        rows = self._agent.get_reg_descs([(address, nbytes, device, "")], kind)
        with _Nixl("memory cannot be described"):
            return bytes(self._agent.get_partial_agent_metadata(rows, False, ["UCX"]))

    def connection(self) -> bytes:
        """What others need to connect."""
        bindings = importlib.import_module(f"{self._api.__package__}._bindings")
        none = bindings.nixlRegDList(bindings.DRAM_SEG)
        with _Nixl("the agent cannot be described"):
            return bytes(self._agent.get_partial_agent_metadata(none, True, ["UCX"]))

    # --- others

    def add(self, metadata: bytes) -> str:
        """Take in metadata of another agent (its connection first); the agent's name."""
        with _Nixl("what the other side sent cannot be used"):
            found = self._agent.add_remote_agent(metadata)
        return found.decode() if isinstance(found, bytes) else str(found)

    def remove(self, name: str) -> None:
        """Disconnect from another agent and forget its memory."""
        with _Nixl("cannot disconnect"):
            self._agent.remove_remote_agent(name)

    def prepare(self, name: str, kind: str, local: Any, other_kind: str, other: Any) -> int:
        """A READ from ``other`` into ``local``: (n, 3) uint64 arrays of address, bytes, device. May be run again. Its
        number here."""
        mine = self._agent.get_xfer_descs(local, kind)
        theirs = self._agent.get_xfer_descs(other, other_kind)
        with _Nixl("the read cannot be prepared"):
            number = next(self._numbers)
            self._reads[number] = self._agent.initialize_xfer("READ", mine, theirs, name, b"", ["UCX"])
        return number

    def start(self, read: int) -> bool:
        """Run a prepared READ; whether it is done at once. On shared memory the whole copy happens in here."""
        try:
            state = self._agent.transfer(self._reads[read])
        except Exception as e:
            raise UcxError(f"the read failed: {e}") from _bare(e)
        return self._state(state)

    def done(self, read: int) -> bool:
        """Whether a started READ is done; works for it."""
        try:
            state = self._agent.check_xfer_state(self._reads[read])
        except Exception as e:
            raise UcxError(f"the read failed: {e}") from _bare(e)
        return self._state(state)

    def release(self, read: int) -> bool:
        """Forget a READ; False if it is not over and cannot be."""
        try:
            self._agent.release_xfer_handle(self._reads[read])
        except Exception as e:
            log.debug("%s: a read cannot be released yet: %s", self.member, e)
            return False
        del self._reads[read]
        return True

    def progress(self) -> None:
        """Work for connections and emulated reads of others."""
        self._agent.get_new_notifs(["UCX"])

    def transports(self) -> tuple[str, ...]:
        """UCX transports of this agent's connections so far (``cma/memory``, ``rc_mlx5/mlx5_0:1``); empty = unknown."""
        with _lock:
            _log.read()
            found = _log.connections.get(self.name, {})
        return tuple(sorted({lane for lanes in found.values() for lane in lanes}))

    @property
    def rdma(self) -> bool:
        """Whether RDMA hardware serves every connection so far, as far as is known."""
        with _lock:
            _log.read()
            found = list(_log.connections.get(self.name, {}).values())
        return bool(found) and all(any(map(is_rdma, lanes)) for lanes in found)

    def close(self) -> None:
        """Disconnect and let go of everything."""
        self._reads.clear()
        self._agent = None
        with _lock:
            _log.read()
            _log.connections.pop(self.name, None)

    @staticmethod
    def _state(state: str) -> bool:
        if state == "ERR":
            raise UcxError("the read failed")
        return state == "DONE"


def _hint(said: Sequence[str] = ()) -> str:
    """What to look at: what UCX ``said``, and what it was told."""
    words = f"UCX says: {'; '.join(said)}; " if said else ""
    told = ", ".join(f"{k}={os.environ[k]}" for k in ("UCX_TLS", "UCX_NET_DEVICES") if k in os.environ)
    return f"{words}{f'it was told {told}; ' if told else ''}see UCX_TLS, UCX_NET_DEVICES and UCX_LOG_LEVEL=debug"


def _load() -> ModuleType:
    name = package()
    if not name:
        raise TransportError("NIXL is not installed: pip install --no-deps nixl-cu12==1.5.1 (or nixl-cu13), and numpy")
    raises = logging.raiseExceptions
    try:
        return importlib.import_module(f"{name}._api")
    except Exception as e:
        raise TransportError(f"{name} cannot be loaded: {type(e).__name__}: {e}") from e
    finally:
        logging.raiseExceptions = raises  # NIXL's logging module sets it for the whole process


class _Log:
    """UCX's own log, which alone tells what an agent's connections are made of. Under ``_lock``.

    UCX takes its settings once, as it is loaded. Unless the user set them, its log goes to a memory file, from which
    warnings and errors are passed on to Python's logging.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._at = 0
        self.connections: dict[str, dict[str, tuple[str, ...]]] = {}  # by agent and UCX's number of the configuration

    def settings(self) -> dict[str, str]:
        """What is to be set while UCX is loaded."""
        if self._file is None:
            ours = not {"UCX_LOG_FILE", "UCX_LOG_LEVEL"} & os.environ.keys() and hasattr(os, "memfd_create")
            self._file = os.memfd_create("weightplane-ucx-log", os.MFD_CLOEXEC) if ours else -1
        if self._file < 0:
            return {}
        return {"UCX_LOG_FILE": f"/proc/self/fd/{self._file}", "UCX_LOG_LEVEL": "info"}

    def read(self) -> list[str]:
        """Take in what UCX has written since; its warnings and errors."""
        said: list[str] = []
        if self._file is None or self._file < 0:
            return said
        ctypes.CDLL(None).fflush(None)  # UCX's stream is buffered
        text = os.pread(self._file, _LOG_BYTES, self._at)
        self._at += len(text)
        if text:
            os.ftruncate(self._file, 0)  # UCX writes on at its own place: what was read takes no memory
        for line in text.decode(errors="replace").splitlines():
            if found := _CONNECTION.search(line):
                lanes = dict.fromkeys(lane for group in _LANES.findall(found["lanes"]) for lane in group.split())
                self.connections.setdefault(found["agent"], {})[found["cfg"]] = tuple(sorted(lanes))
            elif _OURS.search(line):
                continue  # where UCX has no CUDA
            elif level := _LEVEL.search(line):
                said.append(line[level.end() :])
                log.log(logging.WARNING if level[1] == "WARN" else logging.ERROR, "UCX: %s", said[-1])
        return said


_LOG_BYTES: Final = 1 << 20  # read at once
#: "<agent> intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)"; "self" is the agent with itself
_CONNECTION: Final = re.compile(r"UCX +INFO +(?P<agent>\S+) (?:intra|inter)-node cfg#(?P<cfg>\d+) (?P<lanes>.*)")
_LANES: Final = re.compile(r"\w+\(([^)]*)\)")
_LEVEL: Final = re.compile(r"UCX +(WARN|ERROR|FATAL) +")
#: A setting of ours that this UCX has no use for, and the advice that follows it.
_OURS: Final = re.compile(
    rf"UCX +WARN +(unused environment variables?: (({'|'.join(_TUNED)})(; )?)+$|\(set UCX_WARN_UNUSED_ENV_VARS=n)"
)
_log = _Log()
