"""Whole updates: from the call of StartUpdate to FinishUpdate's answer with the replicas READY, on the trainer's clock.

Control plane, trainer (``Publisher``, ``ModuleSource``) and replicas (``torch_module`` engine, ``InferenceAgent``) are
processes of their own, as in production; what is measured is what ``publish`` returns. Trainer hashing and the store's
writes are in it; init, plan and the manifest's making are not (``publish`` in the JSON is the whole call). The model is
a module of plain parameters with a real model's names and shapes; each update brings other bytes, and both ends of
every tensor are looked at afterwards.

``cuda_ipc@512MiB/in_place/default/dense``: transport and bucket (``@default``: what the product takes), mode, level of
verification, model. The limit is the time that copying as many bytes takes, in the same rounds: one thread's memcpy on
the CPU, from GPU 0 to the replica's GPU, or within GPU 0 (``--colocated``). *memory* is what an update takes beyond
what was held before it, at the peak: on the cards by NVML and by torch's own count, on the host by what is resident.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks._common import GB, SAMPLES, WARM_UPS, Report, Result, Rounds, parser
from benchmarks._memory import CardPeak
from benchmarks._models import MODELS, REAL, model_bytes
from benchmarks._picture import draw
from benchmarks._process import MemberFailed, Process, tell_all
from benchmarks._targets import MEMORY_GB, TARGETS
from benchmarks._update_members import PHASES
from benchmarks.control_plane import SERVER, line, process
from benchmarks.transports import size, size_text
from weightplane.transports import registry

_SCRIPT = Path(__file__).resolve().parent / "_update_members.py"
_LIMITS = {"cpu": "host.memcpy", "across": "card.peer_copy", "colocated": "card.same_gpu_copy"}
_LIMIT_NAMES = {"cpu": "memcpy", "across": "peer copy", "colocated": "same-GPU copy"}


class Fleet:
    """A trainer and its replicas with one model in their memory."""

    def __init__(self, address: str, name: str, layout: str, replicas: int) -> None:
        self.address, self.name, self.layout = address, name, layout
        env = {"OMP_NUM_THREADS": "1"}
        self.trainer = Process("trainer", _SCRIPT, ["trainer"], env)
        self.replicas = [Process(f"replica-{i}", _SCRIPT, ["replica"], env) for i in range(replicas)]
        self.all = [self.trainer, *self.replicas]
        try:
            for i, p in enumerate(self.all):
                device = {"cpu": "cpu", "across": f"cuda:{i}", "colocated": "cuda:0"}[layout]
                p.tell("start", device=device, name=name)
            self.cards = [uuid for p in self.all if (uuid := p.answer())]
        except MemberFailed:
            self.close(0.5)
            raise
        self._numbers = count(1)
        self.pids = [p.pid for p in self.all]

    def open(self, group: str, transport: str, bucket: int, staged: bool) -> int:
        """A fresh group on a transport; returns the bytes that a replica reserves for staging."""
        for r in self.replicas:
            r.tell(
                "open",
                address=self.address,
                group=group,
                replica_id=r.member,
                transport=transport,
                staged=staged,
            )
        reserved = [int(r.answer()) for r in self.replicas]
        self.trainer.call(
            "open",
            address=self.address,
            group=group,
            replicas=len(self.replicas),
            transport=transport,
            bucket_bytes=bucket,
        )
        return reserved[0]

    def publish(self, mode: str, verify: str, look: bool = False) -> dict[str, Any]:
        """One update, with its memory."""
        number = next(self._numbers)
        self.trainer.call("mark", number=number)
        tell_all(self.all, "begin_memory")
        cards = CardPeak(sorted(set(self.cards))) if self.cards else None
        if cards is not None:
            cards.begin()
        said: dict[str, Any] = self.trainer.call("publish", step=number, mode=mode, verify=verify, look=look)
        on_cards = cards.extra() if cards is not None else []
        memory = tell_all(self.all, "memory")
        tell_all(self.replicas, "check", number=number)
        said["memory"] = {
            "trainer, host": memory[0]["host"],
            "replica, host": max(m["host"] for m in memory[1:]),
        }
        if on_cards:
            said["memory"]["cards"] = max(on_cards)
        if self.cards:
            said["memory"]["replica, torch"] = max(m["torch"] for m in memory[1:])
            said["memory"]["trainer, torch"] = memory[0]["torch"]
        return said

    def limit(self) -> float:
        """Bytes per second of the copy that bounds the layout, all replicas at once."""
        answers = tell_all(self.replicas, _LIMITS[self.layout])
        return float(answers[0]["bytes"] / (max(a["end"] for a in answers) - min(a["start"] for a in answers)))

    def profile(self, mode: str, verify: str, rounds: int = 5) -> dict[str, list[str]]:
        """Where trainer and replicas spend their time, over a few updates."""
        tell_all(self.replicas, "look", begin=True)
        for _ in range(rounds):
            self.publish(mode, verify, look=True)
        found = dict(zip((r.member for r in self.replicas), tell_all(self.replicas, "look", begin=False), strict=True))
        return {"trainer": self.trainer.call("sampler.table"), **found}

    def leave(self) -> None:
        """Trainer and replicas leave their group."""
        self.trainer.call("close")
        tell_all(self.replicas, "close")

    def close(self, seconds: float = 10.0) -> None:
        """End the processes."""
        for p in self.all:
            p.close(seconds)


def measure(fleet: Fleet, group: str, transport: str, bucket: int, mode: str, report: Report,
            args: argparse.Namespace) -> None:  # fmt: skip
    """Every level of verification and the limit once a round, interleaved. Raises ``MemberFailed``."""
    reserved = fleet.open(group, transport, bucket, mode == "staged")
    samples, warm_ups = (3, 1) if args.quick else (SAMPLES, WARM_UPS)
    taken: dict[str, list[dict[str, Any]]] = {verify: [] for verify in args.verify}
    rates: list[float] = []
    rounds = Rounds(samples, warm_ups, [*fleet.pids, args.server], args.patience)
    for counts in rounds:
        rate = fleet.limit()
        these = {verify: fleet.publish(mode, "" if verify == "default" else verify) for verify in taken}
        if counts and not rounds.spoilt():
            rates.append(rate)
            for verify, receipt in these.items():
                taken[verify].append(receipt)
    n = len(fleet.replicas)
    where = ("" if fleet.layout == "cpu" else f"/{fleet.layout}") + (f"/{n} replicas" if n > 1 else "")
    channel, label = f"{transport}@{size_text(bucket) if bucket else 'default'}", f"{fleet.name}{where}"
    nbytes = model_bytes(fleet.name)
    copy_s = [nbytes / rate for rate in rates]
    details: dict[str, Any] = {
        "model": fleet.name,
        "bytes": nbytes,
        "receivers": n,
        "layout": fleet.layout,
        "cards": fleet.cards,
        "transport": transport,
        "bucket_bytes": bucket,
        "mode": mode,
        "staging_bytes": reserved,
    }
    limit_name = _LIMIT_NAMES[fleet.layout]
    report.add(Result.of(f"{limit_name}/{channel}/{mode}/{label}", "s", copy_s))
    for verify, said in taken.items():
        case = f"{channel}/{mode}/{verify}/{label}"
        tell(report, case, said, statistics.median(copy_s), limit_name, {**details, "verify": verify})
        if args.profile:
            report.profiles[case] = fleet.profile(mode, "" if verify == "default" else verify)
    report.add(Result.of(f"others/{channel}/{mode}/{label}", "cores", rounds.noise))
    fleet.leave()


def tell(report: Report, case: str, said: Sequence[dict[str, Any]], limit: float, limit_name: str,
         details: dict[str, Any]) -> None:  # fmt: skip
    """One case's total, phases and memory."""
    phases = {phase: [float(f"{s[phase]:.5g}") for s in said] for phase in (*PHASES[:-1], "publish")}
    evidence = sorted({e for s in said for e in s["evidence"]})
    more = {**details, "phases": phases, "evidence": evidence}
    total = [s["total"] for s in said]
    report.add(Result.of(case, "s", total, limit, less_is_better=True, limit_name=limit_name, details=more))
    shown = ", ".join(f"{phase} {1e3 * statistics.median(values):.1f}" for phase, values in phases.items())
    print(f"    {shown} ms; evidence {', '.join(evidence)}")
    peaks = []
    for what in said[0]["memory"]:
        extra = [s["memory"][what] / GB for s in said]
        bound = MEMORY_GB if details["mode"] == "in_place" and what in ("cards", "replica, torch") else 0.0
        made = Result.of(
            f"memory, {what}/{case}",
            "GB",
            extra,
            bound,
            less_is_better=True,
            limit_name="bound" if bound else "",
            details={**details, "memory": what},
        )
        report.add(made, quiet=True)
        peaks.append(f"{what} {max(extra):.3f}")
    print(f"    memory beyond what was held: {'; '.join(peaks)} GB", flush=True)


