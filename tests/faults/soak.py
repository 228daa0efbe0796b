"""``make soak``: thousands of publishes to a fleet of processes, with random faults in between; nothing may be wrong.

``python -m tests.faults.soak [--publishes N] [--seed N] [--every K] [--minutes M] [--json PATH]``. r0 and the trainer
are never killed, so their memory can be compared from first to last; the control plane's since it last started.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks._common import machine
from tests.faults.case import Case
from tests.faults.cases import CASES
from tests.faults.fleet import NAMES, FaultFleet, commit_of
from tests.faults.resources import held
from tests.faults.run import Runner
from tests.process.harness import ROOT

__all__ = ["main"]

#: Publishes until everything has been used once and memory is what it will be.
_WARM = 50
_MOST_GROWN_KIB = 32 << 10


def faults() -> list[Case]:
    """Those that take no longer than they must, and kill neither r0 nor the trainer."""
    slow = ("block:7", "hold-gil:7", "hold-gil:20")
    return [
        c
        for c in CASES
        if 1 in c.ranks
        and not c.small
        and c.action not in slow
        and c.outside not in ("takeover", "refused")
        and not (c.dies and c.member.startswith("trainer"))
        and (not c.wires or "shm" in c.wires)
    ]


class Soak:
    def __init__(self, fleet: FaultFleet, order: random.Random, every: int) -> None:
        self.fleet, self.order, self.every = fleet, order, every
        self.runner = Runner(fleet)
        self.faults, self.failed = 0, 0
        self.kinds: Counter[str] = Counter()
        self.violations: list[str] = []

    def memory(self) -> dict[str, int]:
        return {n: held(c.pid).anonymous_kib for n, c in self.fleet.children.items() if n in ("plane", "r0", "trainer")}

    def publish(self) -> None:
        """One that nothing disturbs: all take it."""
        step = self.fleet.next()
        receipt = self.fleet.all_publish(step)
        if receipt is None or not receipt["ok"] or sorted(receipt["ready"]) != list(NAMES):
            self.violations.append(f"publish {step}, undisturbed: {receipt}")
            self.fleet.together()
        if step % 50 < 2:
            self.violations += self.runner.updates()

    def fault(self) -> None:
        case = self.order.choice(faults())
        self.faults += 1
        self.kinds[case.fault] += 1
        row = self.runner.run(case)
        self.violations += [f"{case.id}: {v}" for v in row.violations]
        for v in row.violations:
            print(f"VIOLATION {case.id}: {v}", flush=True)

    def run(self, publishes: int, until: float) -> None:
        while self.fleet.step < publishes and time.monotonic() < until and len(self.violations) < 20:
            for _ in range(self.order.randint(1, 2 * self.every)):
                self.publish()
            self.fault()
            if self.faults % 10 == 0:
                print(f"{self.fleet.step} publishes, {self.faults} faults: {self.memory()}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--publishes", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--every", type=int, default=16, help="a fault after so many publishes, on average")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--json", type=Path, default=Path(".bench/soak.json"))
    a = parser.parse_args()
    print(f"seed {a.seed}", flush=True)
    began = time.monotonic()
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, FaultFleet(Path(folder), ttl_s=3.0) as f:
        f.launch()
        soak = Soak(f, random.Random(a.seed), a.every)
        for _ in range(_WARM):
            soak.publish()
        first, plane = soak.memory(), f.children["plane"].pid
        try:
            soak.run(a.publishes, began + a.minutes * 60)
        except Exception as e:
            soak.violations.append(f"{type(e).__name__}: {e}")
            print(f.logs(), file=sys.stderr)
        last = soak.memory()
        soak.violations += soak.runner.updates()
        for name in ("r0", "trainer", *(("plane",) if f.children["plane"].pid == plane else ())):
            if last[name] - first[name] > _MOST_GROWN_KIB:
                soak.violations.append(f"memory of {name}: {first[name]} -> {last[name]} KiB")
        commits = len(soak.runner.histories.committed)
        events = soak.runner.histories.events
        memory = ", ".join(f"{n} {first[n] // 1024} -> {last[n] // 1024} MiB" for n in sorted(first))
    summary = (
        f"{f.step} publishes, {commits} committed, {soak.faults} faults of {len(soak.kinds)} kinds, {events} events of "
        f"replicas' histories, {len(soak.violations)} violations, {(time.monotonic() - began) / 60:.1f} min; "
        f"anonymous memory first -> last: {memory}"
    )
    found: dict[str, Any] = {
        "machine": machine(),
        "date": date,
        "commit": commit_of(ROOT),
        "seed": a.seed,
        "part": f"{f.step} publishes" if f.step < parser.get_default("publishes") else "",
        "summary": summary,
        "kinds": dict(soak.kinds),
        "memory": {"first": first, "last": last},
        "violations": soak.violations,
    }
    a.json.parent.mkdir(parents=True, exist_ok=True)
    a.json.write_text(json.dumps(found, indent=1))
    print(summary)
    for violation in soak.violations:
        print(f"VIOLATION {violation}")
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
