"""What catch-up costs: how long one joiner takes, and what fifty at once do to the publishes of the others.

Two replicas stay, one of them retains what is committed in memory; the joiners are agents with engines of their own in
one more process, which runs (with the helper of each) only where nobody else wants a core: on real hosts their work is
not the trainer's. Fifty on a few cores leave none idle, though; the JSON says how many there were. **Alone**: from a
joiner's first word to READY, beside one memcpy of its bytes. **Publish beside joiners**: publishes to the two go on,
each ``--settle`` after the one before, from when the first is started until the last is READY, in ``--rounds`` such
crowds; compared with ``--publishes`` right before each. The limit: 1.10 times the calm median of the same run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks._background import Background
from benchmarks._common import Report, Result, parser
from benchmarks._models import MODELS, model_bytes
from benchmarks._process import MemberFailed, Process, tell_all
from benchmarks.control_plane import SERVER, line, process
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

ALLOWED = 1.10
_MEMBERS = Path(__file__).resolve().parent / "_update_members.py"
_CROWD = Path(__file__).resolve().parent / "_crowd.py"
_GROUP = "catch-up"
_PATIENCE_S = 120.0
_STAY = {"stays": "yes"}  # who joined takes part in no publish here: what that costs is elasticity.py's question


class Fleet:
    """A trainer, two replicas that stay, and a crowd that comes at once."""

    def __init__(self, address: str, args: argparse.Namespace, transport: str) -> None:
        env = {"OMP_NUM_THREADS": "1"}
        self.address, self.transport = address, transport
        self.trainer = Process("trainer", _MEMBERS, ["trainer"], env)
        self.stay = [Process(f"stays-{i}", _MEMBERS, ["replica"], env) for i in range(2)]
        self.crowd = Process("crowd", _CROWD, [], env)
        self.background = Background("crowd")
        self.background.take(self.crowd.pid)
        self.settle, self.number, self.came = args.settle, 0, 0
        self.joined: set[str] = set()
        self._channel = grpc.insecure_channel(address)
        self._ask = fleet_pb2_grpc.FleetServiceStub(self._channel)
        tell_all([self.trainer, *self.stay], "start", device="cpu", name=args.model)
        self.crowd.call("start", name=args.model, count=max(args.joiners, 1))

    def open(self) -> None:
        """Who stays, and the trainer; a first publish, so that something is committed."""
        where = {"address": self.address, "group": _GROUP, "transport": self.transport}
        for i, p in enumerate(self.stay):
            p.call("open", replica_id=p.member, staged=True, retain=i == 0, **where)
        self.trainer.call("open", replicas=2, bucket_bytes=0, **where)
        self.publish()

    def publish(self) -> float:
        """The seconds of the whole call."""
        self.number += 1
        self.trainer.call("mark", number=self.number)
        time.sleep(self.settle)
        how = {"mode": "staged", "verify": "", "replica_selector": _STAY}
        said: dict[str, Any] = self.trainer.call("publish", step=self.number, **how)
        tell_all(self.stay, "check", number=self.number)
        return float(said["publish"])

    def join(self, count: int) -> None:
        """So many joiners at once, under names of their own. They begin to come."""
        names = [f"joins-{self.came + i}" for i in range(count)]
        self.came, self.joined = self.came + count, set(names)
        self.crowd.tell("join", address=self.address, group=_GROUP, transport=self.transport, names=names)

    def leave(self) -> None:
        """Those who came go."""
        self.crowd.answer()
        self.crowd.call("leave")

    def late(self) -> list[str]:
        """The newest joiners that hold nothing yet, with what is said of each."""
        listed = self._ask.ListReplicas(fleet_pb2.ListReplicasRequest(group=_GROUP), timeout=10).replicas
        told = {r.replica_id: "" if r.held.version else r.catch_up or r.may_not_join or "nothing" for r in listed}
        return [f"{name}: {told.get(name, 'unknown')}" for name in sorted(self.joined) if told.get(name, "unknown")]

    def wait_all(self, began: float) -> float:
        """Seconds from ``began`` until no joiner is late."""
        while self.late():
            if time.monotonic() - began > _PATIENCE_S:
                raise MemberFailed(f"after {_PATIENCE_S:.0f} s these hold nothing: {self.late()}")
            time.sleep(0.01)
        return time.monotonic() - began

    def close(self) -> None:
        """End the processes."""
        self._channel.close()
        for p in (self.trainer, *self.stay, self.crowd):
            p.close(5)
        self.background.close()


def run(report: Report, fleet: Fleet, args: argparse.Namespace, label: str) -> None:
    """All cases on one fleet."""
    details = {"model": args.model, "bytes": model_bytes(args.model), "transport": fleet.transport}
    details["joiners"] = fleet.background.how
    fleet.open()
    alone: list[float] = []
    for _ in range(args.samples + 1):
        began = time.monotonic()
        fleet.join(1)
        alone.append(fleet.wait_all(began))
        fleet.leave()
    copy_s = fleet.crowd.call("memcpy", name=args.model)
    report.add(Result.of(f"one joiner/{label}", "s", alone[1:], copy_s, less_is_better=True, details=details))
    fleet.publish()
    calm: list[float] = []
    beside: list[float] = []
    took: list[float] = []
    for _ in range(args.rounds):
        calm += [fleet.publish() for _ in range(args.publishes)]
        began = time.monotonic()
        fleet.join(args.joiners)
        while fleet.late():
            beside.append(fleet.publish())
            if time.monotonic() - began > _PATIENCE_S:
                raise MemberFailed(f"after {_PATIENCE_S:.0f} s these hold nothing: {fleet.late()}")
        took.append(time.monotonic() - began)
        fleet.leave()
    undisturbed = report.add(Result.of(f"publish, calm/{label}", "s", calm, details=details))
    limit = ALLOWED * undisturbed.value
    name = f"publish beside {args.joiners} joiners/{label}"
    said = report.add(
        Result.of(name, "s", beside, limit, less_is_better=True, limit_name="1.10 x calm", details=details)
    )
    print(
        f"    {args.joiners} joiners add {100 * (said.value / undisturbed.value - 1):+.1f} % to {len(beside)} publishes"
    )
    report.add(Result.of(f"{args.joiners} joiners, all READY/{label}", "s", took, details=details))


def arguments() -> argparse.ArgumentParser:
    """The options."""
    made = parser(__doc__ or "")
    made.add_argument("--transport", action="append", default=[], help="repeat; default: shm, grpc")
    made.add_argument("--model", default="16MiB", choices=MODELS, help="default 16MiB: fifty fit a small machine")
    made.add_argument("--joiners", type=int, default=50, help="at once; default 50")
    made.add_argument("--publishes", type=int, default=8, help="calm ones before each crowd; default 8")
    made.add_argument("--rounds", type=int, default=3, help="crowds, one after the other; default 3")
    made.add_argument("--samples", type=int, default=5, help="of one joiner; default 5")
    made.add_argument("--settle", type=float, default=0.3, metavar="SECONDS", help="before each publish; default 0.3")
    made.add_argument("--strict", action="store_true", help="exit 1 if more is added than allowed, or anything failed")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Run and report."""
    args = arguments().parse_args(words)
    if args.quick:
        args.publishes, args.samples, args.rounds = 6, 2, 1
    report = Report("catch_up", args.json)
    for transport in args.transport or ("shm", "grpc"):
        with tempfile.TemporaryDirectory(prefix="weightplane-bench-") as folder:
            with process(SERVER, os.path.join(folder, "catch-up.db")) as server:
                try:
                    fleet = Fleet(line(server), args, transport)
                    try:
                        run(report, fleet, args, f"{transport}/{args.model}")
                    finally:
                        fleet.close()
                except MemberFailed as e:
                    report.fail(f"catch-up/{transport}", str(e))
    report.write()
    good = not report.failures and all(r.ratio >= 1 for r in report.results if r.case.startswith("publish beside"))
    return 0 if good or not args.strict else 1


if __name__ == "__main__":
    sys.exit(main())