def usable(asked: Sequence[str], cuda: bool) -> list[str]:
    """The transports to measure: those asked for, or all that work here on such memory by themselves."""
    if asked:
        return list(asked)
    found = []
    for name, probe in registry.available().items():
        c = registry.get(name).capabilities if probe.ok else None
        if c is not None and c.moves_bytes and ("cuda" if cuda else "cpu") in c.device_kinds:
            found.append(name)
        else:
            print(f"{name}: not measured: {probe.reason or 'it moves no such bytes itself'}")
    return found


def verdict(report: Report) -> bool:
    """Print every target that this run can judge; whether all are met. Of several bucket sizes the best counts."""
    good = True
    for target in TARGETS:
        found = [r for r in report.results if target.judges(r.details)]
        if not found:
            continue
        best = min(found, key=lambda r: r.value)
        met, text = target.met(best.value, best.ratio)
        good = good and met
        print(f"{best.case}: {best.value:.4f} s, {best.ratio:.2f} of {best.limit_name}; {text}")
    for r in report.results:
        if r.limit_name == "bound" and max(r.samples) > r.limit:
            good = False
            print(f"{r.case}: {max(r.samples):.2f} GB, bound {r.limit} GB: MISSED")
    return good


def arguments() -> argparse.ArgumentParser:
    """The options."""
    made = parser(__doc__ or "")
    made.add_argument("--transport", action="append", default=[], help="repeat; default: all that work here")
    made.add_argument("--model", action="append", default=[], choices=MODELS, help="repeat")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--colocated", action="store_true", help="with --device cuda: everything on GPU 0")
    made.add_argument("--replicas", type=int, default=1, help="default 1; across: one on each GPU from 1 on")
    made.add_argument("--mode", action="append", default=[], choices=("staged", "in_place"), help="repeat")
    levels = ("default", "full", "sampled", "off")
    made.add_argument("--verify", action="append", default=[], choices=levels, help="repeat; default: default, off")
    made.add_argument("--bucket-bytes", action="append", default=[], type=size, help="repeat; default: the product's")
    made.add_argument("--profile", action="store_true", help="note where the time goes, in the JSON")
    made.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the figures beside their limits")
    made.add_argument("--strict", action="store_true", help="exit 1 if a target is missed or anything failed")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Run and report; 1 with ``--strict`` if a target was missed."""
    args = arguments().parse_args(words)
    cuda = args.device == "cuda"
    layout = "cpu" if not cuda else "colocated" if args.colocated else "across"
    args.verify = args.verify or (["default"] if args.quick else ["default", "off"])
    report = Report("updates", args.json, cuda=cuda)
    transports = usable(args.transport, cuda)
    groups = count(1)
    with tempfile.TemporaryDirectory(prefix="weightplane-bench-") as folder:
        with process(SERVER, str(Path(folder) / "updates.db")) as server:
            address, args.server = line(server), server.pid
            for name in args.model or (REAL if cuda else ("dense-cpu", "moe-cpu")):
                fleet: Fleet | None = None
                for transport in transports:
                    for bucket in args.bucket_bytes or [0]:
                        for mode in args.mode or ("staged", "in_place"):
                            case = f"{transport}/{mode}/{name}/{layout}"
                            try:
                                fleet = fleet or Fleet(address, name, layout, args.replicas)
                                measure(fleet, f"bench-{next(groups)}", transport, bucket, mode, report, args)
                            except MemberFailed as e:
                                report.fail(case, str(e))
                                if fleet is not None:
                                    fleet.close(0.5)
                                fleet = None
                if fleet is not None:
                    fleet.close()
    good = verdict(report) and not report.failures
    report.write()
    if args.picture is not None:
        draw(report.document(), args.picture)
    return 0 if good or not args.strict else 1


if __name__ == "__main__":
    sys.exit(main())
