"""Transports: one sender process to receiver processes of this host, beside what the host or its cards can do.

*Wire* is the time from go, at the sender, to complete at the last receiver; channel, plan and arming are excluded. With
*digests* both sides also hash every byte bucket by bucket, with the agents' own code, and the time runs until the last
digest is known; every round's bytes are its own, and are compared. A figure is payload per receiver and second, in GB
(10⁹ bytes). ``shm@16MiB+digests/1GiB/1 receiver``: transport, bucket, model, receivers. *cpu* is the CPU time of the
busier process. *others* is what processes that are not ours used meanwhile: with more than a few tenths of a core the
figures say little; ``--patience`` waits for calm moments.

Limits run in the same rounds, in the same processes. On the CPU, into the same memory:
  memcpy          every receiver copies as many bytes from memory of its own, all at once
  socket          the sender's plain TCP sockets over loopback, ``sendall`` to ``recv_into``, a thread for each receiver
  bare grpc       (one receiver) gRPC's Python alone: ready-made messages of 2 MiB, counted and let go
  bare ring       (one receiver, where there is a C compiler) memory into a ring of shared slots and out again, in C:
                  two copies in two processes, as ``shm`` makes them, of memory of its own
  broadcast each  torch.distributed (gloo) broadcasts tensor after tensor, to at most 2 receivers
  copies          (10,000 tiny tensors) one process copies each tensor with ``copy_``
With ``--device cuda`` (sender on GPU 0, receivers on GPU 1 …, or all on GPU 0 with ``--colocated``), 4 GiB at a time:
  peer copy, same-GPU copy, card read, pinned to card, pinned to host   by torch
  broadcast 1GiB, broadcast each                                        torch.distributed (nccl)
and *card digest*: the agents' own hash of the whole model in a card's memory, held against card read.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks._bare_ring import BareRing
from benchmarks._common import GB, GIB, MIB, SAMPLES, WARM_UPS, Report, Result, Rounds, parser
from benchmarks._fleet import Fleet, Layout, Sample, members
from benchmarks._models import MODELS, ON_CPU, REAL, model_bytes
from benchmarks._picture import draw
from benchmarks._process import MemberFailed, Process
from benchmarks._ways import DIGEST_SHARE, FLOORS, bucket_bytes, limit_of
from weightplane.transports.base import Capabilities

Way = Callable[[], Sample]


def size(text: str) -> int:
    """Bytes from ``64MiB``, ``1GiB`` or a plain number."""
    found = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"expected bytes, such as 64MiB or 1GiB, found {text!r}")
    return int(found[1]) * {"": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB}[found[2]]


def size_text(nbytes: int) -> str:
    """``64MiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)


