"""SIGKILL of trainer, replica and control plane in every phase, in real processes; an apply that fails on 1 of 3.

One fleet of three replicas serves all rows: only the killed process is started again, never a survivor. Each row
checks its cells as it goes; the table is printed after the run (``pytest -s`` or not) and written as Markdown to the
file named by ``WEIGHTPLANE_FAULTS_SEEN`` (``docs/faults-seen.md`` is made so).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.process.coded import BASE, LAYERS, SIZE
from tests.process.harness import BEAT_S, TTL_S, Fleet, eventually
from tests.process.report import TEXTS, keep, render
from weightplane.transports.shm import SLOTS
from weightplane.v1 import update_pb2

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(120)]

NAMES = ("r0", "r1", "r2")
TOTAL = LAYERS * SIZE * 4
#: A bucket in the middle: by then every receiver has read some (the ring has fewer slots), and none has all.
MIDDLE = 2 * SLOTS + 4
#: From a death to the end of the update that waits for it: the lease, a beat, and a second to tell everyone.
SOON_S = TTL_S + BEAT_S + 1.0
#: The same when the coordinator itself must come back first.
RESTART_S = 15.0


@dataclass(frozen=True)
class Row:
    """``arm``: (process, failpoint, nth, action). ``serves``: by replica, the old version, the new one, or a state."""

    victim: str
    phase: str
    arm: tuple[str, str, int, str]
    outcome: str
    saw: tuple[str, str, str]
    serves: dict[str, str]
    mode: str = "staged"

    @property
    def id(self) -> str:
        return f"{self.victim}-{self.phase}-{self.mode}".replace(" ", "_")


def _all(state: str) -> dict[str, str]:
    return dict.fromkeys(NAMES, state)


OLD, NEW, DIRTY = _all("old"), _all("new"), _all("DIRTY")
DEAD = ("died", "", "")
LOST = ("UpdateFailed", "MEMBER_LOST", "r1")
BROKEN = ("UpdateFailed", "MEMBER_LOST TRANSPORT", "r1")  # whoever notices first: the coordinator, or the sender
RESTARTED = ("UpdateFailed", "COORDINATOR_RESTARTED", "")
RECEIPT = ("receipt", "", "")
PLANE = "kill:plane"  # the trainer's process kills the control plane's at that very point

ROWS = [
    Row("trainer", "start", ("trainer", "trainer.start.after", 1, "kill"), "ABORTED", DEAD, OLD),
    Row("trainer", "update", ("trainer", "shm.send.inside", MIDDLE, "kill"), "ABORTED", DEAD, OLD),
    Row("trainer", "finish, undecided", ("trainer", "trainer.finish.before", 1, "kill"), "ABORTED", DEAD, OLD),
    Row("trainer", "finish, decided", ("trainer", "trainer.finish.after", 1, "kill"), "COMMITTED", DEAD, NEW),
    Row("trainer", "update", ("trainer", "shm.send.inside", MIDDLE, "kill"), "ABORTED", DEAD, DIRTY, "in_place"),
    Row("r1", "start", ("r1", "replica.check.before", 1, "kill"), "ABORTED", LOST, OLD | {"r1": "dead"}),
    Row("r1", "update", ("r1", "shm.receive.inside", MIDDLE, "kill"), "ABORTED", BROKEN, OLD | {"r1": "dead"}),
    Row("r1", "finish, undecided", ("r1", "replica.prepare.after", 1, "kill"), "ABORTED", LOST, OLD | {"r1": "dead"}),
    Row("r1", "finish, decided", ("r1", "replica.apply.before", 1, "kill"), "COMMITTED", RECEIPT, NEW | {"r1": "dead"}),
    Row(
        "r1",
        "update",
        ("r1", "shm.receive.inside", MIDDLE, "kill"),
        "ABORTED",
        BROKEN,
        DIRTY | {"r1": "dead"},
        "in_place",
    ),
    Row("plane", "start", ("plane", "server.start.after_write", 1, "kill"), "ABORTED", RESTARTED, OLD),
    Row("plane", "update", ("trainer", "shm.send.inside", MIDDLE, PLANE), "ABORTED", RESTARTED, OLD),
    Row("plane", "finish, undecided", ("plane", "server.decide.before_write", 1, "kill"), "ABORTED", RESTARTED, OLD),
    Row("plane", "finish, decided", ("plane", "server.decide.after_write", 1, "kill"), "COMMITTED", RECEIPT, NEW),
    Row("plane", "update", ("trainer", "shm.send.inside", MIDDLE, PLANE), "ABORTED", RESTARTED, DIRTY, "in_place"),
    Row(
        "nobody",
        "apply fails on r1, decided",
        ("r1", "replica.apply.inside", 3, "raise"),
        "COMMITTED",
        RECEIPT,
        NEW | {"r1": "DIRTY"},
    ),
]

COLUMNS = (
    "killed",
    "phase",
    "mode",
    "wait status",
    "the update",
    "what the trainer saw",
    "served afterwards (routable)",
    "time to end",
    "next publish, at once",
    "survivors: pid@start before = after",
)
_seen: list[tuple[str, ...]] = []


class Bench:
    """The fleet of the module. A row that failed leaves it broken: the next row gets a new one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.fleet: Fleet | None = None
        self.step = 0

    def get(self) -> Fleet:
        if self.fleet is None:
            self.number += 1
            folder = self.folder / str(self.number)
            folder.mkdir()
            self.fleet = f = Fleet(folder)
            f.start_plane()
            for name in NAMES:
                f.begin_replica(name)
            for name in NAMES:
                f.await_replica(name)
            f.start_trainer().ask(do="wait", count=len(NAMES))
        return self.fleet

    def drop(self) -> None:
        if self.fleet is not None:
            self.fleet.__exit__()
            self.fleet = None

    def next(self) -> int:
        self.step += 1
        return self.step


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("kill-table"))
    yield bench
    bench.drop()
    if _seen:
        TEXTS.append(("faults in real processes: what was seen", render(COLUMNS, _seen)))
        keep("WEIGHTPLANE_FAULTS_SEEN", "Faults, as seen in real processes", _PREFACE, COLUMNS, _seen)


