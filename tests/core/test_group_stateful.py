"""Hypothesis drives the coordinator's machine with whatever comes, and every step is judged."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.core.harness import Group
from tests.sim import invariants as inv
from weightplane.controlplane.core import desired, events, model, states, update_state
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Admin, Mode, Phase, Stage

RIDS = st.sampled_from(["r0", "r1", "r2"])
RANKS = st.integers(0, 1)


class Coordinator(RuleBasedStateMachine):
    """Three replicas, two ranks, one store that answers when it likes."""

    @initialize(
        modes=st.sampled_from([((Mode.STAGED,),), ((Mode.STAGED,), (Mode.IN_PLACE,))]),
        reach=st.sampled_from([(("shm", "shm"),), (("shm", "grpc"), ("grpc", "grpc"))]),
    )
    def begin(self, modes: Any, reach: Any) -> None:
        self.g = Group(replicas=3, ranks=2, modes=modes, reach=reach).fleet()
        self.committed = self.g.s.committed
        self.decided: dict[str, int] = {}
        self.minted: dict[int, str] = {}
        self.calls = 0

    def take(self, event: Any) -> None:
        before = self.g.s
        self.g.do(event, answer_writes=False)
        after = self.g.s
        inv.inv_stale_changes_nothing(before, event, after)
        inv.inv_one_update(before, event, after, self.g.last)
        if after.open is not None:
            same = before.open is not None and before.open.update_id == after.open.update_id
            inv.inv_participants_frozen(before.open if same else None, after.open)
            inv.inv_excluded_never_votes(after, after.open)
            if not same:
                inv.inv_channels(after, after.open)
            if same and before.open is not None and before.open.phase is not after.open.phase:
                allowed = {
                    Phase.PREPARING: (Phase.TRANSFERRING, Phase.ABORTING),
                    Phase.TRANSFERRING: (Phase.VERIFYING, Phase.ABORTING),
                    Phase.VERIFYING: (Phase.DECIDING, Phase.ABORTING),
                    Phase.DECIDING: (Phase.COMMITTED,),
                }
                assert after.open.phase in allowed[before.open.phase]
        for e in self.g.last:
            if isinstance(e, events.Write) and e.kind == "freeze" and e.update is not None:
                inv.inv_version_never_reused(e.update.version, e.update.update_id, self.minted)
                self.minted[e.update.version] = e.update.update_id
            if isinstance(e, events.Push):
                for rid in e.replica_ids:
                    d = desired.desired_replica(after, rid, self.g.now)
                    if d is not None:
                        inv.inv_commit_after_store(d, self.decided)
                        inv.inv_one_outcome(after, d, self.decided)
                        inv.inv_excluded_never_applies(after, d)

    def next_call(self, what: str) -> str:
        self.calls += 1
        return f"{what}{self.calls}"

    @property
    def generation(self) -> int:
        return self.g.s.trainer.generation if self.g.s.trainer is not None else 0

    @property
    def update(self) -> str:
        return self.g.s.open.update_id if self.g.s.open is not None else "none"

    @rule(at_least=st.sampled_from([0, 1, 2]), busy=st.sampled_from(["REFUSE", "WAIT", "SUPERSEDE"]))
    def start(self, at_least: int, busy: str) -> None:
        call = self.next_call("u")
        e = events.StartUpdate(
            call, self.g.now + 9, call, self.generation, "m", 1, call, "", {}, (), at_least, busy, update_timeout_s=20.0
        )
        self.take(e)

    @rule()
    def step_on(self) -> None:
        """What would come next in a good world."""
        u = self.g.s.open
        if u is None or self.g.s.stepped_down:
            return
        if u.phase is Phase.PREPARING and u.frozen:
            for rid in u.parts:
                self.report(rid, Stage.JOINED)
            for c in u.channels:
                self.take(events.PlanMade(u.update_id, c, update_state.PlanSummary(f"p-{c}", 4, 4, {})))
        elif u.phase is Phase.VERIFYING:
            for rid in u.parts:
                self.report(rid, Stage.PREPARED)
                self.verified(rid, True)
        elif u.phase is Phase.COMMITTED:
            for rid in u.parts:
                self.report(rid, Stage.APPLIED)

    @rule(rid=RIDS, stage=st.sampled_from(list(Stage)))
    def report(self, rid: str, stage: Stage) -> None:
        u = self.g.s.open
        r = self.g.s.replicas[rid]
        n = self.g.sequence[rid] = self.g.sequence.get(rid, 0) + 1
        held = u.held if u is not None and stage is Stage.APPLIED and u.phase is Phase.COMMITTED else r.held
        dirty = stage is Stage.FAILED and u is not None and u.phase is Phase.COMMITTED
        update_id = u.update_id if u is not None and stage is not Stage.NONE else ""
        armed = len(u.calls) if u is not None and stage >= Stage.ARMED else 0
        self.take(
            events.Report(rid, r.incarnation, n, (held,) * 2, self.g.s.epoch, dirty, None, update_id, stage, armed)
        )

    @rule(rid=RIDS, good=st.booleans())
    def verified(self, rid: str, good: bool) -> None:
        failure = None if good else Failure(Reason.DIGEST_MISMATCH, "differs")
        life = self.g.s.replicas[rid].incarnation
        self.take(events.Verified(self.update, rid, life, states.Evidence.RECEIVED, failure))

    @rule()
    def send_everything(self) -> None:
        u = self.g.s.open
        if u is None:
            return
        modes = {c: p.mode for p in u.parts.values() for c in p.channels}
        for plan in list(u.plans.values()):
            for rank in range(2):
                self.take(events.DigestsIn(self.generation, u.update_id, u.epoch, rank, plan.plan_id))
        rounds = [
            [c for c in u.channels if modes[c] is Mode.STAGED],
            [c for c in u.channels if modes[c] is not Mode.STAGED],
        ]
        for seq, channels in enumerate([x for x in rounds if x], 1):
            for rank in range(2):
                ranges = tuple((c, 0, 4) for c in channels)
                call = self.next_call("w")
                self.take(events.UpdateWeights(call, 1e9, self.generation, u.update_id, u.epoch, rank, seq, ranges))

    @rule(rank=RANKS)
    def finish(self, rank: int) -> None:
        self.take(events.FinishUpdate(self.next_call("f"), 1e9, self.generation, self.update, self.g.s.epoch, rank))

    @rule(generation=st.sampled_from([0, 1]))
    def abort(self, generation: int) -> None:
        self.take(events.AbortUpdate(self.next_call("a"), 1e9, generation, "", "no more"))

    @rule(rid=RIDS, n=st.integers(2, 4))
    def restart(self, rid: str, n: int) -> None:
        self.g.n += 1000
        r = self.g.s.replicas[rid]
        life = r.incarnation if n == 2 else f"{rid}#{n}"
        said = model.Replica(rid, life, workers=r.workers, modes=self.g.modes[rid], pause_modes=r.pause_modes)
        self.take(events.ReplicaHello(self.g.n, said))

    @rule(rid=RIDS)
    def ghost(self, rid: str) -> None:
        self.take(events.Report(rid, f"{rid}#0", 10**6, (Held(9, "ghost"),)))
        self.take(events.Beat(rid, f"{rid}#0"))
        self.take(events.FinishUpdate(self.next_call("f"), 1e9, 77, self.update, self.g.s.epoch, 0))

    @rule(takeover=st.booleans(), who=st.sampled_from(["job", "other"]))
    def init(self, takeover: bool, who: str) -> None:
        for rank in range(2):
            e = events.InitTransfer(
                self.next_call("i"),
                1e9,
                "i",
                who,
                f"{who}/1",
                rank,
                2,
                0,
                "l",
                who.encode().ljust(32),
                takeover,
                None,
                "h",
                offers=(model.Offer("shm"),),
            )
            self.take(e)
        self.settle(True)
        for rank in range(2):
            self.take(events.RankPlacement(self.generation, rank, "m", f"l-{rank}"))

    @rule(rid=RIDS, admin=st.sampled_from([Admin.ACTIVE, Admin.DRAINING, Admin.QUARANTINED]))
    def administer(self, rid: str, admin: Admin) -> None:
        self.take(events.SetAdmin(self.next_call("s"), rid, admin))

    @rule(ok=st.sampled_from([True, True, True, None]))
    def settle(self, ok: bool | None) -> None:
        """The store answers everything that it was asked."""
        for write_id, (kind, about) in list(self.g.s.writes.items()):
            if kind == "decide" and ok:
                u = self.g.s.open
                assert u is not None
                inv.inv_decided_once(about, u.version, self.decided, set())
                self.decided[about] = u.version
            self.take(events.Stored(write_id, ok))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.5]), beats=st.booleans())
    def wait(self, seconds: float, beats: bool) -> None:
        end = self.g.now + seconds
        while self.g.now < end:
            self.g.now += 0.1
            if beats:
                self.g.beats()
            self.take(events.Tick())
            inv.inv_ends_in_time(self.g.s, self.g.now)

    @invariant()
    def committed_rises_and_is_decided(self) -> None:
        if hasattr(self, "g"):
            inv.inv_committed_rises(self.committed, self.g.s.committed, self.decided)
            self.committed = self.g.s.committed

    @invariant()
    def nobody_is_routable_who_should_not_be(self) -> None:
        if hasattr(self, "g"):
            self.rewinding = False
            for r in self.g.s.replicas.values():
                inv.inv_routable(self.g.s, r, self, self.g.now)

    @invariant()
    def who_waits_is_answered_when_an_update_is_over(self) -> None:
        if hasattr(self, "g"):
            assert all(not u.waiters for u in self.g.s.history.values())


TestCoordinator = Coordinator.TestCase
TestCoordinator.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
