"""One member of a channel in its own process, told what to do by JSON lines on stdin; answers by JSON lines on stdout.

``data`` commands run one after another on a thread of their own and are answered when they are done; the others are
answered at once, also while the data thread is blocked in the transport: so an abort comes from another thread. Times
are ``time.monotonic()``, which all processes of a host share. Nothing is pickled and no tensor crosses the pipe.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gc
import importlib
import json
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.placement import Piece, Placement
from weightplane.controlplane.core.planner import make_plan

from .. import registry
from ..base import ArmToken, ChannelSpec, ReceiveChannel, SendChannel, Transport, TransportError
from ..buckets import Local, SinkSpans, SourceSpans
from ..digest import digest_tensor, hex_digest
from ..dtypes import int_view
from . import models

__all__ = ["Member", "main"]

_trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # glibc's


def _open_files() -> dict[str, int]:
    """What this process's descriptors are, without their numbers, and how many of each."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile; one is this listing's own
            found[re.sub(r"\d+", "N", str(link.readlink()))] += 1
    return dict(found)


class Member:
    """The state of one member: its tensors, its channels by id, and the plan that moves between them."""

    def __init__(self, reply: Callable[[dict[str, Any]], None]) -> None:
        self._reply = reply
        self._channels: dict[str, SendChannel | ReceiveChannel] = {}
        self._spans: SourceSpans | SinkSpans | None = None
        self._made: Transport | None = None
        self._made_of = ""
        self._device = "cpu"
        self._rules: list[dict[str, Any]] = []
        self._release = threading.Event()
        self._work: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="data", daemon=True).start()

    # -- at once, on the control thread

    def at_once(self, command: dict[str, Any]) -> Any:
        """Run a control command, or queue a data command (then the answer comes later and this returns ``None``)."""
        op = command["op"]
        control: dict[str, Callable[..., Any]] = {
            "about": self._about,
            "start": self._start,
            "offer": self._offer,
            "abort": self._abort,
            "drop": self._drop,
            "landed": lambda channel: getattr(self._channels[channel], "bytes_landed", 0),
            "failpoints": self._failpoints,
            "release": lambda: self._release.set(),
            "cpu_s": time.process_time,
            "stats": self._stats,
            "reset_peak": self._reset_peak,
        }
        if op in control:
            return control[op](**command.get("args", {}))
        self._work.put(command)
        return None

    def is_data(self, op: str) -> bool:
        """Whether the command is answered by the data thread."""
        return hasattr(self, f"data_{op}")

    def _about(self, transport: str) -> dict[str, Any]:
        """What the transport is; makes nothing but its object."""
        if self._made is None or self._made_of != transport:
            self._made, self._made_of = _transport(transport), transport
        capabilities = self._made.capabilities
        return {
            "name": self._made.name,
            "one_sided": capabilities.one_sided,
            "collective": capabilities.collective,
            "device_kinds": sorted(capabilities.device_kinds),
        }

    def _start(self, transport: str, member: str, device: str = "cpu") -> str:
        torch.set_num_threads(1)
        self._about(transport)
        self._member, self._device = member, device
        return self._offer()

    def _offer(self) -> str:
        assert self._made is not None
        self._use_device()
        return base64.b64encode(self._made.offer(self._member).SerializeToString()).decode()

    def _use_device(self) -> None:
        """A thread's current device is its own."""
        if self._device != "cpu":
            torch.cuda.set_device(self._device)

    def _abort(self, channel: str, reason: str) -> float:
        start = time.monotonic()
        self._channels[channel].abort(reason)
        return time.monotonic() - start

    def _drop(self, channel: str, member: str) -> None:
        self._channels[channel].drop(member)  # type: ignore[union-attr]

    def _failpoints(self, rules: list[dict[str, Any]]) -> None:
        """Rules ``{name, nth, action}``; action: ``kill``, ``stop`` (itself), ``hold`` (until ``release``)."""
        self._rules = rules
        self._release.clear()
        failpoints.set_hook(self._hit if rules else None)

    def _hit(self, name: str, nth: int) -> None:
        for rule in self._rules:
            if rule["name"] != name or rule["nth"] != nth:
                continue
            self._reply({"event": "failpoint", "name": name, "action": rule["action"], "at": time.monotonic()})
            if rule["action"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif rule["action"] == "stop":
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # by itself: at once, not a moment later
            else:
                self._release.wait()

    def _stats(self) -> dict[str, Any]:
        gc.collect()
        _trim(0)  # what is free is no growth
        on_device = self._device_stats()
        status = Path("/proc/self/status").read_text()
        rss = int(status.split("VmRSS:")[1].split()[0])
        maps = sum("weightplane-" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "files": _open_files(),
            "threads": threading.active_count(),
            "os_threads": len(os.listdir("/proc/self/task")),
            "rss_kib": rss,
            "peak_kib": int(status.split("VmHWM:")[1].split()[0]),
            "maps": maps,
            "pid": os.getpid(),
            **on_device,
        }

    def _device_stats(self) -> dict[str, int]:
        """This process's tensors, and all that is used of the device, by whom ever; what is cached is freed first.

        Waits for whatever runs on the device.
        """
        if self._device == "cpu":
            return {}
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "device_allocated": torch.cuda.memory_allocated(self._device),
            "device_peak": torch.cuda.max_memory_allocated(self._device),
            "device_used": total - free,
        }

    def _reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        if self._device != "cpu":
            torch.cuda.reset_peak_memory_stats(self._device)

    # -- one after another, on the data thread

    def _run(self) -> None:
        while (command := self._work.get()) is not None:
            answer: dict[str, Any] = {"id": command["id"]}
            try:
                answer["value"] = getattr(self, f"data_{command['op']}")(**command.get("args", {}))
            except BaseException as e:
                answer["error"] = describe(e)
            answer["at"] = time.monotonic()
            self._reply(answer)

    def data_lacking(self) -> dict[str, str]:
        """See ``models.lacking``."""
        self._use_device()
        return models.lacking(self._device)

    def data_load(self, model: str, senders: dict[str, str], receivers: dict[str, str], bucket_bytes: int, seed: int,
                  layout: str = "", shared_ties: bool = False, without: tuple[str, ...] = ()
                  ) -> dict[str, Any]:  # fmt: skip
        """Make this member's tensors and the plan. ``senders`` / ``receivers``: member → part (``models.box_of``)."""
        self._use_device()
        self._entries = models.model(model, without)
        manifest = models.manifest_of(self._entries)
        part = {**senders, **receivers}[self._member]
        self._locals: dict[int, Local] = {}
        by_name: dict[str, Local] = {}
        for i, entry in enumerate(self._entries):
            tied = by_name.get(entry.alias_of) if shared_ties or self._member in senders else None
            box = models.box_of(entry, part)
            local = tied or (models.local_tensor(entry, box, layout, self._device), box)
            if tied is None:
                models.scribble(entry, box, local[0], seed)
            self._locals[i] = by_name[entry.name] = local
        places = [
            [
                Placement.of(m, [Piece(i, models.box_of(e, p)) for i, e in enumerate(self._entries)])
                for m, p in side.items()
            ]
            for side in (senders, receivers)
        ]
        plan = make_plan(manifest, places[0], places[1], bucket_bytes)
        kind = SourceSpans if self._member in senders else SinkSpans
        # Bytes that are read after ``send`` has returned must not lie in scratch that the next bucket reuses.
        assert self._made is not None
        keep = kind is SourceSpans and not self._made.capabilities.buffered
        self._spans = kind(plan, manifest, self._member, self._locals, keep=keep)
        return {"buckets": len(self._spans.buckets), "bytes": sum(b.nbytes for b in self._spans.buckets)}

    def data_fill(self, seed: int) -> None:
        """Give all tensors the seed's values (-1: 0xA5 everywhere)."""
        for entry, (tensor, box) in zip(self._entries, self._locals.values(), strict=True):
            if not entry.alias_of or isinstance(self._spans, SinkSpans):
                models.scribble(entry, box, tensor, seed)

    def data_open(self, spec: dict[str, Any]) -> None:
        """Open this member's side of a channel."""
        from weightplane.v1.transport_pb2 import Rendezvous

        offers = {m: Rendezvous.FromString(base64.b64decode(o)) for m, o in spec.pop("offers").items()}
        assert self._made is not None
        made = ChannelSpec(
            transport=self._made.name,
            key=bytes.fromhex(spec.pop("key")),
            senders=tuple(spec.pop("senders")),
            receivers=tuple(spec.pop("receivers")),
            offers=offers,
            **spec,
        )
        opener = self._made.open_sender if self._member in made.senders else self._made.open_receiver
        self._channels[made.channel_id] = opener(made, self._member)

    def data_arm(self, channel: str, update_id: str, deadline_s: float, first: int = 0, stop: int = 1 << 30) -> None:
        """Arm for this member's buckets ``[first, stop)``, epoch and generation 1."""
        assert self._spans is not None
        self._channels[channel].arm(
            ArmToken(update_id, 1, 1), self._spans.buckets[first:stop], time.monotonic() + deadline_s
        )

    def data_move(
        self, channel: str, first: int = 0, stop: int = 1 << 30, flush: bool = True, mutate: bool = False
    ) -> float:
        """Send or receive this member's buckets ``[first, stop)``; returns seconds. ``mutate``: spoil after flush."""
        side, spans = self._channels[channel], self._spans
        start = time.monotonic()
        if isinstance(side, SendChannel):
            assert isinstance(spans, SourceSpans)
            for bucket in spans.buckets[first:stop]:
                failpoints.hit("kit.send.before")
                side.send(bucket, spans.spans(bucket))
                failpoints.hit("kit.send.after")
            if flush:
                side.flush()
            if mutate:
                self.data_fill(-1)
        else:
            assert isinstance(spans, SinkSpans)
            for bucket in spans.buckets[first:stop]:
                failpoints.hit("kit.receive.before")
                side.receive(bucket, spans.spans(bucket))
                spans.complete(bucket)
                failpoints.hit("kit.receive.after")
        return time.monotonic() - start

    def data_flush(self, channel: str) -> None:
        """Flush a sending side."""
        side = self._channels[channel]
        assert isinstance(side, SendChannel)
        side.flush()

    def data_digests(self) -> dict[str, str]:
        """Digest of each local tensor by name, by the processor."""
        return {e.name: hex_digest(digest_tensor(_on_cpu(self._locals[i][0]))) for i, e in enumerate(self._entries)}

    def data_close(self, channel: str) -> float:
        """Close a channel; returns seconds. No such channel: nothing."""
        start = time.monotonic()
        side = self._channels.pop(channel, None)
        if side is not None:
            side.close()
        return time.monotonic() - start

    def data_keep_closed(self, channel: str) -> None:
        """Close a channel but keep it by its id, to be called again."""
        self._channels[channel].close()

    def data_reset(self) -> None:
        """Close every channel and let go of the tensors."""
        for channel in list(self._channels):
            self.data_close(channel)
        self._spans = None
        self._locals = {}
        self._entries = []


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or the same bytes as integers on the CPU."""
    return tensor if tensor.device.type == "cpu" else int_view(tensor).cpu()


def _transport(name: str) -> Transport:
    """A registered transport, or ``module:Class`` of one that is not installed yet."""
    module, colon, attribute = name.partition(":")
    if not colon:
        return registry.get(name)
    made = getattr(importlib.import_module(module), attribute)()
    assert isinstance(made, Transport)
    return made


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as JSON."""
    return {
        "type": type(error).__name__,
        "transport": isinstance(error, TransportError),
        "text": str(error),
        "peers": list(getattr(error, "peers", ())),
        "bucket": getattr(error, "bucket", -1),
        "trace": "".join(traceback.format_exception(error))[-4000:],
    }


def main() -> None:
    """Serve commands until stdin ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    lock = threading.Lock()

    def reply(message: dict[str, Any]) -> None:
        with lock:
            out.write(json.dumps(message) + "\n")

    member = Member(reply)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            value = member.at_once(command)
        except BaseException as e:
            reply({"id": command["id"], "error": describe(e), "at": time.monotonic()})
            continue
        if not member.is_data(command["op"]):
            reply({"id": command["id"], "value": value, "at": time.monotonic()})
    os._exit(0)


if __name__ == "__main__":
    main()