_PREFACE = (
    "Made by `WEIGHTPLANE_FAULTS_SEEN=docs/faults-seen.md pytest tests/process/test_kill_table.py`, which checks every "
    f"cell. Three replicas, one trainer, one control plane; beat {BEAT_S} s, TTL {TTL_S} s. v is the version before, w "
    "the one being published. Only the killed process is started again; a start time is in clock ticks since boot."
)


@dataclass
class Cells:
    status: str = "-"
    saw: str = ""
    end_s: float = 0.0
    served: list[str] = field(default_factory=list)


@pytest.mark.parametrize("row", ROWS, ids=[r.id for r in ROWS])
def test_a_fault(row: Row, bench: Bench) -> None:
    f = bench.get()
    try:
        _run(row, bench, f)
    except BaseException:
        print(f.logs())
        bench.drop()
        raise


def _run(row: Row, bench: Bench, f: Fleet) -> None:
    base = _everywhere(bench, f)
    old_step = bench.step
    old, before = base["version"], f.lives()
    survivors = [n for n in f.children if n != row.victim]

    new_step = bench.next()
    name, point, nth, action = row.arm
    f.arm(name, point, nth, f"kill:{f.children['plane'].pid}" if action == PLANE else action)
    cells = Cells()
    began = time.monotonic()
    f.trainer.begin(new_step, mode=row.mode)
    if row.victim != "nobody":
        status = f.children[row.victim].died()
        began = time.monotonic()
        assert status == -9, f"wait status {status}"
        cells.status = str(status)
        if row.victim == "plane":
            f.start_plane()
    answer = f.trainer.heard(60)
    assert f.fired(name), "the failpoint never struck"

    def over() -> update_pb2.UpdateInfo | None:
        newest = next(iter(f.updates()), None)
        return newest if newest is not None and newest.trainer_step == new_step and _is_over(newest) else None

    update = eventually(over, "the update is over")
    assert update is not None
    cells.end_s = time.monotonic() - began
    assert update_pb2.UpdatePhase.Name(update.phase) == f"UPDATE_PHASE_{row.outcome}"
    assert cells.end_s <= (RESTART_S if row.victim == "plane" else SOON_S)
    cells.saw = _saw(row, answer)
    new = update.version
    assert new > old

    for replica in NAMES:
        cells.served.append(_served(f, row, replica, (old, old_step), (new, new_step)))

    # The next publish, at once, by whoever is left; the trainer's successor takes over.
    if row.victim == "trainer":
        f.start_trainer()
    left = [n for n in NAMES if n != row.victim]
    last_step = bench.next()
    receipt = f.trainer.publish(last_step)
    assert receipt is not None and receipt["ok"] and sorted(receipt["ready"]) == left, receipt
    assert receipt["version"] > new
    expected = f.trainer.ask(do="digests")
    for replica in left:
        assert f.digests(replica) == expected, f"{replica} does not hold the trainer's bytes"
        status, said = f.generate(replica)
        assert status == 200 and said["completions"][0]["tokens"] == [last_step * BASE] * 3
        routable = f.check(replica)
        assert routable is not None and routable.routable, routable

    after = f.lives()
    assert all(before[n] == after[n] for n in survivors), "a survivor was restarted"
    _seen.append(
        (
            {"nobody": "nobody", "plane": "control plane", "r1": "replica r1"}.get(row.victim, row.victim),
            row.phase,
            row.mode.replace("_", " "),
            cells.status,
            row.outcome,
            cells.saw,
            "\n".join(cells.served),
            f"{cells.end_s:.2f} s",
            f"version {receipt['version']}, READY and every digest equal on {', '.join(left)}",
            "\n".join(f"{n} {before[n][0]}@{before[n][1]}" for n in survivors if n in after),
        )
    )
    if row.victim in NAMES:
        f.start_replica(row.victim)


