"""The same faults where one replica is a real vLLM on CPU: a server, its agent ``v0``, a ``torch_module`` replica r0.

``.venv-vllm/bin/python -m tests.faults.vllm [--wires shm,grpc] [--only TEXT,TEXT] [--json PATH]``: ``make chaos-vllm``.
What generates is held against what a vLLM that never heard of Weightplane generates from the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from signal import SIGCONT
from typing import Any, Self

from benchmarks._common import machine
from tests.faults import judge
from tests.faults.case import Case, Row
from tests.faults.fleet import commit_of
from tests.faults.resources import Held, held, segments
from tests.faults.run import OVER, told
from tests.faults.vllm_cases import VLLM_CASES
from tests.faults.vllm_engine import SWITCH
from tests.faults.vllm_model import FOLDERS, at, checkpoints
from tests.process.harness import ROOT, Fleet, eventually
from tests.vllm.models import Goldens
from tests.vllm.servers import VllmServer
from weightplane.v1 import update_pb2

__all__ = ["Engine", "VllmFleet", "VllmRunner", "main"]

NAMES = ("r0", "v0")
Golden = Mapping[str, list[list[int]]]


class Engine:
    """A vLLM server that can be armed, and the folders that all fleets around it share. A context."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models = folder, models
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
        self.shm = Path(tempfile.mkdtemp(prefix="wpf-", dir=base))
        environment = {"WEIGHTPLANE_SHM_DIR": str(self.shm), SWITCH: f"{folder}:v0-engine"}
        extension = {"--worker-extension-cls": "tests.faults.vllm_engine.Armable"}
        self.server = VllmServer(models / "A", folder / "vllm.log", environment=environment, options=extension)

    def __enter__(self) -> Self:
        self.server.launch()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.kill()
        shutil.rmtree(self.shm, ignore_errors=True)

    def ready(self) -> None:
        """Wait for the server; one that a fault ended is started anew."""
        if self.server.process is None or self.server.process.poll() is not None:
            self.server.kill()
            self.server.launch()
        self.server.wait_healthy()

    @property
    def pids(self) -> tuple[int, int]:
        """Of the server and of the process that holds the model."""
        assert self.server.process is not None
        return self.server.process.pid, self.server.worker_pid()


class VllmFleet(Fleet):
    """Control plane, trainer, r0, and v0 before ``engine``."""

    def __init__(self, engine: Engine, transport: str, ttl_s: float) -> None:
        env = {
            "WEIGHTPLANE_SHM_DIR": str(engine.shm),
            "WEIGHTPLANE_TEST_MODEL": "tests.faults.vllm_model:Alternating",
            FOLDERS: str(engine.models),
            "HF_HUB_OFFLINE": "1",
        }
        super().__init__(
            engine.folder, "tests.faults.vllm_model:make", transport=transport, bucket_bytes=1 << 16, env=env, spares=1,
            beat_s=0.5, ttl_s=ttl_s,
        )  # fmt: skip
        self.engine_of_v0, self.step = engine, 0
        self.store = engine.folder / f"{transport}.db"

    def launch(self) -> None:
        self.start_plane()
        self.begin_replica("r0")
        self.start_trainer()
        self.engine_of_v0.ready()
        self.begin("v0")
        for name in NAMES:
            self.await_replica(name)

    def begin(self, name: str) -> None:
        url = f"url={self.engine_of_v0.server.url}"
        self.begin_replica(name, engine="vllm", options=(url,), generate=False)

    def next(self) -> int:
        self.step += 1
        return self.step

    def together(self, timeout: float = 90.0) -> dict[str, Any]:
        """An update that both take."""
        said: list[Any] = [None]

        def publish() -> Any:
            said[0] = receipt = self.trainer.publish(self.next())
            assert receipt is not None, "the trainer died"
            return receipt if receipt["ok"] and sorted(receipt["ready"]) == list(NAMES) else None

        try:
            found: dict[str, Any] = eventually(publish, "an update that both take", timeout)
        except AssertionError as e:
            raise AssertionError(f"{e}; last: {said[0]}") from None
        return found


