"""Requests never stop, over 100 publishes and every fault; each token of each output says which weights made it.

Two replicas hold their engine in the agent's process; the third's engine lives in a process of its own, so that its
agent can be killed without it. See ``coded`` for what tokens encode and ``load`` for who asks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.coded import BASE
from tests.process.harness import Fleet, eventually
from tests.process.load import Ledger, load
from tests.process.report import TEXTS
from weightplane.transports.shm import SLOTS
from weightplane.v1 import fleet_pb2, update_pb2

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(300)]

LOCAL, REMOTE = ("r0", "r1"), "r2"
NAMES = (*LOCAL, REMOTE)
PUBLISHES = 100
MIDDLE = 2 * SLOTS + 4


class Run:
    def __init__(self, folder: Path) -> None:
        self.f = Fleet(folder, spares=1)
        self.ledger = Ledger()
        self.worker_folder = folder / "worker"
        self.worker_folder.mkdir()
        self.step = 0
        self.faults: list[str] = []

    def start(self) -> None:
        f = self.f
        f.start_plane()
        worker = f.start("worker", ["worker", str(self.worker_folder)])
        said = worker.heard(60)
        assert said is not None, worker.log()
        for name in LOCAL:
            f.begin_replica(name)
        self.begin_remote()
        for name in NAMES:
            f.await_replica(name)
        f.serving[REMOTE] = said["serving"]
        f.start_trainer().ask(do="wait", count=len(NAMES))

    def begin_remote(self) -> None:
        self.f.begin_replica(
            REMOTE, engine="tests.process.remote:connect", options=(f"folder={self.worker_folder}",), generate=False
        )

    # --- publishing

    def begin(self, **options: Any) -> int:
        self.step += 1
        self.f.trainer.begin(self.step, **options)
        return self.step

    def heard(self, step: int) -> dict[str, Any] | None:
        """The trainer's answer; a version is entered as committed once that is known, never sooner."""
        answer = self.f.trainer.heard(60)
        if answer is not None and answer["ok"]:
            assert answer["committed"] and answer["step"] == step
            self.ledger.committed[answer["version"]] = step
        return answer

    def publish(self, ready: tuple[str, ...] = NAMES, **options: Any) -> None:
        """One that must go well, on these replicas at least."""
        answer = self.heard(self.begin(**options))
        assert answer is not None and answer["ok"] and set(ready) <= set(answer["ready"]), answer

    def fails(self, reason: str, **options: Any) -> dict[str, Any]:
        answer = self.heard(self.begin(**options))
        assert answer is not None and not answer["ok"] and answer["failure"]["reason"] in reason.split(), answer
        return answer

    def outcome(self, step: int) -> update_pb2.UpdateInfo:
        """Of an update whose trainer died: as the control plane says."""

        def look() -> update_pb2.UpdateInfo | None:
            newest = next(iter(self.f.updates()), None)
            over = (update_pb2.UPDATE_PHASE_ABORTED, update_pb2.UPDATE_PHASE_COMMITTED)
            return newest if newest is not None and newest.trainer_step == step and newest.phase in over else None

        update = eventually(look, f"the end of step {step}")
        assert update is not None
        if update.phase == update_pb2.UPDATE_PHASE_COMMITTED:
            self.ledger.committed[update.version] = step
        return update

    def back(self, name: str) -> None:
        """A replica that was started again takes part again."""
        self.f.await_replica(name)

    def all_together(self) -> None:
        """Every replica takes an update; one that has only just come back may miss the first."""

        def publish() -> bool:
            answer = self.heard(self.begin())
            assert answer is not None and answer["ok"], answer
            return set(answer["ready"]) == set(NAMES)

        eventually(publish, "an update that all take")

    def routable(self, name: str, want: bool) -> fleet_pb2.CheckReplicaResponse:
        def look() -> fleet_pb2.CheckReplicaResponse | None:
            said = self.f.check(name)
            return said if said is not None and said.routable is want else None

        said = eventually(look, f"{name} is {'' if want else 'not '}routable")
        assert said is not None
        return said

    # --- faults: each leaves a whole fleet behind, in which only the dead were started again

    def replica_dies_in_the_middle(self, mode: str) -> None:
        self.f.arm("r1", "shm.receive.inside", MIDDLE)
        self.fails("MEMBER_LOST TRANSPORT", mode=mode)
        assert self.f.children["r1"].died() == -9
        for name in ("r0", REMOTE):
            self.routable(name, mode == "staged")
        self.publish(("r0", REMOTE))
        self.f.start_replica("r1")
        self.all_together()

    def replica_dies_applying(self) -> None:
        self.f.arm("r1", "replica.apply.inside", 4)
        self.publish(("r0", REMOTE))
        assert self.f.children["r1"].died() == -9
        self.f.start_replica("r1")
        self.all_together()

    def trainer_dies(self, point: str, mode: str) -> None:
        self.f.arm("trainer", point, MIDDLE if point.startswith("shm") else 1)
        step = self.begin(mode=mode)
        assert self.f.trainer.died() == -9
        update = self.outcome(step)
        assert (update.phase == update_pb2.UPDATE_PHASE_COMMITTED) is (point == "trainer.finish.after")
        for name in NAMES:
            self.routable(name, mode == "staged")
        self.f.start_trainer()
        self.all_together()

    def plane_dies(self, who: str, point: str, nth: int, committed: bool) -> None:
        plane = self.f.children["plane"]
        self.f.arm(who, point, nth, "kill" if who == "plane" else f"kill:{plane.pid}")
        step = self.begin()
        assert plane.died() == -9
        self.f.start_plane()
        answer = self.heard(step)
        assert answer is not None and answer["ok"] is committed, answer
        assert committed or answer["failure"]["reason"] == "COORDINATOR_RESTARTED", answer
        self.all_together()

    def apply_fails(self) -> None:
        self.f.arm("r1", "replica.apply.inside", 3, "raise")
        answer = self.heard(self.begin())
        assert answer is not None and answer["ok"] and answer["replicas"]["r1"]["state"] == "DIRTY", answer
        self.routable("r1", False)
        assert self.f.generate("r1")[0] == 503
        self.all_together()

    def engine_raises(self) -> None:
        self.f.arm("r0", "replica.prepare.before", 1, "raise")
        answer = self.fails("ENGINE")
        assert answer["failure"]["member"] == "r0", answer
        self.all_together()

    def agent_dies_without_its_engine(self, miss: bool, restart: bool) -> None:
        """``miss``: an update commits meanwhile; ``restart``: the coordinator dies too. What is reported is what the
        worker holds, not what the coordinator or an agent remembers."""
        worker = self.f.children["worker"].life
        held = self.f.holds(REMOTE)
        self.f.children[REMOTE].kill()
        self.routable(REMOTE, False)
        if miss:
            self.publish(LOCAL)
        if restart:
            self.f.children["plane"].kill()
            self.f.start_plane()
        status, said = self.f.generate(REMOTE)  # the engine never stopped
        assert status == 200 and said["completions"][0]["tokens"] == [self.ledger.committed[held["version"]] * BASE] * 3
        self.begin_remote()
        self.back(REMOTE)
        said = self.f.holds(REMOTE)
        assert said["held"] == held["held"] and self.f.children["worker"].life == worker
        eventually(lambda: self.f.replicas()[REMOTE].held.version, "its report")
        info = self.f.replicas()[REMOTE]
        assert (info.held.version, info.held.update_id) == (held["version"], held["held"][0]["update_id"])
        assert info.updates_since_start == 0 and info.incarnation == said["incarnation"] != held["incarnation"]
        check = self.routable(REMOTE, not miss)
        assert not miss or "below" in check.reason
        self.all_together()

    def agent_dies_writing_in_place(self) -> None:
        """The half-written worker is mixed whoever asks, fenced before and after its new agent comes."""
        self.f.arm(REMOTE, "shm.receive.inside", MIDDLE)
        self.fails("MEMBER_LOST TRANSPORT", mode="in_place")
        assert self.f.children[REMOTE].died() == -9
        assert self.f.generate(REMOTE)[0] == 503 and self.f.holds(REMOTE)["dirty"]
        self.begin_remote()
        self.back(REMOTE)
        self.routable(REMOTE, False)
        assert self.f.generate(REMOTE)[0] == 503 and self.f.holds(REMOTE)["dirty"]
        self.all_together()

    def schedule(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "replica killed mid-bytes, staged", lambda: self.replica_dies_in_the_middle("staged")
        yield "trainer killed mid-bytes, staged", lambda: self.trainer_dies("shm.send.inside", "staged")
        yield "control plane killed mid-bytes", lambda: self.plane_dies("trainer", "shm.send.inside", MIDDLE, False)
        yield (
            "control plane killed before the decision",
            lambda: self.plane_dies("plane", "server.decide.before_write", 1, False),
        )
        yield (
            "control plane killed after the decision",
            lambda: self.plane_dies("plane", "server.decide.after_write", 1, True),
        )
        yield "apply fails on one after the decision", self.apply_fails
        yield "replica killed applying", self.replica_dies_applying
        yield "engine raises while preparing", self.engine_raises
        yield "trainer killed mid-bytes, in place", lambda: self.trainer_dies("shm.send.inside", "in_place")
        yield "trainer killed after the decision", lambda: self.trainer_dies("trainer.finish.after", "staged")
        yield "replica killed mid-bytes, in place", lambda: self.replica_dies_in_the_middle("in_place")
        yield "agent killed, its engine not", lambda: self.agent_dies_without_its_engine(miss=False, restart=False)
        yield (
            "agent and coordinator killed, the engine not",
            lambda: self.agent_dies_without_its_engine(miss=False, restart=True),
        )
        yield "the same, and an update missed", lambda: self.agent_dies_without_its_engine(miss=True, restart=True)
        yield "agent killed writing in place, its engine not", self.agent_dies_writing_in_place


#: Ways to publish, in turn: mode and pause mode.
WAYS = tuple(itertools.product(("staged", "in_place"), ("keep", "wait", "abort")))


def test_every_token_under_constant_load(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.f:
        try:
            run.start()
            _run(run)
        except BaseException:
            print(run.f.logs())
            raise


@pytest.mark.parametrize("defect", ["torn", "mislabelled", "unfenced"])
def test_the_examination_finds_planted_defects(defect: str, tmp_path: Path) -> None:
    """An engine that lets passes run while it writes; one that changes the label before the weights; one that
    generates on though it is DIRTY."""
    ledger = Ledger()
    with Fleet(tmp_path, f"tests.process.defects:{defect}", spares=0) as f:
        f.start_plane()
        f.start_replica("r0")
        f.start_trainer().ask(do="wait", count=1)

        def publish(step: int) -> None:
            answer = f.trainer.publish(step, mode="staged")
            assert answer is not None and answer["ok"], f.logs()
            ledger.committed[answer["version"]] = step

        publish(1)
        with load(f, ledger, routers=2, strays=2):
            if defect == "unfenced":
                f.arm("r0", "replica.apply.inside", 3, "raise")
            for step in range(2, 12):
                publish(step)
                have = len(ledger.got)
                eventually(lambda n=have: len(ledger.got) > n + 4, "some outputs")  # type: ignore[misc]
                if defect == "unfenced":
                    break
    said = {"torn": "a pass read a mix", "mislabelled": "of version", "unfenced": "a pass read a mix"}[defect]
    with pytest.raises(AssertionError, match=said):
        ledger.examine()


def _run(run: Run) -> None:
    f, ledger = run.f, run.ledger
    run.publish()
    engine = f.children["worker"].life
    r0 = f.children["r0"].life
    faults = list(run.schedule())
    every = PUBLISHES // len(faults)
    with load(f, ledger):
        for n in range(PUBLISHES):
            mode, pause = WAYS[n % len(WAYS)]
            run.publish(mode=mode, pause=pause)
            if n % every == every - 1 and faults:
                what, strike = faults.pop(0)
                before = len(ledger.got)
                try:
                    strike()
                except BaseException as e:
                    e.add_note(f"while: {what}")
                    raise
                run.faults.append(f"{what}: {len(ledger.got) - before} outputs meanwhile")
        assert not faults
    assert f.children["worker"].life == engine and f.children["r0"].life == r0, "a survivor was restarted"
    count = ledger.examine()
    text = "\n".join([*(f"{k}: {v}" for k, v in sorted(count.items())), *run.faults])
    TEXTS.append((f"{len(ledger.committed)} versions committed under constant load", text))
    assert len(ledger.committed) > PUBLISHES
    assert count["outputs over several versions"] > 10 and count["outputs cut short by a pause"] > 0
    assert count["stray: refused by the replica"] > 0 and count["routed: not routable"] > 0
    assert all(count[f"outputs of {name}"] > 50 for name in NAMES)
    versions = {s["version"] for g in ledger.got for s in g.completion["spans"]}
    assert len(versions) > PUBLISHES // 2, "the load did not follow the publishes"
