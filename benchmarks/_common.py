"""What the benchmarks share: samples, their medians, the machine's description, the JSON that ``--json`` writes.

``{"benchmark", "machine", "date", "commit", "results", "failures"}``; a result is a ``Result``, the machine's ``cards``
(with ``--device cuda``) carry name, UUID and driver, and a failure says what could not be measured, and why. With
``--profile`` there are ``profiles``: by case and process, where its threads spent their time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks._cards import accelerator

__all__ = ["GB", "GIB", "MIB", "SAMPLES", "WARM_UPS", "Noise", "Report", "Result", "Rounds", "machine", "parser"]

MIB, GIB, GB = 1 << 20, 1 << 30, 10**9
WARM_UPS, SAMPLES = 2, 10
_PACKAGES = ("torch", "grpcio", "protobuf", "xxhash", "weightplane")


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. ``ratio`` is how good ``value`` is against ``limit`` (1 = equal, more is better), 0 with no limit.

    ``limit_name`` says what the limit is; ``details`` what else the figure depends on (bytes, bucket, cards, …).
    """

    case: str
    value: float
    unit: str
    limit: float = 0.0
    ratio: float = 0.0
    samples: list[float] = field(default_factory=list)
    limit_name: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        case: str,
        unit: str,
        samples: Sequence[float],
        limit: float = 0.0,
        *,
        less_is_better: bool = False,
        limit_name: str = "",
        details: dict[str, Any] | None = None,
    ) -> Result:
        """The median of ``samples`` beside a limit in the same unit (a median, or a bound to keep)."""
        value = statistics.median(samples)
        ratio = 0.0
        if limit and value:
            ratio = limit / value if less_is_better else value / limit
        numbers = [_digits(s) for s in samples]
        return cls(case, _digits(value), unit, _digits(limit), _digits(ratio), numbers, limit_name, details or {})


def _digits(x: float) -> float:
    return float(f"{x:.5g}")


class Noise:
    """CPU that processes other than ours use: what makes a figure on a shared machine worth less."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = [os.getpid(), *pids]
        self._tick = os.sysconf("SC_CLK_TCK")
        self._from = self._now()

    def _now(self) -> tuple[float, float]:
        numbers = [int(x) for x in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
        ticks = sum(numbers) - numbers[3] - numbers[4]  # all but idle and waiting for disks
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks -= sum(map(int, fields[11:15]))  # its own, and those of its children that have ended
        return time.monotonic(), ticks / self._tick

    def cores(self) -> float:
        """Cores that others kept busy since the last call. Clock ticks: short spans are guesses."""
        (then, before), self._from = self._from, self._now()
        return max(0.0, self._from[1] - before) / max(1e-3, self._from[0] - then)


class Rounds:
    """Warm-up rounds, then those that count; of these, rounds that others disturbed are repeated while patience lasts.

    Iterate: each round gives whether it counts; ask ``spoilt`` at its end, and throw its samples away if so. ``noise``
    holds the cores that others used in each round that was kept. The choice sees the load, never the figures.
    """

    CALM = 0.15  # cores

    def __init__(self, samples: int, warm_ups: int, pids: Sequence[int], patience: float) -> None:
        self._left, self._warm_ups = samples, warm_ups
        self._meter, self._until = Noise(pids), time.monotonic() + patience
        self.noise: list[float] = []

    def __iter__(self) -> Iterator[bool]:
        for _ in range(self._warm_ups):
            yield False
        while self._left:
            while time.monotonic() < self._until:
                self._meter.cores()
                time.sleep(0.15)
                if self._meter.cores() <= self.CALM:
                    break
            self._meter.cores()
            yield True

    def spoilt(self) -> bool:
        """Whether the round that just ended must be repeated."""
        cores = self._meter.cores()
        if cores > self.CALM and time.monotonic() < self._until:
            return True
        self.noise.append(cores)
        self._left -= 1
        return False


def parser(description: str) -> argparse.ArgumentParser:
    """With the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    patience = "for each case: wait this long for calm moments, and repeat rounds that others disturbed"
    made.add_argument("--patience", type=float, default=0.0, metavar="SECONDS", help=patience)
    made.add_argument("--quick", action="store_true", help="fewer and smaller cases, 3 samples after 1 warm-up")
    return made


def machine(cuda: bool = False) -> dict[str, Any]:
    """The machine and the versions that matter. The load average tells a quiet machine from a busy one."""
    found = {
        "cpu": _proc("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_proc("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / MIB, 1),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "load_average": list(os.getloadavg()),
    }
    return {**found, **accelerator()} if cuda else found


def _proc(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit, ``-dirty`` if files differ from it. A copy without its history is told by WEIGHTPLANE_COMMIT."""
    said = os.environ.get("WEIGHTPLANE_COMMIT", "")
    if said:
        return said
    here = Path(__file__).resolve().parent
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return out.stdout.strip()


class Report:
    """Collects results, prints each as it comes, and writes the file (after every result, so that none is lost)."""

    def __init__(self, benchmark: str, path: Path | None = None, *, cuda: bool = False) -> None:
        self.benchmark, self._path = benchmark, path
        self.results: list[Result] = []
        self.failures: list[dict[str, str]] = []
        self.profiles: dict[str, dict[str, list[str]]] = {}
        self.machine = machine(cuda)
        self._commit, self._date = _commit(), datetime.now(UTC).isoformat(timespec="seconds")
        m = self.machine
        print(f"{m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB; load average {m['load_average'][0]:.1f}")
        for card in m.get("cards", ()):
            print(f"{card['name']}, {card['memory_gib']} GiB, {card['uuid']}, driver {card['driver']}")
        print(f"{'case':<44}{'median':>10} {'unit':<7}{'limit':>9}{'ratio':>7}   {'lowest':>8} … {'highest':<8}")

    def add(self, result: Result, *, quiet: bool = False) -> Result:
        """Take and print (unless ``quiet``) one result."""
        self.results.append(result)
        if quiet:
            return result
        limit = f"{result.limit:9.3g}{result.ratio:7.2f}" if result.limit else f"{'–':>9}{'':>7}"
        spread = f"{min(result.samples):8.3g} … {max(result.samples):<8.3g}" if result.samples else ""
        print(f"{result.case:<44}{result.value:>10.4g} {result.unit:<7}{limit}   {spread}", flush=True)
        self._save()
        return result

    def fail(self, case: str, why: str) -> None:
        """Note and print what could not be measured."""
        self.failures.append({"case": case, "why": why[-4000:]})
        print(f"{case:<44}{'FAILED':>10} {why.strip().splitlines()[-1][:300] if why.strip() else ''}", flush=True)
        self._save()

    def find(self, case: str) -> Result | None:
        """A result by its case."""
        return next((r for r in self.results if r.case == case), None)

    def write(self) -> None:
        """Note the load at the end and write the file, if one was asked for."""
        self.machine["load_average_at_end"] = list(os.getloadavg())
        print(f"load average at the end {self.machine['load_average_at_end'][0]:.1f}")
        self._save()
        if self._path is not None:
            print(f"written: {self._path}")

    def document(self) -> dict[str, Any]:
        """What the file holds."""
        return {
            "benchmark": self.benchmark,
            "machine": self.machine,
            "date": self._date,
            "commit": self._commit,
            "results": [asdict(r) for r in self.results],
            "failures": self.failures,
            **({"profiles": self.profiles} if self.profiles else {}),
        }

    def _save(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.document(), indent=1, ensure_ascii=False) + "\n")