class Crew:
    """The members' processes of one layout; started anew after a failure."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.cards: list[str] = []
        self._start()

    def _start(self) -> None:
        self.sender, self.receivers, self.cards = members(self.layout)

    @property
    def all(self) -> list[Process]:
        """The sender last."""
        return [*self.receivers, self.sender]

    def again(self) -> None:
        """Other processes for what a failure left behind."""
        self.close(0.5)
        self._start()

    def close(self, seconds: float = 10.0) -> None:
        """End them."""
        for p in self.all:
            p.close(seconds)


class Case:
    """One model to so many receivers: everything that is to be measured, and what of it works."""

    def __init__(self, crew: Crew, name: str, receivers: int, report: Report, args: argparse.Namespace) -> None:
        self.crew, self.name, self.receivers, self.report, self.args = crew, name, receivers, report, args
        self.layout = crew.layout.name
        where = "" if self.layout == "cpu" else f"/{self.layout}"
        self.label = f"{name}/{receivers} receiver{'s' if receivers > 1 else ''}{where}"
        self.failed: set[str] = set()  # limits and transports
        self.current = ""

    def measure(self, transports: dict[str, Capabilities]) -> None:
        """All of it; what fails is left out, in fresh processes, and reported."""
        while True:
            self.current = ""
            try:
                return self._measure({t: c for t, c in transports.items() if t not in self.failed})
            except MemberFailed as e:
                self.report.fail(f"{self.current or 'load'}/{self.label}", str(e))
                self.crew.again()
                if not self.current:
                    return
                self.failed.add(self.current)

    def _measure(self, transports: dict[str, Capabilities]) -> None:
        crew = self.crew
        fleet = Fleet(crew.sender, crew.receivers[: self.receivers], self.name, crew.layout)
        limits = dict(self._limits(fleet))
        wires: dict[str, tuple[str, int]] = {}  # way -> transport, bucket
        ways: dict[str, Way] = dict(limits)
        for transport, c in transports.items():
            for bucket in self.args.bucket_bytes or [bucket_bytes(c, self.layout)]:
                self.current, channel = transport, f"{transport}@{size_text(bucket)}"
                fleet.open(channel, transport, bucket)
                for digests in self.args.digests:
                    way = f"{channel}{'+digests' if digests else ''}"
                    wires[way] = (transport, bucket)
                    ways[way] = partial(fleet.wire, channel, digests)
        samples, warm_ups = (3, 1) if self.args.quick else (SAMPLES, WARM_UPS)
        taken: dict[str, list[Sample]] = {way: [] for way in ways}
        rounds = Rounds(samples, warm_ups, [p.pid for p in fleet.members], self.args.patience)
        # Every way and every limit once a round, interleaved, so that all see the same noise; medians over the rounds.
        for counts in rounds:
            these = {}
            for way, take in ways.items():
                self.current = wires[way][0] if way in wires else way
                these[way] = take()
            if counts and not rounds.spoilt():
                for way, sample in these.items():
                    taken[way].append(sample)
        self._report(taken, limits, wires, transports, rounds.noise)
        for way in wires if self.args.profile else ():
            self.current = wires[way][0]
            channel, _, digests = way.partition("+")
            self.report.profiles[f"{way}/{self.label}"] = fleet.profile(channel, bool(digests))
        self.current = ""
        fleet.close()

    def _limits(self, fleet: Fleet) -> Iterator[tuple[str, Way]]:
        """The limits of this case that work."""
        found: dict[str, Way] = {}
        together, alone, broadcast = fleet.together, fleet.alone, fleet.broadcast
        if self.name == "tiny":
            found["copies"] = partial(alone, "host.copies")
        elif self.layout == "cpu":
            fleet.connect()
            found |= {"memcpy": partial(together, "host.memcpy"), "socket": fleet.socket}
            if self.receivers == 1:
                found["bare grpc"] = partial(fleet.socket, "bare_grpc")
                if why := BareRing.missing():
                    print(f"bare ring: not measured: {why}")
                else:
                    found["bare ring"] = partial(alone, "bare_ring.run")
            if self.receivers <= 2:
                found["broadcast each"] = partial(broadcast, "each")
        else:
            if self.layout == "across":
                found["peer copy"] = partial(together, "card.peer_copy")
                found["broadcast 1GiB"], found["broadcast each"] = partial(broadcast, "big"), partial(broadcast, "each")
            found |= {
                "same-GPU copy": partial(together, "card.same_gpu_copy"),
                "card read": partial(alone, "card.read"),
                "card digest": partial(alone, "digest"),
                "pinned to card": partial(alone, "card.to_card"),
                "pinned to host": partial(alone, "card.to_host"),
            }
        found = {name: way for name, way in found.items() if name not in self.failed}
        groups = [name for name in found if name.startswith("broadcast")]
        if groups:
            self.current = groups[0]
            fleet.join()
        yield from found.items()

    def _report(
        self,
        taken: dict[str, list[Sample]],
        limits: dict[str, Way],
        wires: dict[str, tuple[str, int]],
        transports: dict[str, Capabilities],
        noise: Sequence[float],
    ) -> None:
        tiny = self.name == "tiny"
        unit = "ms" if tiny else "GB/s"
        figures = {w: [1e3 * s.wall if tiny else s.nbytes / GB / s.wall for s in ss] for w, ss in taken.items()}
        for way, ss in taken.items():
            details: dict[str, Any] = {
                "model": self.name,
                "bytes": int(ss[0].nbytes),
                "receivers": self.receivers,
                "layout": self.layout,
                "cards": self.crew.cards[: 1 + self.receivers],
            }
            against = ""
            if way in wires:
                transport, details["bucket_bytes"] = wires[way]
                details |= {"transport": transport, "digests": way.endswith("+digests")}
                against = "copies" if tiny else limit_of(transports[transport], self.layout)
            elif way == "card digest":
                against = "card read"
            limit = statistics.median(figures[against]) if against in limits else 0.0
            case = f"{way}/{self.label}"
            made = Result.of(case, unit, figures[way], limit, less_is_better=tiny, limit_name=against, details=details)
            self.report.add(made)
        if self.receivers == 1 and self.layout == "cpu" and not tiny:
            for way, ss in taken.items():
                busy = [s.cpu / (s.nbytes / GB) for s in ss]
                self.report.add(Result.of(f"{way}/{self.label}/cpu", "s/GB", busy))
        self.report.add(Result.of(f"others/{self.label}", "cores", noise))


def usable(crew: Crew, asked: Sequence[str]) -> dict[str, Capabilities]:
    """The transports to measure, as the members see them."""
    found: dict[str, Capabilities] = {}
    layout = crew.layout.name
    kind = "cpu" if layout == "cpu" else "cuda"
    registered: dict[str, dict[str, Any]] = crew.sender.call("available")
    for name, said in registered.items():
        if asked and name not in asked:
            continue
        why, c = said["reason"], None
        if not why:
            kinds = frozenset(said["capabilities"].pop("device_kinds"))
            c = Capabilities(device_kinds=kinds, **said["capabilities"])
            if not (c.moves_bytes and kind in c.device_kinds):
                why = f"it moves no bytes of {kind} memory itself"
            elif c.collective and layout == "colocated":
                why = "a collective takes each GPU once"
        if c is not None and not why:
            found[name] = c
        else:
            print(f"{name}: not measured: {why}")
    missing = set(asked) - set(registered)
    if missing:
        raise SystemExit(f"no transport {', '.join(sorted(missing))}; registered: {', '.join(registered)}")
    return found


def verdict(report: Report, layout: str) -> bool:
    """Print every floor that this run can judge; whether all are met. With several bucket sizes the best one counts."""
    good = True
    for r in report.results:
        if r.case.startswith("card digest/"):
            met = r.ratio >= DIGEST_SHARE
            good = good and met
            print(f"{r.case}: {r.ratio:.3f} of {r.limit_name}, floor {DIGEST_SHARE}: {'met' if met else 'MISSED'}")
    for floor in FLOORS:
        for name in floor.models if floor.layout == layout else ():
            found = [
                r
                for r in report.results
                if r.limit
                and r.details.get("transport") == floor.transport
                and (r.details["model"], r.details["receivers"], r.details["digests"]) == (name, 1, False)
            ]
            if not found:
                continue
            best = max(found, key=lambda r: r.ratio)
            met = best.ratio >= floor.share
            good = good and met
            print(
                f"{best.case}: {best.ratio:.3f} of {best.limit_name} in this run, floor {floor.share}: "
                f"{'met' if met else 'MISSED'}"
            )
    return good


def arguments() -> argparse.ArgumentParser:
    """The options."""
    made = parser(__doc__ or "")
    made.add_argument("--transport", action="append", default=[], help="a registered one; repeat; default all usable")
    made.add_argument("--model", action="append", default=[], choices=MODELS, help="repeat")
    made.add_argument("--receivers", action="append", default=[], type=int, help="repeat; default: see receivers_of")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--colocated", action="store_true", help="with --device cuda: everything on GPU 0")
    buckets = "repeat; by default what _ways.py says for the transport"
    made.add_argument("--bucket-bytes", action="append", default=[], type=size, metavar="SIZE", help=buckets)
    made.add_argument("--digests", choices=("on", "off", "both"), default="both")
    made.add_argument("--profile", action="store_true", help="note where the members spend their time, in the JSON")
    made.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the figures beside their limits")
    made.add_argument("--strict", action="store_true", help="exit 1 if a floor is missed or anything failed")
    return made


def receivers_of(name: str, args: argparse.Namespace) -> list[int]:
    """As asked; or one, and 2 and 8 where a host without cards holds that many copies and moves them in seconds."""
    if args.receivers:
        return list(args.receivers)
    if args.device == "cuda" or model_bytes(name) > GB // 2:
        return [1]
    return [1, 2] if args.quick else [1, 2, 8]


def main(words: Sequence[str] | None = None) -> int:
    """Run and report; 1 with ``--strict`` if a floor was missed."""
    args = arguments().parse_args(words)
    cuda = args.device == "cuda"
    args.digests = {"on": [True], "off": [False], "both": [False, True]}[args.digests]
    quick = ["16MiB", "1GiB", "tiny"]
    models = args.model or (list(REAL) if cuda else quick if args.quick else list(ON_CPU))
    report = Report("transports", args.json, cuda=cuda)
    most = max(n for name in models for n in receivers_of(name, args))
    layout = Layout.of(args.device, args.colocated, most, len(report.machine.get("cards", ())))
    crew = Crew(layout)
    try:
        transports = usable(crew, args.transport)
        for name in models:
            for n in receivers_of(name, args):
                Case(crew, name, n, report, args).measure(transports)
    finally:
        crew.close()
    good = verdict(report, layout.name) and not report.failures
    report.write()
    if args.picture is not None:
        draw(report.document(), args.picture)
    return 0 if good or not args.strict else 1


if __name__ == "__main__":
    sys.exit(main())
