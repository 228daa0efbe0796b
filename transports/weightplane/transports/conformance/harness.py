"""Drives member processes (``peer``) as one channel: open, arm, move, break, heal. Knows no transport but by name."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import IO, Any, ClassVar

from ..digest import digest_tensor, hex_digest
from . import models

__all__ = ["Fleet", "NotHere", "PeerError", "PeerProcess", "Pool", "expected_digests", "placed"]

_ids = itertools.count(1)


class NotHere(Exception):
    """This machine has too few devices for a fleet; the text says how many there are and how many it needs."""


class PeerError(Exception):
    """A command failed in a peer. ``kind`` is the exception's name there; ``at`` when it was raised (monotonic)."""

    def __init__(self, member: str, error: dict[str, Any], at: float) -> None:
        super().__init__(f"{member}: {error['type']}: {error['text']}\n{error['trace']}")
        self.member, self.at = member, at
        self.kind: str = error["type"]
        self.text: str = error["text"]
        self.peers: tuple[str, ...] = tuple(error["peers"])
        self.bucket: int = error["bucket"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command gave, and when it was done there (monotonic)."""

    value: Any
    at: float


class PeerProcess:
    """One spawned member. Any thread may call; ``events`` holds the failpoints it reported.

    ``popen`` starts it: a test suite that starts hundreds may put in its place what starts Python faster.
    """

    popen: ClassVar[Callable[..., subprocess.Popen[str]]] = subprocess.Popen

    def __init__(self, transport: str) -> None:
        self.transport, self.member, self.device = transport, "", ""
        self._pending: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._condition = threading.Condition()
        self.events: list[dict[str, Any]] = []
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.process = type(self).popen(
            [sys.executable, "-m", "weightplane.transports.conformance.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            # One arena: from the top of others malloc_trim gives nothing back, up to three big tensors a thread.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"peer {self.process.pid}", daemon=True)
        self._reader.start()

    def start(self, op: str, **args: Any) -> Future[Answer]:
        """Send a command; the future gives its ``Answer`` or ``PeerError``, or ``ConnectionError`` if the peer died."""
        future: Future[Answer] = Future()
        number = next(_ids)
        with self._lock:
            self._pending[number] = future
            try:
                assert self.process.stdin is not None
                self.process.stdin.write(json.dumps({"id": number, "op": op, "args": args}) + "\n")
                self.process.stdin.flush()
            except (OSError, ValueError):
                del self._pending[number]
                future.set_exception(ConnectionError(f"{self.member}: the process is gone"))
        return future

    def call(self, op: str, timeout: float = 120, **args: Any) -> Any:
        """``start`` and wait for the value."""
        return self.start(op, **args).result(timeout).value

    def wait_event(self, timeout: float = 60) -> dict[str, Any]:
        """The next failpoint it reports."""
        with self._condition:
            if not self._condition.wait_for(lambda: self.events or self.process.poll() is not None, timeout):
                raise TimeoutError(f"{self.member}: no failpoint within {timeout} s")
            if not self.events:
                raise ConnectionError(f"{self.member}: the process is gone; {self.stderr()}")
            return self.events.pop(0)

    @property
    def alive(self) -> bool:
        """Whether the process runs (or is stopped)."""
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def stderr(self) -> str:
        """The end of what it wrote to stderr."""
        self.errors.seek(0)
        return self.errors.read()[-4000:].decode(errors="replace")

    def kill(self) -> None:
        """End the process, stopped or not."""
        if self.alive:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            if "event" in message:
                with self._condition:
                    self.events.append(message)
                    self._condition.notify_all()
                continue
            with self._lock:
                future = self._pending.pop(message["id"])
            if "error" in message:
                future.set_exception(PeerError(self.member, message["error"], message["at"]))
            else:
                future.set_result(Answer(message["value"], message["at"]))
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        for future in pending:
            future.set_exception(ConnectionError(f"{self.member}: the process is gone"))
        with self._condition:
            self._condition.notify_all()


class Pool:
    """Keeps peers of one transport for the next test: starting one costs an import of torch.

    ``device``: where members' tensors live (see ``placed``).
    """

    def __init__(self, transport: str, device: str = "cpu") -> None:
        self.transport, self.device = transport, device
        self._idle: list[PeerProcess] = []
        self._about: tuple[str, dict[str, Any]] = ("", {})
        self._lacking: dict[str, str] | None = None

    def about(self) -> dict[str, Any]:
        """The transport's name and capabilities, as a peer knows them."""
        if self._about[0] != self.transport:
            (peer,) = self.take([""])
            self._idle.append(peer)
            self._about = (self.transport, peer.call("about", transport=self.transport))
        return self._about[1]

    def lacking(self, peer: PeerProcess) -> dict[str, str]:
        """See ``models.lacking``; asked once, and told as a warning for each dtype."""
        if self._lacking is None:
            found: dict[str, str] = {} if self.device == "cpu" else peer.call("lacking")
            for dtype, why in found.items():
                text = f"{dtype} is left out: this torch has no such tensors on {self.device} ({why})"
                warnings.warn(text, stacklevel=2)
            self._lacking = found
        return self._lacking

    def take(self, devices: Sequence[str]) -> list[PeerProcess]:
        """A fresh-looking peer for each device: one that used no other before (``""``: any)."""
        self._idle = [p for p in self._idle if p.alive]
        taken = []
        for device in devices:
            fit = next((p for p in reversed(self._idle) if not device or p.device in ("", device)), None)
            if fit is None:
                fit = PeerProcess(self.transport)
            else:
                self._idle.remove(fit)
            fit.device = device or fit.device
            taken.append(fit)
        return taken

    def give(self, peers: Sequence[PeerProcess]) -> None:
        """Take peers back: healthy ones are reset, others are killed."""
        for peer in peers:
            try:
                peer.call("failpoints", 5, rules=[])
                peer.call("reset", 6)
                peer.events.clear()
                self._idle.append(peer)
            except Exception:
                peer.kill()

    def close(self) -> None:
        """End every idle peer."""
        for peer in self._idle:
            peer.kill()
        self._idle.clear()


def placed(senders: int, receivers: int, device: str, collective: bool) -> list[str]:
    """Each member's device, senders first. ``NotHere``: there are too few.

    ``device``: ``cpu``; ``cuda:0`` (all on that one: colocated); ``cuda`` (senders on GPU 0, receivers on the others in
    turn; of a collective transport every member has its own).
    """
    members = senders + receivers
    if device != "cuda":
        return [device] * members
    import torch

    count, needed = torch.cuda.device_count(), members if collective else 2
    if count < needed:
        raise NotHere(f"needs {needed} CUDA devices, torch sees {count}")
    if collective:
        return [f"cuda:{i}" for i in range(members)]
    return ["cuda:0"] * senders + [f"cuda:{1 + i % (count - 1)}" for i in range(receivers)]


def expected_digests(model: str, part: str, seed: int, without: Collection[str] = ()) -> dict[str, str]:
    """What a member that holds ``part`` must hold after the update ``seed``, by name."""
    found = {}
    for entry in models.model(model, without):
        box = models.box_of(entry, part)
        tensor = models.local_tensor(entry, box, "plain")
        models.scribble(entry, box, tensor, seed)
        found[entry.name] = hex_digest(digest_tensor(tensor))
    return found


class Fleet:
    """Senders ``s0..`` and receivers ``r0..`` of one model, one channel at a time.

    ``senders`` / ``receivers`` list each member's part (``models.box_of``). Seeds give the model's values; the
    channel's deadline is ``deadline_s`` from each arm. ``transport`` is the name that the peers know it by. ``fit``: on
    a machine with too few devices make do with fewer receivers, but at least one; else that is ``NotHere``.
    """

    def __init__(
        self,
        pool: Pool,
        model: str,
        *,
        senders: Sequence[str] = ("full",),
        receivers: Sequence[str] = ("full",),
        bucket_bytes: int = 1 << 20,
        deadline_s: float = 120,
        layout: str = "",
        shared_ties: bool = False,
        fit: bool = False,
    ) -> None:
        self._pool, self.model = pool, model
        about = pool.about()
        self.transport: str = about["name"]
        self.one_sided: bool = about["one_sided"]
        self.collective: bool = about["collective"]
        places = self._place(senders, receivers, fit)
        receivers = receivers[: len(places) - len(senders)]
        self.parts = {f"s{i}": p for i, p in enumerate(senders)} | {f"r{i}": p for i, p in enumerate(receivers)}
        self.senders = [f"s{i}" for i in range(len(senders))]
        self.receivers = [f"r{i}" for i in range(len(receivers))]
        self.bucket_bytes, self.deadline_s = bucket_bytes, deadline_s
        self._load = {"layout": layout, "shared_ties": shared_ties}
        self.devices = dict(zip(self.parts, places, strict=True))
        self.peers = dict(zip(self.parts, pool.take(places), strict=True))
        self.offers: dict[str, str] = {}
        self.channel = ""
        self.bytes = 0
        self._updates = itertools.count(1)
        try:
            for member in self.parts:
                self._prepare(member)
            self._without = list(pool.lacking(self.peers["s0"]))
            for future in self._loading(self.parts):
                future.result(300)
        except BaseException:
            self.close()
            raise

    def _place(self, senders: Sequence[str], receivers: Sequence[str], fit: bool) -> list[str]:
        n = len(receivers)
        while True:
            try:
                return placed(len(senders), n, self._pool.device, self.collective)
            except NotHere:
                n -= 1
                if not fit or not n:
                    raise

    def _prepare(self, member: str) -> None:
        peer = self.peers[member]
        peer.member = member
        self.offers[member] = peer.call(
            "start", transport=self._pool.transport, member=member, device=self.devices[member]
        )

    def _loading(self, members: Sequence[str] | dict[str, str]) -> list[Future[Answer]]:
        return [
            self.peers[m].start(
                "load",
                model=self.model,
                senders={s: self.parts[s] for s in self.senders},
                receivers={r: self.parts[r] for r in self.receivers},
                bucket_bytes=self.bucket_bytes,
                seed=0 if m in self.senders else -1,
                without=self._without,
                **self._load,
            )
            for m in members
        ]

    def replace(self, member: str) -> None:
        """Put a fresh process in a member's place (the old one is killed)."""
        self.peers[member].kill()
        self.peers[member] = self._pool.take([self.devices[member]])[0]
        self._prepare(member)
        self._loading([member])[0].result(300)

    def each(self, op: str, members: Sequence[str] | None = None, **args: Any) -> dict[str, Future[Answer]]:
        """Start a command in several members at once."""
        return {m: self.peers[m].start(op, **args) for m in members or list(self.parts)}

    def spec(self) -> dict[str, Any]:
        """A new channel's spec as JSON."""
        return {
            "channel_id": f"c-{secrets.token_hex(8)}",
            "group": "conformance",
            "key": secrets.token_hex(32),
            "senders": self.senders,
            "receivers": self.receivers,
            "bucket_bytes": self.bucket_bytes,
            "offers": self.offers,
        }

    def open(self) -> str:
        """Open a new channel in every member; returns its id. Offers of a collective transport serve one channel."""
        if self.collective:
            self.offers = {m: f.result(60).value for m, f in self.each("offer").items()}
        spec = self.spec()
        for future in self.each("open", spec=spec).values():
            future.result(60)
        self.channel = spec["channel_id"]
        return self.channel

    def arm(self, update_id: str = "", members: Sequence[str] | None = None, **args: Any) -> str:
        """Arm members (default all) for an update; returns its id."""
        update_id = update_id or f"u-{next(self._updates)}"
        args.setdefault("deadline_s", self.deadline_s)
        for future in self.each("arm", members, channel=self.channel, update_id=update_id, **args).values():
            future.result(self.deadline_s + 30)
        return update_id

    def move(self, members: Sequence[str] | None = None, **args: Any) -> dict[str, Future[Answer]]:
        """Start moving in members (default all)."""
        return self.each("move", members, channel=self.channel, **args)

    def update(self, seed: int) -> float:
        """One whole update with the seed's values, checked bit by bit everywhere; returns the slowest's seconds."""
        for future in self.each("fill", self.senders, seed=seed).values():
            future.result(120)
        for future in self.each("fill", self.receivers, seed=-1).values():
            future.result(120)
        self.arm()
        done, _ = wait(self.move().values(), self.deadline_s + 30, FIRST_EXCEPTION)
        for failed in (f for f in done if f.exception()):
            failed.result()
        self.check(seed)
        return float(max(f.result(0).value for f in done))

    def check(self, seed: int, members: Sequence[str] | None = None) -> None:
        """Assert that members (default all, senders too: sending changes nothing) hold exactly the seed's values."""
        wanted: dict[str, dict[str, str]] = {}
        for member, future in self.each("digests", members).items():
            part = self.parts[member]
            if part not in wanted:
                wanted[part] = expected_digests(self.model, part, seed, self._without)
            found = future.result(120).value
            wrong = [n for n in wanted[part] if found.get(n) != wanted[part][n]]
            assert not wrong and len(found) == len(wanted[part]), f"{member}: {len(wrong)} wrong, e.g. {wrong[:5]}"

    def close_channel(self, members: Sequence[str] | None = None) -> dict[str, float]:
        """Close the channel in members (default: all that live); returns seconds by member."""
        alive = [m for m in members or list(self.parts) if self.peers[m].alive]
        return {m: f.result(30).value for m, f in self.each("close", alive, channel=self.channel).items()}

    def close(self) -> None:
        """Give the peers back."""
        self._pool.give(list(self.peers.values()))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Assert that the block takes at most ``seconds``."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took <= seconds, f"took {took:.2f} s, at most {seconds} s are allowed"
