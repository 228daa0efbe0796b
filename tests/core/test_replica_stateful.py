"""Hypothesis drives the replica's machine: any desired state, any end of an operation, at any time."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.core.harness import wanted
from tests.sim import invariants as inv
from weightplane.controlplane.core import desired, replica
from weightplane.controlplane.core.desired import ArmedCall
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Mode, PauseMode

IDS = ("u1", "u2", "u3")
NO = Failure(Reason.ENGINE, "no")


class Machine(RuleBasedStateMachine):
    """A replica whose operations end when they like. A coordinator's outcome for an update never changes."""

    @initialize(mode=st.sampled_from([Mode.STAGED, Mode.IN_PLACE]))
    def begin(self, mode: Mode) -> None:
        self.mode = mode
        self.s = replica.ReplicaState("r0", "r0#1", workers=2)
        self.now = 100.0
        self.running: list[Any] = []  # operations under way in the engine
        self.engine: set[str] = set()  # pauses in force there
        self.outcome: dict[str, str] = {}
        self.newest = 0

    def take(self, event: Any) -> None:
        before = self.s
        self.s, effects, _ = replica.step(before, event, self.now)
        inv.inv_stale_desired(before, event, self.s, effects)
        inv.inv_vote_binds(before, event, self.s, effects)
        inv.inv_one_at_a_time(before, event, self.s)
        inv.inv_apply_only_when_told(before, event, effects, {u for u, o in self.outcome.items() if o == "COMMIT"})
        ops = [e for e in self.running if isinstance(e, replica.Check | replica.Arm | replica.Prepare | replica.Apply)]
        for e in effects:
            if isinstance(e, replica.Check | replica.Arm | replica.Prepare | replica.Apply):
                assert not ops, f"{e} while {ops} runs"
            if isinstance(e, replica.Apply) or (isinstance(e, replica.Arm) and self.mode is Mode.IN_PLACE):
                assert self.engine, f"{e} while generation runs"
            if isinstance(e, replica.Resume):
                self.running = [p for p in self.running if not (isinstance(p, replica.Pause) and p.holder == e.holder)]
            if isinstance(e, replica.Drop):
                self.running = [p for p in self.running if getattr(p, "update_id", "") != e.update_id]
            if not isinstance(e, replica.SendReport):
                self.running.append(e)

    @rule(
        i=st.integers(0, 2),
        calls=st.integers(0, 2),
        pause=st.sampled_from([PauseMode.KEEP, PauseMode.WAIT]),
        outcome=st.sampled_from(["", "", "COMMIT", "ABORT"]),
        named=st.booleans(),
        holders=st.booleans(),
    )
    def told(self, i: int, calls: int, pause: PauseMode, outcome: str, named: bool, holders: bool) -> None:
        i = self.newest = max(self.newest, i)
        u = IDS[i]
        t = self.s.taking
        mine = t is not None and t.want.update_id == u
        if outcome == "COMMIT" and not (mine and t is not None and t.voted):
            outcome = ""  # a coordinator decides only on votes
        if outcome:
            self.outcome.setdefault(u, outcome)
        decision = self.outcome.get(u, "")
        known = len(t.want.calls) if mine and t is not None else 0
        made = tuple(ArmedCall(n, (("c", n, 1),)) for n in range(1, max(known, calls) + 1))
        if mine and t is not None and t.want.all_called:
            made = t.want.calls
        done = len(made) == 2
        want = wanted(u, version=i + 1, mode=self.mode, calls=made, all_called=done, decision=decision, pause=pause)
        older = t.want.update_id if t is not None and not mine else ""
        if older and not t.over and older not in self.outcome:  # type: ignore[union-attr]
            self.outcome[older] = "ABORT"
        resolutions = ((older, self.outcome[older]),) if older in self.outcome and not named else ()
        pauses = (("operator", PauseMode.KEEP),) if holders else ()
        self.take(
            replica.Desired(
                desired.DesiredReplica("r0", "r0#1", 1, "c", Held(), want if named else None, resolutions, pauses)
            )
        )

    @rule(i=st.integers(0, 9), good=st.sampled_from([True, True, True, False]))
    def an_operation_ends(self, i: int, good: bool) -> None:
        if not self.running:
            return
        e = self.running.pop(i % len(self.running))
        t = self.s.taking
        if isinstance(e, replica.Pause):
            self.engine.add(e.holder)
            self.take(replica.Paused(e.holder))
        elif isinstance(e, replica.Resume):
            self.engine.discard(e.holder)
            self.take(replica.Resumed(e.holder))
        elif isinstance(e, replica.Drop):
            armed = self.mode is Mode.IN_PLACE and t is not None and t.armed_seq > 0
            self.take(replica.Drained(e.update_id, armed and not good))
        elif not good:
            self.take(replica.Failed(e.update_id, NO, isinstance(e, replica.Apply)))
        elif isinstance(e, replica.Check):
            self.take(replica.Checked(e.update_id))
        elif isinstance(e, replica.Arm):
            self.take(replica.Armed(e.update_id, e.seq))
            self.take(replica.Received(e.update_id, e.seq))
        elif isinstance(e, replica.Prepare):
            self.take(replica.Prepared(e.update_id))
        else:
            assert t is not None
            self.take(replica.Applied(e.update_id, (t.held,) * 2))

    @rule(seconds=st.sampled_from([0.1, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(replica.Tick())

    @rule()
    def the_end_of_something_long_over(self) -> None:
        for e in (
            replica.Armed("u0", 1),
            replica.Prepared("u0"),
            replica.Applied("u0", ()),
            replica.Drained("u0", True),
        ):
            self.take(e)

    @rule()
    def the_engine_is_reread(self) -> None:
        self.take(replica.EngineHeld(self.s.held))

    @invariant()
    def dirty_and_paused_stand_still(self) -> None:
        if hasattr(self, "s"):
            assert not self.s.paused - self.engine, "it believes in a pause that is not in force"
            if self.s.dirty:
                assert self.engine, "dirty, and generation runs"

    @invariant()
    def a_holder_is_in_one_place(self) -> None:
        if hasattr(self, "s"):
            s = self.s
            assert not (s.paused & s.pausing or s.paused & s.resuming or s.pausing & s.resuming)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
