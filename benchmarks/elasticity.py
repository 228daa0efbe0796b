"""What replicas that come and go cost the trainer: the publish after a join or a leave, beside undisturbed ones.

A fleet of ``--replicas`` stays; one more joins before a publish and leaves before another, each followed by an
undisturbed publish of the same fleet: a join is compared with the publish right after it (as many replicas, none of
them new), a leave likewise; the median of these ratios may be 1.10. What is timed is the whole call of ``publish``,
binding and opening channels included.

Processes, engines and transports are the product's (``_update_members.py``); each joiner's engine is made anew, so that
its staging memory is touched for the first time. That it took part is looked at in its memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks._common import Noise, Report, Result, parser
from benchmarks._models import MODELS, model_bytes
from benchmarks._process import MemberFailed, Process, tell_all
from benchmarks._update_members import PHASES
from benchmarks.control_plane import SERVER, line, process
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

ALLOWED = 1.10
DEFAULT = ("transformer", "dense-cpu")
_SCRIPT = Path(__file__).resolve().parent / "_update_members.py"
_GROUPS = count(1)


class Fleet:
    """A trainer, the replicas that stay, and one that comes and goes; a fresh group on one transport."""

    def __init__(self, address: str, name: str, transport: str, mode: str, replicas: int, settle: float) -> None:
        self.address, self.transport, self.mode, self._settle = address, transport, mode, settle
        self.group, self._numbers = f"elastic-{next(_GROUPS)}", count(1)
        env = {"OMP_NUM_THREADS": "1"}
        self.trainer = Process("trainer", _SCRIPT, ["trainer"], env)
        self.stay = [Process(f"stays-{i}", _SCRIPT, ["replica"], env) for i in range(replicas)]
        self.guest = Process("guest", _SCRIPT, ["replica"], env)
        self.all = [self.trainer, *self.stay, self.guest]
        self.guests = 0
        self._channel = grpc.insecure_channel(address)
        self._ask = fleet_pb2_grpc.FleetServiceStub(self._channel)
        tell_all(self.all, "start", device="cpu", name=name)

    def open(self) -> None:
        """The replicas that stay, and the trainer."""
        for p in self.stay:
            self._join(p, p.member)
        self.trainer.call(
            "open",
            address=self.address,
            group=self.group,
            replicas=len(self.stay),
            transport=self.transport,
            bucket_bytes=0,
        )

    def _join(self, p: Process, name: str) -> None:
        staged = self.mode == "staged"
        where = {"address": self.address, "group": self.group, "transport": self.transport}
        p.call("open", replica_id=name, staged=staged, **where)
        end = time.monotonic() + 30
        while self._listed().get(name) != "":  # it has said what it holds: the next update takes it
            if time.monotonic() > end:
                raise MemberFailed(f"{name} does not get into the fleet: {self._listed()}")
            time.sleep(0.01)

    def _listed(self) -> dict[str, str]:
        """Each replica, and why it may not join an update."""
        request = fleet_pb2.ListReplicasRequest(group=self.group)
        return {r.replica_id: r.may_not_join for r in self._ask.ListReplicas(request, timeout=10).replicas}

    def join(self) -> None:
        """The guest comes, under a name of its own each time: as many lives as there are joins."""
        self.guests += 1
        self._join(self.guest, f"guest-{self.guests}")

    def leave(self) -> None:
        """The guest says goodbye, as on SIGTERM."""
        self.guest.call("close")

    def publish(self, guest: bool) -> dict[str, float]:
        """The seconds of the whole call and of its phases; everybody's bytes are looked at."""
        number = next(self._numbers)
        self.trainer.call("mark", number=number)
        time.sleep(self._settle)
        said: dict[str, Any] = self.trainer.call("publish", step=number, mode=self.mode, verify="")
        tell_all([*self.stay, *([self.guest] if guest else [])], "check", number=number)
        if said["retries"]:
            raise MemberFailed(f"publish {number} was made twice")
        seconds = {phase: float(said[phase]) for phase in (*PHASES, "publish")}
        return {**seconds, "before": seconds["publish"] - seconds["total"]}

    def close(self) -> None:
        """End the processes."""
        self._channel.close()
        for p in self.all:
            p.close(5)