def _everywhere(bench: Bench, f: Fleet) -> dict[str, Any]:
    """An update that all three take. One that has only just come back may miss the first: it had not reported yet."""

    def publish() -> dict[str, Any] | None:
        receipt = f.trainer.publish(bench.next())
        assert receipt is not None and receipt["ok"], receipt
        assert all(receipt["replicas"][r]["bytes"] == TOTAL for r in receipt["ready"]), receipt
        return receipt if sorted(receipt["ready"]) == list(NAMES) else None

    receipt = eventually(publish, "an update that all take")
    assert receipt is not None
    return receipt


def _is_over(update: update_pb2.UpdateInfo) -> bool:
    return update.phase in (update_pb2.UPDATE_PHASE_ABORTED, update_pb2.UPDATE_PHASE_COMMITTED)


def _saw(row: Row, answer: dict[str, Any] | None) -> str:
    """Check what the trainer was told, and say it."""
    what, reason, member = row.saw
    if what == "died":
        assert answer is None
        return "nothing: it died"
    assert answer is not None
    if what == "receipt":
        assert answer["ok"] and answer["committed"], answer
        states = {r: x["state"] for r, x in answer["replicas"].items()}
        out = ", ".join(f"{r} {s}" for r, s in sorted(states.items()))
        for replica, end in row.serves.items():
            if end == "new":
                assert states[replica] == "READY", states
            else:
                assert states[replica] != "READY" and replica not in answer["ready"], states
                failure = answer["replicas"][replica]["failure"]
                assert failure is not None and failure["member"] == replica, answer
                out += f"; {replica}: {failure['reason']}: {failure['message']}"
                if end == "DIRTY":
                    assert states[replica] == "DIRTY" and failure["reason"] == "ENGINE", answer
        return f"a receipt: {out}"
    assert not answer["ok"] and answer["error"] == what, answer
    failure = answer["failure"]
    assert failure["reason"] in reason.split(), answer
    assert not member or (failure["member"] == member and member in answer["failures"]), answer
    if row.phase == "update" and row.victim != "plane":  # the dead one could not say how far it was
        assert all(0 < answer["landed"][r] < TOTAL for r in NAMES if r != row.victim), answer["landed"]
    who = f" [{failure['member']}]" if failure["member"] else ""
    return f"{what} {failure['reason']}{who}: {failure['message']}"


def _served(f: Fleet, row: Row, replica: str, old: tuple[int, int], new: tuple[int, int]) -> str:
    """Check what one replica serves now, and whether a router is sent there; say it."""
    end = row.serves[replica]

    def routable(want: bool) -> Any:
        def look() -> Any:
            said = f.check(replica)
            return said if said is not None and said.routable is want else None

        return eventually(look, f"{replica} is {'' if want else 'not '}routable")

    if end == "dead":
        said = routable(False)
        assert not said.live
        return f"{replica}: dead (no: {said.reason})"
    if end == "DIRTY":
        eventually(lambda: "DIRTY" in routable(False).reason, f"the control plane knows that {replica} is DIRTY")
        said = routable(False)
        status, answer = f.generate(replica)
        assert status == 503 and "DIRTY" in answer["error"], answer
        assert f.holds(replica)["dirty"]
        return f"{replica}: DIRTY, refuses to generate (no: {said.reason})"
    version, step = old if end == "old" else new
    said = routable(True)
    holds = f.holds(replica)
    status, answer = f.generate(replica)
    completion = answer["completions"][0]
    assert status == 200 and completion["tokens"] == [step * BASE] * 3 and completion["logprobs"] == [0.0] * 3
    assert (holds["version"], holds["dirty"]) == (version, "") and said.replica.held.version == version
    assert [s["version"] for s in completion["spans"]] == [version]
    return f"{replica}: {'v' if end == 'old' else 'w'} (yes)"