class VllmRunner:
    """Runs cases on one fleet, one after the other."""

    def __init__(self, fleet: VllmFleet, golden: Golden) -> None:
        self.fleet, self.golden = fleet, golden
        self.steps: dict[int, int] = {}  # committed version -> trainer step
        self.fresh = True

    @property
    def server(self) -> VllmServer:
        return self.fleet.engine_of_v0.server

    def run(self, case: Case) -> Row:
        f, self.fresh = self.fleet, False
        member = {"v0": "vLLM's agent", "v0-engine": "vLLM's engine"}.get(case.member, case.member)
        row = Row(f"vllm-{case.id}", case.fault, member, case.phase, case.mode, f.transport, 1, engine="vllm")
        began = time.monotonic()
        base = f.together()
        wrong = self._holds(base)
        before, pids, held_before = f.lives(), f.engine_of_v0.pids, self._held()
        left_before = segments(f.engine_of_v0.shm)
        self._strike(case, row, wrong)
        self._next(case, row, base["version"], wrong)
        if case.dies and case.member == "v0":
            f.begin("v0")
            f.await_replica("v0")
        elif case.dies and case.member == "v0-engine":
            self.server.kill()  # what is left of it
            self.server.start()
        wrong += self._holds(f.together())
        wrong += judge.lives(before, f.lives(), {case.member} if case.dies else set())
        if not (case.dies and case.member == "v0-engine") and f.engine_of_v0.pids != pids:
            wrong.append(f"vLLM was restarted: {pids} -> {f.engine_of_v0.pids}")
        kept = {n: h for n, h in held_before.items() if not (case.dies and n == case.member)}
        wrong += self._resources(kept, left_before)
        row.violations, row.wall_s = wrong, time.monotonic() - began
        return row

    def _strike(self, case: Case, row: Row, wrong: list[str]) -> None:
        f, step = self.fleet, self.fleet.next()
        f.arm(case.member, case.point.format(wire=f.transport), case.nth, case.action)
        began = time.monotonic()
        f.trainer.begin(step, mode=case.mode, update_timeout=case.timeout, failure="raise")
        if case.dies and case.member != "v0-engine":
            f.children[case.member].died(case.timeout)
            if case.member == "plane":
                f.start_plane()
        goes_on = None
        if case.action == "stop":
            pid = f.engine_of_v0.pids[1]
            seconds = began + case.timeout + 0.5 - time.monotonic()
            goes_on = threading.Timer(seconds, os.kill, (pid, SIGCONT))
            goes_on.start()
        answer = f.trainer.heard(case.timeout + 30)
        row.end_s = time.monotonic() - began
        if goes_on is not None:
            goes_on.join()
        if not f.fired(case.member):
            wrong.append("the fault never struck")
        for path in (*f.folder.glob("*.arm"), *f.folder.glob("*.fired")):
            path.unlink()
        row.outcome = self._outcome(step)
        own = 1.0 if case.member == "plane" else 0.0  # its own start comes on top
        wrong += judge.ended(case, row.end_s, limit=case.timeout + own)
        wrong += judge.cause(case, row.outcome, answer)
        row.trainer = told(answer)
        row.router = self._router(case, wrong)

    def _outcome(self, step: int) -> str:
        def look() -> str:
            mine = [u for u in self.fleet.updates() if u.trainer_step == step]
            return OVER.get(mine[0].phase, "") if mine else ""

        try:
            return eventually(look, "the update is over", 20)
        except AssertionError:
            return "OPEN"

    def _versions(self) -> None:
        for u in self.fleet.updates():
            if OVER.get(u.phase) == "COMMITTED":
                self.steps[u.version] = u.trainer_step

    def _router(self, case: Case, wrong: list[str]) -> str:
        """What a router is told; and that v0 answers by the version that it is said to hold, or nobody."""
        self._versions()
        seen = []
        for name in NAMES:
            said = self.fleet.check(name)
            if said is None:
                seen.append(f"{name}: nobody answers")
                continue
            version = said.replica.held.version
            seen.append(f"{name}: yes, version {version}" if said.routable else f"{name}: no ({said.reason})")
            if name != "v0" or (case.member == "v0-engine" and case.dies):
                continue
            if said.routable:
                wrong += self._tokens(version)
            elif said.replica.weights == update_pb2.WEIGHTS_STATE_DIRTY and not self.server.unanswered():
                wrong.append("v0 is DIRTY and answers")
        return "; ".join(seen)

    def _tokens(self, version: int) -> list[str]:
        step = self.steps.get(version)
        if step is None:
            return [f"v0 is said to hold version {version}, which was never committed"]
        found = self.server.all_tokens()
        return [] if found == self.golden[at(step)] else [f"v0 does not generate by {at(step)} (version {version})"]

    def _next(self, case: Case, row: Row, above: int, wrong: list[str]) -> None:
        f, began = self.fleet, time.monotonic()
        tries: list[Any] = []

        def good() -> bool:
            tries.append(f.trainer.publish(f.next(), update_timeout=20.0))
            return tries[-1] is not None and bool(tries[-1]["ok"])

        try:
            eventually(good, "a good publish", 45)
        except AssertionError:
            pass
        row.good_s = time.monotonic() - began
        left = [n for n in NAMES if not case.member.startswith(n)]
        wrong += judge.next_good(tries[-1], left, above)

    def _holds(self, receipt: Mapping[str, Any]) -> list[str]:
        """After a publish that both took: r0 holds the trainer's bytes, v0 generates by them, both say so."""
        self._versions()
        f, wrong = self.fleet, []
        expected, found = f.trainer.ask(do="digests"), f.digests("r0")
        wrong += [f"r0: {t} is not the trainer's" for t, d in expected.items() if found.get(t) != d]
        for name in NAMES:
            said = f.check(name, receipt["version"])
            if said is None or not said.routable:
                wrong.append(f"{name} took version {receipt['version']} and is not routable: {said and said.reason}")
        return wrong + self._tokens(receipt["version"])

    def _held(self) -> dict[str, Held]:
        found = {n: held(c.pid) for n, c in self.fleet.children.items() if c.process.poll() is None}
        return found | {"v0-engine": held(self.fleet.engine_of_v0.pids[1])}

    def _resources(self, before: Mapping[str, Held], left: list[str]) -> list[str]:
        wrong: list[str] = []

        def back() -> bool:
            now = segments(self.fleet.engine_of_v0.shm)
            wrong[:] = judge.resources(before, self._held(), left, now)
            return not wrong

        try:
            eventually(back, "resources are back at the baseline", 10)
        except AssertionError:
            pass
        return wrong