def churn(report: Report, fleet: Fleet, label: str, details: dict[str, Any], args: argparse.Namespace) -> None:
    """A join or a leave before each of ``--publishes``, alternating with undisturbed ones."""
    fleet.open()
    taken: dict[str, list[dict[str, float]]] = {"join": [], "with it": [], "leave": [], "without it": []}
    noise = Noise([p.pid for p in fleet.all])
    others: list[float] = []
    for n in range(-args.warm_ups, args.publishes // 2):
        noise.cores()
        fleet.join()
        these = {"join": fleet.publish(True), "with it": fleet.publish(True)}
        fleet.leave()
        these |= {"leave": fleet.publish(False), "without it": fleet.publish(False)}
        others.append(noise.cores())
        if n >= 0:
            for kind, seconds in these.items():
                taken[kind].append(seconds)
    for kind, calm in (("join", "with it"), ("leave", "without it")):
        tell(report, f"undisturbed, {calm}/{label}", taken[calm], details)
        tell(report, f"after a {kind}/{label}", taken[kind], details)
        times = [t["publish"] / u["publish"] for t, u in zip(taken[kind], taken[calm], strict=True)]
        report.add(
            Result.of(
                f"a {kind}, times undisturbed/{label}",
                "x",
                times,
                ALLOWED,
                less_is_better=True,
                limit_name="what the issue allows",
                details=details,
            )
        )
    report.add(Result.of(f"others/{label}", "cores", others), quiet=True)


def tell(report: Report, case: str, taken: Sequence[dict[str, float]], details: dict[str, Any]) -> None:
    """One case's result, with where its time goes. ``before``: the update's own clock; a refused start, binding."""
    phases = {phase: statistics.median(t[phase] for t in taken) for phase in ("before", *PHASES)}
    more = {**details, "phases": {phase: float(f"{s:.4g}") for phase, s in phases.items()}}
    report.add(Result.of(case, "s", [t["publish"] for t in taken], details=more))
    print("    " + ", ".join(f"{phase} {1e3 * s:.1f}" for phase, s in phases.items() if s) + " ms", flush=True)


#: What may be measured; each gets a fresh fleet. 50 joiners at once (catch-up without the trainer) has its place here.
CASES: dict[str, Callable[[Report, Fleet, str, dict[str, Any], argparse.Namespace], None]] = {"churn": churn}


def arguments() -> argparse.ArgumentParser:
    """The options."""
    made = parser(__doc__ or "")
    made.add_argument("--case", action="append", default=[], choices=tuple(CASES), help="repeat; default: all")
    made.add_argument("--transport", action="append", default=[], help="repeat; default: shm, grpc")
    made.add_argument(
        "--model", action="append", default=[], choices=MODELS, help="repeat; default: transformer, dense-cpu"
    )
    made.add_argument("--mode", action="append", default=[], choices=("staged", "in_place"), help="repeat")
    made.add_argument("--replicas", type=int, default=2, help="that stay; default 2")
    made.add_argument("--publishes", type=int, default=100, help="with a join or a leave before; default 100")
    made.add_argument("--settle", type=float, default=0.5, metavar="SECONDS", help="before each publish; default 0.5")
    made.add_argument("--strict", action="store_true", help="exit 1 if more is added than allowed, or anything failed")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Run and report."""
    args = arguments().parse_args(words)
    args.warm_ups = 1
    if args.quick:
        args.publishes = min(args.publishes, 12)
    report = Report("elasticity", args.json)
    with tempfile.TemporaryDirectory(prefix="weightplane-bench-") as folder:
        with process(SERVER, str(Path(folder) / "elasticity.db")) as server:
            address = line(server)
            for name in args.model or DEFAULT[: 1 if args.quick else 2]:
                for transport in args.transport or ("shm", "grpc"):
                    for mode in args.mode or ("staged",):
                        for case in args.case or CASES:
                            label = f"{transport}/{mode}/{name}"
                            details = {"model": name, "bytes": model_bytes(name), "transport": transport, "mode": mode}
                            try:
                                fleet = Fleet(address, name, transport, mode, args.replicas, args.settle)
                                try:
                                    CASES[case](report, fleet, label, {**details, "replicas": args.replicas}, args)
                                finally:
                                    fleet.close()
                            except MemberFailed as e:
                                report.fail(f"{case}/{label}", str(e))
    report.write()
    good = not report.failures and all(r.ratio >= 1 for r in report.results if r.limit)
    return 0 if good or not args.strict else 1


if __name__ == "__main__":
    sys.exit(main())
