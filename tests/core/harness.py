"""A coordinator and replicas driven by hand: each helper takes one step of the protocol."""

from __future__ import annotations

import dataclasses
from typing import Any

from weightplane.controlplane.core import desired, events, group, group_state, model, replica, states, update_state
from weightplane.controlplane.core.model import Held, Offer
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Mode, PauseMode, Phase, Stage

__all__ = ["Group", "wanted"]

PAUSES = (PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT)
LONG = 1e9


def offer(transport: str) -> Offer:
    """As the transport's members make it."""
    return Offer(transport, collective=transport == "nccl")


class Group:
    """A group under test, with its clock. ``do`` takes an event; ``last`` holds the effects of that step."""

    def __init__(
        self,
        replicas: int = 2,
        ranks: int = 1,
        modes: tuple[tuple[Mode, ...], ...] = ((Mode.STAGED,),),
        reach: tuple[tuple[str, ...], ...] = (("shm", "shm"),),
    ):
        """``modes`` and ``reach`` (the transport that each of the two workers offers) are dealt to the replicas."""
        self.s = group_state.GroupState("g", "cluster", 1)
        self.now = 100.0
        self.last: list[Any] = []
        self.replies: dict[str, events.Reply] = {}
        self.written: list[events.Write] = []
        self.sequence: dict[str, int] = {}
        self.n = 0
        self.ranks = ranks
        self.modes = {f"r{i}": modes[i % len(modes)] for i in range(replicas)}
        self.reach = {f"r{i}": reach[i % len(reach)] for i in range(replicas)}

    def do(self, event: Any, answer_writes: bool = True) -> list[Any]:
        self.s, self.last, self.reason = group.step(self.s, event, self.now)
        effects = self.last
        for e in effects:
            if isinstance(e, events.Reply):
                self.replies[e.call_id] = e
            elif isinstance(e, events.Write):
                self.written.append(e)
        if answer_writes:
            for e in effects:
                if isinstance(e, events.Write):
                    self.do(events.Stored(e.write_id, True))
        self.last = effects
        return effects

    def call(self, kind: type, **fields: Any) -> str:
        """A trainer's call with the usual fields filled in; returns its call_id."""
        self.n += 1
        call_id = f"{kind.__name__}{self.n}"
        t, u = self.s.trainer, self.s.open
        names = {f.name for f in dataclasses.fields(kind)}
        usual: dict[str, Any] = {"call_id": call_id, "deadline": LONG}
        if "generation" in names:
            usual["generation"] = t.generation if t is not None else 0
        if "update_id" in names and u is not None:
            usual["update_id"] = u.update_id
        if "epoch" in names:
            usual["epoch"] = self.s.epoch
        if "rank" in names:
            usual["rank"] = 0
        usual = {k: v for k, v in usual.items() if k in names}
        answer = fields.pop("answer_writes", True)
        self.do(kind(**{**usual, **fields}), answer)
        return call_id

    def failure(self, call_id: str) -> Reason | None:
        """Why a call was refused; None if it went well. Fails if it was not answered."""
        failure = self.replies[call_id].failure
        return failure.reason if failure is not None else None

    def life(self, rid: str) -> str:
        return self.s.replicas[rid].incarnation

    def hello(self, rid: str, incarnation: str = "", session: int = 0) -> None:
        workers = tuple(model.Worker(i, "h", "", (offer(t),)) for i, t in enumerate(self.reach[rid]))
        said = model.Replica(rid, incarnation or f"{rid}#1", workers=workers, modes=self.modes[rid], pause_modes=PAUSES)
        self.n += 1
        self.do(events.ReplicaHello(session or self.n, said))

    def report(self, rid: str, **fields: Any) -> None:
        self.sequence[rid] = self.sequence.get(rid, 0) + 1
        r = self.s.replicas.get(rid)
        usual: dict[str, Any] = {"incarnation": r.incarnation if r else "", "held": (r.held if r else Held(),) * 2}
        self.do(events.Report(rid, sequence=self.sequence[rid], epoch=self.s.epoch, **{**usual, **fields}))

    def beats(self) -> None:
        for r in self.s.replicas.values():
            if r.incarnation:
                self.do(events.Beat(r.replica_id, r.incarnation))
        if self.s.trainer is not None:
            for rank in range(self.ranks):
                self.do(events.Beat(f"rank/{rank}", "", self.s.trainer.generation))

    def sleep(self, seconds: float, beats: bool = True) -> None:
        """Time passes, half a second at a time."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            if beats:
                self.beats()
            self.do(events.Tick())

    # --- phases ---

    def init(self, trainer: str = "job", **fields: Any) -> list[str]:
        usual: dict[str, Any] = {
            "request_id": "i",
            "trainer_id": trainer,
            "incarnation": f"{trainer}/1",
            "world_size": self.ranks,
            "lineage": "l",
            "seed": trainer.encode().ljust(32),
            "host_id": "h",
            "offers": tuple(offer(t) for t in sorted({t for both in self.reach.values() for t in both})),
            "generation": 0,
        }
        calls = [self.call(events.InitTransfer, rank=r, **{**usual, **fields}) for r in range(self.ranks)]
        t = self.s.trainer
        if t is not None and self.failure(calls[-1]) is None:
            for r in range(self.ranks):
                self.do(events.RankHello(f"hello{r}", 1, t.generation, r))
                self.do(events.RankPlacement(t.generation, r, "m", f"l-{r}"))
        return calls

    def fleet(self) -> Group:
        """Every replica is here and has reported; the trainer holds the group."""
        for rid in self.modes:
            self.hello(rid)
            self.report(rid)
        self.init()
        return self

    def start(self, update_id: str = "u1", **fields: Any) -> str:
        usual = {"request_id": update_id, "manifest_id": "m", "trainer_step": 1, "update_id": update_id}
        return self.call(events.StartUpdate, **{**usual, **fields})

    def join(self, *rids: str) -> None:
        u = self.s.open
        assert u is not None
        for rid in rids or tuple(u.parts):
            for w in range(2):
                self.do(events.WorkerPlacement(rid, self.life(rid), "m", w, f"l-{rid}-{w}"))
            self.report(rid, update_id=u.update_id, stage=Stage.JOINED)
        for e in [e for e in self.last if isinstance(e, events.MakePlan)]:
            summary = update_state.PlanSummary(f"p-{e.channel_id}", 4, 4, {})
            self.do(events.PlanMade(u.update_id, e.channel_id, summary))

    def send(self, seq: int = 1, ranges: Any = ()) -> list[str]:
        return [self.call(events.UpdateWeights, rank=r, seq=seq, ranges=ranges) for r in range(self.ranks)]

    def digests(self) -> None:
        u = self.s.open
        assert u is not None and self.s.trainer is not None
        for plan in list(u.plans.values()):
            for r in range(self.ranks):
                self.do(events.DigestsIn(self.s.trainer.generation, u.update_id, u.epoch, r, plan.plan_id))

    def say(self, stage: Stage, *rids: str, **fields: Any) -> None:
        """Replicas report a stage of the open update."""
        u = self.s.open
        assert u is not None
        for rid in rids or tuple(u.parts):
            self.report(rid, update_id=u.update_id, stage=stage, armed_seq=len(u.calls), **fields)

    def vote(self, *rids: str, verified: bool = True) -> None:
        u = self.s.open
        assert u is not None
        for rid in rids or tuple(u.parts):
            self.say(Stage.PREPARED, rid)
            if verified:
                self.do(events.Verified(u.update_id, rid, self.life(rid), states.Evidence.RECEIVED))

    def finish(self) -> list[str]:
        return [self.call(events.FinishUpdate, rank=r) for r in range(self.ranks)]

    def applied(self, *rids: str) -> None:
        u = self.s.open
        assert u is not None
        for rid in rids or tuple(u.parts):
            self.report(rid, update_id=u.update_id, stage=Stage.APPLIED, held=(u.held,) * 2)

    def to(self, phase: Phase, update_id: str = "u1", **fields: Any) -> Group:
        """An update, driven up to a phase; DECIDING leaves the write unanswered."""
        self.start(update_id, **fields)
        if phase is Phase.PREPARING:
            return self
        self.join()
        if phase is Phase.ABORTING:
            self.call(events.AbortUpdate, message="no more")
            return self
        self.send()
        self.digests()
        if phase is Phase.TRANSFERRING:
            return self
        self.say(Stage.RECEIVED)
        self.finish()
        u = self.s.open
        assert u is not None
        if phase is Phase.VERIFYING:
            return self
        *first, last = u.parts
        self.vote(*first) if first else None
        self.say(Stage.PREPARED, last)
        verified = events.Verified(u.update_id, last, self.life(last), states.Evidence.RECEIVED)
        self.do(verified, answer_writes=phase is not Phase.DECIDING)
        return self

    def publish(self, update_id: str = "u1", **fields: Any) -> Group:
        self.to(Phase.COMMITTED, update_id, **fields)
        self.applied()
        return self

    def desired(self, rid: str) -> desired.DesiredReplica:
        d = desired.desired_replica(self.s, rid, self.now)
        assert d is not None
        return d


def wanted(update_id: str = "u1", **fields: Any) -> desired.DesiredUpdate:
    """What a coordinator wants of a replica in an update."""
    usual: dict[str, Any] = {
        "version": 1,
        "trainer_step": 1,
        "lineage": "l",
        "generation": 1,
        "manifest_id": "m",
        "channels": (),
        "mode": Mode.STAGED,
        "pause": PauseMode.KEEP,
        "cache": states.CachePolicy.CLEAR,
        "verify": states.Verify.FULL,
        "calls": (),
        "all_called": False,
        "decision": "",
        "failure": None,
        "remaining_s": 10.0,
    }
    return desired.DesiredUpdate(update_id, **{**usual, **fields})


class Agent:
    """A replica's machine, driven by hand."""

    def __init__(self, **want: Any) -> None:
        self.s = replica.ReplicaState("r0", "r0#1", workers=2)
        self.now = 100.0
        self.want = want
        self.effects: list[Any] = []

    def do(self, event: Any) -> list[str]:
        """Take an event; the names of its effects."""
        self.s, self.effects, self.reason = replica.step(self.s, event, self.now)
        return [type(e).__name__ for e in self.effects]

    def told(self, update: desired.DesiredUpdate | None = None, epoch: int = 1, **fields: Any) -> list[str]:
        usual: dict[str, Any] = {"cluster_id": "c", "committed": Held(), "resolutions": (), "pauses": ()}
        usual["incarnation"] = "r0#1"
        return self.do(replica.Desired(desired.DesiredReplica("r0", epoch=epoch, update=update, **{**usual, **fields})))

    def to(self, where: str, update_id: str = "u1") -> Agent:
        """Drive an update up to a place named as the simulator names it."""
        one = (desired.ArmedCall(1, (("c", 0, 4),)),)
        if where == "IDLE":
            return self
        self.told(wanted(update_id, **self.want))
        if where == "CHECKING":
            return self
        self.do(replica.Checked(update_id))
        if where == "JOINED":
            return self
        if where in ("DROPPING", "ABORTED"):
            self.told(wanted(update_id, **{**self.want, "decision": "ABORT"}))
            if where == "ABORTED":
                self.do(replica.Drained(update_id, False))
            return self
        self.told(wanted(update_id, **{**self.want, "calls": one}))
        if "update" in self.s.pausing:
            self.do(replica.Paused("update"))
        self.do(replica.Armed(update_id, 1))
        if where == "ARMED":
            return self
        self.told(wanted(update_id, **{**self.want, "calls": one, "all_called": True}))
        self.do(replica.Received(update_id, 1))
        if where == "RECEIVED":
            return self
        if "update" in self.s.pausing:
            self.do(replica.Paused("update"))
        self.do(replica.Prepared(update_id))
        if where == "PREPARED":
            return self
        self.told(wanted(update_id, **{**self.want, "calls": one, "all_called": True, "decision": "COMMIT"}))
        if "update" in self.s.pausing:
            self.do(replica.Paused("update"))
        if where == "COMMITTING":
            return self
        if where == "APPLIED":
            self.do(replica.Applied(update_id, (self.s.taking.held,) * 2))  # type: ignore[union-attr]
        else:
            self.do(replica.Failed(update_id, Failure(Reason.ENGINE, "no"), True))
        return self
