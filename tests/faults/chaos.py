"""``make chaos``: the whole matrix of faults, wire by wire, in a seeded order; the exit status says whether one broke.

``python -m tests.faults.chaos [--seed N] [--minutes M] [--wires shm,grpc,ucx] [--only TEXT,TEXT] [--merge]``
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._common import machine
from tests.faults.case import Case, Row
from tests.faults.cases import CASES
from tests.faults.fleet import FaultFleet, commit_of, here
from tests.faults.run import Runner
from tests.faults.small import cannot
from tests.process.harness import ROOT

__all__ = ["main"]


def plan(wires: list[str], only: str, order: random.Random) -> list[tuple[str, int, bool, list[Case]]]:
    """Fleets (wire, ranks, small disks), each with its cases."""
    out = []
    for wire in wires:
        for ranks, small in ((1, False), (4, False), (1, True)):
            cases = [
                c
                for c in CASES
                if ranks in c.ranks and c.small is small and (not c.wires or wire in c.wires)
                and any(t in c.id for t in only.split(","))
            ]  # fmt: skip
            order.shuffle(cases)
            if cases:
                out.append((wire, ranks, small, cases))
    return out


class Chaos:
    def __init__(self, folder: Path, until: float, ttl_s: float) -> None:
        self.folder, self.until, self.ttl_s = folder, until, ttl_s
        self.rows: list[Row] = []
        self.left = 0
        self.save: Callable[[], None] = lambda: None

    def fleet(self, wire: str, ranks: int, small: bool, cases: list[Case]) -> None:
        """All cases on one fleet; a new one after a violation, which may have left the old in any state."""
        todo = list(cases)
        while todo:
            if time.monotonic() > self.until:
                self.left += len(todo)
                return
            folder = Path(tempfile.mkdtemp(dir=self.folder, prefix=f"{wire}-{ranks}-"))
            with FaultFleet(folder, transport=wire, ranks=ranks, ttl_s=self.ttl_s, small=small) as f:
                try:
                    f.launch()
                except AssertionError:  # too busy a machine, say: the next try is another fleet
                    traceback.print_exc()
                    continue
                runner = Runner(f)
                while todo and time.monotonic() <= self.until:
                    if self.one(runner, todo.pop(0)).violations:
                        break

    def one(self, runner: Runner, case: Case) -> Row:
        f = runner.fleet
        try:
            row = runner.run(case)
        except Exception as e:
            row = Row(case.id, case.fault, case.member, case.phase, case.mode, f.transport, f.ranks, "?")
            row.violations = [f"{type(e).__name__}: {e}"]
            traceback.print_exc()
        row.trainer = row.trainer.replace(str(f.folder), "FOLDER")  # docs/faults.md names no path of this machine
        self.rows.append(row)
        self.save()
        verdict = "ok" if not row.violations else "VIOLATION " + "; ".join(row.violations)
        print(f"{f.transport} {f.ranks} {case.id}: {row.outcome} {row.end_s:.2f} s: {verdict}", flush=True)
        if row.violations:
            print(f"    the trainer: {row.trainer}\n    a router: {row.router}", flush=True)
            (self.folder / f"{f.transport}-{f.ranks}-{case.id}.log".replace("/", "_")).write_text(f.logs())
        return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--wires", default="shm,grpc,ucx")
    parser.add_argument("--only", default="", help="cases whose name has one of these in it")
    parser.add_argument("--json", type=Path, default=Path(".bench/chaos.json"))
    parser.add_argument("--ttl", type=float, default=1.5, help="the lease of members, in seconds")
    parser.add_argument("--merge", action="store_true", help="keep the rows of the results that are not run anew")
    parser.add_argument("--logs", type=Path, default=Path(".bench/chaos"))
    a = parser.parse_args()
    print(f"seed {a.seed}", flush=True)
    skipped = {w: why for w in a.wires.split(",") if (why := here(w))}
    wires = [w for w in a.wires.split(",") if w not in skipped]
    a.logs.mkdir(parents=True, exist_ok=True)
    logs = a.logs.resolve()  # a fleet's processes, and mounts that are looked at from outside, are elsewhere
    began = time.monotonic()
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    earlier: dict[str, Any] = {"rows": [], "wall_s": 0.0}
    if a.merge and a.json.exists():
        earlier = json.loads(a.json.read_text())
    chaos = Chaos(logs, began + a.minutes * 60, a.ttl)

    def part() -> str:
        """Which part of the matrix was asked for; empty where it is all, or is added to what there was."""
        asked = [f"--{n} {v}" for n, v in (("only", a.only), ("wires", a.wires)) if v != parser.get_default(n)]
        if chaos.left and a.minutes < parser.get_default("minutes"):
            asked.append(f"--minutes {a.minutes:g}")
        return "" if a.merge else " ".join(asked)

    def save() -> None:
        """After every row: what was seen is kept, whatever comes."""
        rows = [r.as_json() for r in chaos.rows]
        anew = {(r["case"], r["transport"], r["ranks"]) for r in rows}
        rows += [r for r in earlier["rows"] if (r["case"], r["transport"], r["ranks"]) not in anew]
        found: dict[str, Any] = {
            "machine": machine(),
            "date": date,
            "commit": commit_of(ROOT),
            "seed": a.seed,
            "ttl_s": a.ttl,
            "runs": 1 + earlier.get("runs", 0),
            "wall_s": time.monotonic() - began + earlier["wall_s"],
            "skipped": skipped,
            "left": chaos.left,
            "part": part(),
            "rows": rows,
        }
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps(found, indent=1))

    chaos.save = save
    for wire, ranks, small, cases in plan(wires, a.only, random.Random(a.seed)):
        if small and (why := cannot()):
            skipped[f"{len(cases)} cases of full disks and shared memory"] = why
            continue
        chaos.fleet(wire, ranks, small, cases)
    save()
    broken = sum(bool(r.violations) for r in chaos.rows)
    print(f"{len(chaos.rows)} faults, {broken} violations, {chaos.left} left out, seed {a.seed}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