def fleet(stack: ExitStack, engine: Engine, wire: str, golden: Golden, ttl_s: float = 6.0) -> VllmRunner:
    """A fleet that both replicas have taken updates of: what is opened or compiled once is."""
    f = stack.enter_context(VllmFleet(engine, wire, ttl_s))
    try:
        f.launch()
        f.together()
        receipt = f.trainer.publish(f.next(), mode="in_place")
        assert receipt is not None and receipt["ok"], receipt
    except BaseException:
        print(f.logs(), engine.server.log.read_text()[-3000:])
        raise
    return VllmRunner(f, golden)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wires", default="shm,grpc")
    parser.add_argument("--only", default="", help="cases whose name has one of these in it")
    parser.add_argument("--json", type=Path, default=Path(".bench/chaos-vllm.json"))
    parser.add_argument("--merge", action="store_true", help="keep the rows of the results that are not run anew")
    a = parser.parse_args()
    began = time.monotonic()
    earlier: dict[str, Any] = {"rows": [], "wall_s": 0.0}
    if a.merge and a.json.exists():
        earlier = json.loads(a.json.read_text())
    rows: list[Row] = []
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    cases = [c for c in VLLM_CASES if any(t in c.id for t in a.only.split(","))]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-vllm-")))
        models = checkpoints(folder / "models")
        golden = Goldens(models, folder / "goldens.json")
        stack.callback(golden.close)
        engine = stack.enter_context(Engine(folder, folder / "models"))
        for wire in a.wires.split(","):
            todo = list(cases)
            while todo:  # a new fleet after a violation, which may have left the old in any state
                with ExitStack() as inner:
                    runner = fleet(inner, engine, wire, golden)
                    while todo and (not rows or not rows[-1].violations or runner.fresh):
                        rows.append(attempt(runner, todo.pop(0)))
                        report(rows[-1], runner)
    wall_s = time.monotonic() - began
    anew = {(r.case, r.transport) for r in rows}
    kept = [r for r in earlier["rows"] if (r["case"], r["transport"]) not in anew]
    part = f"--wires {a.wires} --only {a.only!r}" if a.only or a.wires != parser.get_default("wires") else ""
    found = {
        "machine": machine(),
        "date": date,
        "commit": commit_of(ROOT),
        "runs": 1 + earlier.get("runs", int(bool(earlier["rows"]))),
        "wall_s": wall_s + earlier["wall_s"],
        "part": "" if a.merge else part,
        "rows": [*(r.as_json() for r in rows), *kept],
    }
    a.json.parent.mkdir(parents=True, exist_ok=True)
    a.json.write_text(json.dumps(found, indent=1))
    broken = sum(bool(r.violations) for r in rows)
    print(f"{len(rows)} faults of a fleet with vLLM, {broken} violations, {wall_s / 60:.1f} min")
    return 1 if broken else 0


def report(row: Row, runner: VllmRunner) -> None:
    verdict = "ok" if not row.violations else "VIOLATION " + "; ".join(row.violations)
    print(f"{row.transport} {row.case}: {row.outcome} {row.end_s:.2f} s: {verdict}", flush=True)
    if row.violations:
        print(f"    the trainer: {row.trainer}\n    a router: {row.router}\n{runner.fleet.logs()}", flush=True)


def attempt(runner: VllmRunner, case: Case) -> Row:
    """What goes wrong with the fleet itself is a violation too."""
    try:
        return runner.run(case)
    except Exception as e:
        traceback.print_exc()
        row = Row(f"vllm-{case.id}", case.fault, case.member, case.phase, case.mode, runner.fleet.transport, 1, "?")
        row.violations = [f"{type(e).__name__}: {e}"]
        return row


if __name__ == "__main__":
    sys.exit(main())
