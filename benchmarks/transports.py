"""Transports: one sender process to 1, 2 and 8 receiver processes of this host, beside what the host can do.

*Wire* is the time from go, at the sender, to complete at the last receiver; channel, plan and arming are excluded. With
*digests* both sides also hash every byte bucket by bucket, with the agents' own code, and the time runs until the last
digest is known; every round's digests are compared. A figure is payload per receiver and second. *cpu* is the CPU time
of the busier of the two processes. *others* is what processes that are not ours used meanwhile: with more than a few
tenths of a core the figures say little; ``--patience`` waits for calm moments.

Limits run in the same rounds, in the same processes, into the same memory:
  memcpy  every receiver copies as many bytes from memory of its own, all at once (1 receiver: one thread's memcpy)
  socket  the sender's plain TCP sockets over loopback, ``sendall`` to ``recv_into``, a thread for each receiver
  copies  (10,000 tiny tensors) one process copies each tensor with ``copy_``
A transport that can cross hosts is held against the socket, others against memcpy.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import hashlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import Piece, Placement, full_box
from weightplane.controlplane.core.planner import make_plan
from weightplane.trainer_agent.hashing import LaneHasher, RegionDigests
from weightplane.transports import registry
from weightplane.transports.base import ArmToken, ChannelSpec, ReceiveChannel, SendChannel
from weightplane.transports.buckets import PieceDigests, SinkSpans, SourceSpans
from weightplane.transports.digest import memory_of
from weightplane.transports.dtypes import as_bytes, dtype_of
from weightplane.v1.transport_pb2 import Rendezvous

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from benchmarks._common import GIB, MIB, SAMPLES, WARM_UPS, Report, Result, Rounds, parser

BUCKET_BYTES = 16 << 20  # the product's default
TIMEOUT_S = 300.0
MODELS = ("16MiB", "256MiB", "1GiB", "transformer", "tiny")
#: What must be reached at 1 GiB to one receiver, by transport: the share of its limit.
FLOORS = {"shm": 0.70, "grpc": 0.50}

Shape = tuple[str, str, tuple[int, ...]]


def model(name: str) -> list[Shape]:
    """A tensor list by name: N MiB in four tensors, a decoder's 339 tensors (323 MB), or 10,000 tiny ones."""
    sizes = {"16MiB": 16 * MIB, "256MiB": 256 * MIB, "1GiB": GIB}
    if name in sizes:
        return [(f"blob.{i}", "uint8", (sizes[name] // 4,)) for i in range(4)]
    if name == "tiny":
        dtypes = ("float32", "bfloat16", "uint8", "int64")
        return [(f"layers.{i}.bias", dtypes[i % 4], (1 + i % 16,)) for i in range(10_000)]
    if name != "transformer":
        raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
    # The list of a 28-layer grouped-query decoder (Qwen2.5-1.5B's names and count), at a third of its width.
    hidden, kv, inner, vocab = 512, 128, 2944, 32064
    layer: list[tuple[str, tuple[int, ...]]] = [
        ("input_layernorm.weight", (hidden,)),
        ("self_attn.q_proj.weight", (hidden, hidden)),
        ("self_attn.q_proj.bias", (hidden,)),
        ("self_attn.k_proj.weight", (kv, hidden)),
        ("self_attn.k_proj.bias", (kv,)),
        ("self_attn.v_proj.weight", (kv, hidden)),
        ("self_attn.v_proj.bias", (kv,)),
        ("self_attn.o_proj.weight", (hidden, hidden)),
        ("post_attention_layernorm.weight", (hidden,)),
        ("mlp.gate_proj.weight", (inner, hidden)),
        ("mlp.up_proj.weight", (inner, hidden)),
        ("mlp.down_proj.weight", (hidden, inner)),
    ]
    body = [(f"model.layers.{i}.{n}", "bfloat16", s) for i in range(28) for n, s in layer]
    head: list[Shape] = [("model.norm.weight", "bfloat16", (hidden,)), ("lm_head.weight", "bfloat16", (vocab, hidden))]
    return [("model.embed_tokens.weight", "bfloat16", (vocab, hidden)), *body, *head]


# --- a member, in its own process ---

_memmove = ctypes.CDLL(None).memmove  # frees the GIL
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Member:
    """One sender or receiver. Commands run one after another; times are ``time.monotonic()``, one clock for all."""

    def start(self, member: str, transports: list[str]) -> dict[str, str]:
        """Make the transports; returns this member's offers."""
        torch.set_num_threads(1)
        self.member = member
        self._channels: dict[str, SendChannel | ReceiveChannel] = {}
        self._sockets: list[socket.socket] = []
        offers = {name: registry.get(name).offer(member) for name in transports}
        return {name: base64.b64encode(o.SerializeToString()).decode() for name, o in offers.items()}

    def load(self, name: str, sender: str, receivers: list[str], scratch: int) -> dict[str, int]:
        """Allocate and touch the tensors and ``scratch`` bytes to copy from; make the plan."""
        shapes = model(name)
        manifest = Manifest.of(TensorMeta(n, dtype, shape, "") for n, dtype, shape in shapes)
        self._tensors = [torch.zeros(shape, dtype=dtype_of(dtype)) for _, dtype, shape in shapes]
        self._bytes = [as_bytes(t) for t in self._tensors]
        for flat in self._bytes:
            flat.fill_(0 if self.member == sender else 0xA5)
        self._scratch = torch.full((scratch,), 0x5A, dtype=torch.uint8)
        self._others = [t.clone() for t in self._tensors] if name == "tiny" else []
        pieces = [Piece(i, full_box(shape)) for i, (_, _, shape) in enumerate(shapes)]
        self._plan = make_plan(
            manifest, [Placement.of(sender, pieces)], [Placement.of(r, pieces) for r in receivers], BUCKET_BYTES
        )
        boxes = {i: (t, full_box(tuple(t.shape))) for i, t in enumerate(self._tensors)}
        kind = SourceSpans if self.member == sender else SinkSpans
        self._spans: SourceSpans | SinkSpans = kind(self._plan, manifest, self.member, boxes)
        return {"tensors": len(shapes), "bytes": self._plan.nbytes, "buckets": len(self._plan.buckets)}

    def mark(self, number: int) -> None:
        """Change every tensor, so that a round's bytes are its own."""
        for flat in self._bytes:
            flat[:8] = number % 251

    def open(self, spec: dict[str, Any]) -> None:
        """Open this member's side of a channel."""
        offers = {m: Rendezvous.FromString(base64.b64decode(o)) for m, o in spec["offers"].items()}
        lists = {k: tuple(spec[k]) for k in ("senders", "receivers")}
        made = ChannelSpec(**{**spec, **lists, "key": bytes.fromhex(spec["key"]), "offers": offers})
        transport = registry.get(made.transport)
        opened = transport.open_sender if self.member in made.senders else transport.open_receiver
        self._channels[made.transport] = opened(made, self.member)

    def arm(self, transport: str, update: str) -> None:
        """Arm for all of this member's buckets."""
        self._channels[transport].arm(ArmToken(update, 1, 1), self._spans.buckets, time.monotonic() + TIMEOUT_S)

    def wire(self, transport: str, digests: bool) -> dict[str, Any]:
        """Send or receive one update. ``end``: complete here; with digests, hashed too."""
        channel, spans = self._channels[transport], self._spans
        if isinstance(channel, SendChannel):
            assert isinstance(spans, SourceSpans)
            return self._send(channel, spans, digests)
        assert isinstance(spans, SinkSpans)
        found = PieceDigests(self._plan, spans.buckets) if digests else None
        start = time.monotonic()
        for bucket in spans.buckets:
            parts = spans.spans(bucket)
            channel.receive(bucket, parts)
            spans.complete(bucket)
            if found is not None:
                found.feed(bucket, parts)
        values = found.values() if found is not None else {}
        return {"start": start, "end": time.monotonic(), "digest": _summary(values)}

    def _send(self, channel: SendChannel, spans: SourceSpans, digests: bool) -> dict[str, Any]:
        start = time.monotonic()
        values = RegionDigests([self._plan], self.member, share=False)
        hasher = LaneHasher(0, self._plan, values) if digests else None
        for bucket in spans.buckets:
            parts = spans.spans(bucket)
            if hasher is not None:
                hasher.feed(bucket, parts)
            channel.send(bucket, parts)
        end = start
        if hasher is not None:
            hasher.finish()
            end = time.monotonic()
        channel.flush()
        return {"start": start, "end": end, "digest": _summary(values.values)}

    # --- limits

    def memcpy(self) -> dict[str, float]:
        """Copy from scratch into every tensor."""
        base, size, at = self._scratch.data_ptr(), self._scratch.numel(), 0
        start = time.monotonic()
        for flat in self._bytes:
            done, n = 0, flat.numel()
            while done < n:
                step = min(n - done, size - at)
                _memmove(flat.data_ptr() + done, base + at, step)
                done += step
                at = (at + step) % size
        return {"start": start, "end": time.monotonic()}

    def copies(self) -> dict[str, float]:
        """Copy every tensor with ``copy_``."""
        start = time.monotonic()
        for to, source in zip(self._tensors, self._others, strict=True):
            to.copy_(source)
        return {"start": start, "end": time.monotonic()}

    def listen(self) -> int:
        """Listen for the receivers' sockets; returns the port."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        return int(self._listener.getsockname()[1])

    def accept(self, receivers: int) -> None:
        """Take the receivers' connections."""
        self._sockets = [self._listener.accept()[0] for _ in range(receivers)]
        self._listener.close()
        self._tune()

    def connect(self, port: int) -> None:
        """Connect to the sender."""
        self._sockets = [socket.create_connection(("127.0.0.1", port))]
        self._tune()

    def _tune(self) -> None:
        for s in self._sockets:
            s.settimeout(TIMEOUT_S)
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def socket(self, sender: bool) -> dict[str, float]:
        """Send every tensor to every receiver, or receive them."""
        views = [memory_of(flat, writable=True) for flat in self._bytes]
        start = time.monotonic()
        if not sender:
            (sock,) = self._sockets
            for view in views:
                at, n = 0, len(view)
                while at < n:
                    got = sock.recv_into(view[at:])
                    if not got:
                        raise ConnectionError("the sender hung up")
                    at += got
            return {"start": start, "end": time.monotonic()}

        def send(sock: socket.socket) -> None:
            for view in views:
                sock.sendall(view)

        threads = [threading.Thread(target=send, args=(s,)) for s in self._sockets[1:]]
        for thread in threads:
            thread.start()
        send(self._sockets[0])
        for thread in threads:
            thread.join()
        return {"start": start, "end": start}

    def unload(self) -> None:
        """Close channels and sockets and let go of the tensors."""
        for channel in self._channels.values():
            channel.close()
        for sock in self._sockets:
            sock.close()
        self._channels, self._sockets = {}, []
        del self._tensors, self._bytes, self._scratch, self._others, self._spans, self._plan


def _summary(values: dict[Any, int]) -> str:
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()


def serve() -> None:
    """A member's loop: JSON lines in, JSON lines out."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    member = Member()
    for line in sys.stdin:
        command = json.loads(line)
        busy = time.process_time()
        value = getattr(member, command["op"])(**command["args"])
        if isinstance(value, dict) and "end" in value:
            value["cpu"] = time.process_time() - busy
        out.write(json.dumps({"value": value}) + "\n")
    registry.shutdown()


# --- the driver ---


class Process:
    """One member's process. An error there ends it: its traceback is on stderr."""

    def __init__(self, member: str) -> None:
        self.member = member
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--member"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, op: str, **args: Any) -> None:
        """Give a command; ``answer`` must follow."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, "args": args}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for a command's value. Members bound their own waits."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.member} died; see above")
        return json.loads(line)["value"]

    def call(self, op: str, **args: Any) -> Any:
        """A command and its value."""
        self.tell(op, **args)
        return self.answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Timing(NamedTuple):
    """Seconds of wall clock, and of CPU in the process that used most."""

    wall: float
    cpu: float


def _timing(answers: Sequence[dict[str, Any]], go: float) -> Timing:
    return Timing(max(a["end"] for a in answers) - go, max(a["cpu"] for a in answers))


class Fleet:
    """The sender and the receivers of one case, loaded, with a channel of every transport and a socket each."""

    def __init__(self, sender: Process, receivers: Sequence[Process], name: str, transports: Sequence[str],
                 offers: dict[str, dict[str, str]]) -> None:  # fmt: skip
        self.sender, self.receivers, self.name = sender, receivers, name
        self.members = [*receivers, sender]
        self._updates = count(1)
        names = [r.member for r in receivers]
        total = sum(torch.empty(s, dtype=dtype_of(d), device="meta").nbytes for _, d, s in model(name))
        scratch = min(total, GIB if len(receivers) == 1 else 256 * MIB)
        for p in self.members:
            p.tell("load", name=name, sender=sender.member, receivers=names, scratch=scratch if p is not sender else 1)
        loaded = [p.answer() for p in self.members]
        self.nbytes = int(loaded[0]["bytes"])
        for transport in transports:
            spec = {
                "channel_id": f"bench-{secrets.token_hex(8)}",
                "group": "bench",
                "transport": transport,
                "key": secrets.token_hex(32),
                "senders": [sender.member],
                "receivers": names,
                "bucket_bytes": BUCKET_BYTES,
                "offers": {p.member: offers[p.member][transport] for p in self.members},
            }
            self._all("open", spec=spec)
        port = sender.call("listen")
        for r in receivers:
            r.call("connect", port=port)
        sender.call("accept", receivers=len(receivers))

    def _all(self, op: str, **args: Any) -> list[Any]:
        for p in self.members:
            p.tell(op, **args)
        return [p.answer() for p in self.members]

    def wire(self, transport: str, digests: bool) -> Timing:
        """One update."""
        number = next(self._updates)
        self.sender.call("mark", number=number)
        self._all("arm", transport=transport, update=f"u-{number}")
        answers = self._all("wire", transport=transport, digests=digests)
        if digests and len({a["digest"] for a in answers}) != 1:
            raise SystemExit(f"{transport}: the receivers do not hold what was sent")
        return _timing(answers, answers[-1]["start"])

    def memcpy(self) -> Timing:
        """Until every receiver has copied."""
        for r in self.receivers:
            r.tell("memcpy")
        answers = [r.answer() for r in self.receivers]
        return _timing(answers, min(a["start"] for a in answers))

    def socket(self) -> Timing:
        """Until every receiver has all by plain socket."""
        for p in self.members:
            p.tell("socket", sender=p is self.sender)
        answers = [p.answer() for p in self.members]
        return _timing(answers, answers[-1]["start"])

    def copies(self) -> Timing:
        """``copy_`` for each tensor, in one receiver."""
        answer = self.receivers[0].call("copies")
        return _timing([answer], answer["start"])

    def close(self) -> None:
        """Unload."""
        self._all("unload")


def measure(fleet: Fleet, transports: Sequence[str], report: Report, samples: int, warm_ups: int,
            patience: float) -> None:  # fmt: skip
    """Every way and every limit once a round, interleaved, so that all see the same noise; medians over the rounds."""
    tiny, n = fleet.name == "tiny", len(fleet.receivers)
    limits: dict[str, Callable[[], Timing]] = (
        {"copies": fleet.copies} if tiny else {"memcpy": fleet.memcpy, "socket": fleet.socket}
    )
    ways: dict[str, Callable[[], Timing]] = dict(limits)
    for transport in transports:
        for digests in (False, True):
            key = f"{transport}{'+digests' if digests else ''}"
            ways[key] = lambda t=transport, d=digests: fleet.wire(t, d)  # type: ignore[misc]
    taken: dict[str, list[Timing]] = {key: [] for key in ways}
    rounds = Rounds(samples, warm_ups, [p.pid for p in fleet.members], patience)
    for counts in rounds:
        timings = {key: way() for key, way in ways.items()}
        if counts and not rounds.spoilt():
            for key, timing in timings.items():
                taken[key].append(timing)
    unit, gib = ("ms", 1.0) if tiny else ("GiB/s", fleet.nbytes / GIB)
    figures = {k: [1e3 * t.wall if tiny else gib / t.wall for t in ts] for k, ts in taken.items()}
    label = f"{fleet.name}/{n} receiver{'s' if n > 1 else ''}"
    for key in ways:
        against = key if key in limits else "copies" if tiny else limit_of(key.partition("+")[0])
        limit = 0.0 if key in limits else statistics.median(figures[against])
        report.add(Result.of(f"{key}/{label}", unit, figures[key], limit, less_is_better=tiny))
    if n == 1 and not tiny:
        for key, ts in taken.items():
            report.add(Result.of(f"{key}/{label}/cpu", "s/GiB", [t.cpu / gib for t in ts]))
    report.add(Result.of(f"others/{label}", "cores", rounds.noise))


def limit_of(transport: str) -> str:
    """What a transport is held against."""
    return "socket" if registry.get(transport).capabilities.cross_host else "memcpy"


def _usable(asked: list[str]) -> list[str]:
    chosen = []
    for name, probe in registry.available().items():
        if asked and name not in asked:
            continue
        capabilities = registry.get(name).capabilities if probe.ok else None
        why = probe.reason
        if capabilities is not None and not (capabilities.moves_bytes and "cpu" in capabilities.device_kinds):
            why = "it moves no bytes of CPU memory itself"
        if not why:
            chosen.append(name)
        else:
            print(f"{name}: not measured: {why}")
    missing = set(asked) - set(registry.names())
    if missing:
        raise SystemExit(f"no transport {', '.join(sorted(missing))}; registered: {', '.join(registry.names())}")
    return chosen


def _verdict(report: Report) -> bool:
    good = True
    for transport, floor in FLOORS.items():
        found = report.find(f"{transport}/1GiB/1 receiver")
        if found is not None:
            met = found.ratio >= floor
            good = good and met
            text = "met" if met else "MISSED"
            print(
                f"1 GiB by {transport}: {found.ratio:.2f} of {limit_of(transport)} in this run, floor {floor}: {text}"
            )
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; 1 with ``--strict`` if a floor was missed."""
    made = parser(__doc__ or "")
    made.add_argument("--transport", action="append", default=[], help="a registered one; repeat; default all usable")
    made.add_argument("--model", action="append", default=[], choices=MODELS, help="repeat; default all")
    made.add_argument("--receivers", action="append", default=[], type=int, help="repeat; default 1, 2 and 8")
    made.add_argument("--strict", action="store_true", help="exit 1 if a floor is missed")
    made.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    args = made.parse_args(arguments)
    if args.member:
        serve()
        return 0
    transports = _usable(args.transport)
    models = args.model or (["16MiB", "1GiB", "tiny"] if args.quick else MODELS)
    receivers = args.receivers or ([1, 2] if args.quick else [1, 2, 8])
    samples, warm_ups = (3, 1) if args.quick else (SAMPLES, WARM_UPS)
    report = Report("transports")
    sender, others = Process("rank/0"), [Process(f"r{i}/0") for i in range(max(receivers))]
    try:
        offers = {p.member: p.call("start", member=p.member, transports=transports) for p in [sender, *others]}
        for name in models:
            for n in receivers:
                fleet = Fleet(sender, others[:n], name, transports, offers)
                measure(fleet, transports, report, samples, warm_ups, args.patience)
                fleet.close()
    finally:
        for p in [sender, *others]:
            p.close()
    good = _verdict(report)
    report.write(args.json)
    return 0 if good or not args.strict else 1


if __name__ == "__main__":
    sys.exit(main())
