"""One replica over several channels: rule by rule, what was said of its channel holds for each of its workers'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.core.harness import Group
from weightplane.controlplane.core import desired, events, states, update_state
from weightplane.controlplane.core.model import Offer
from weightplane.controlplane.core.progress import live_channels
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Mode, Phase, Stage
from weightplane.controlplane.server.bindings import needs_rebind

APART = ("shm", "grpc")
TOGETHER = ("shm", "shm")
NO = Failure(Reason.ENGINE, "no")


def spread(**more: Any) -> Group:
    """r0 by shm and grpc, r1 by shm alone."""
    return Group(**{"reach": (APART, TOGETHER), **more}).fleet()


def begun(g: Group, **fields: Any) -> tuple[Group, dict[str, str]]:
    """An update that is ready to be armed, and its channels by transport."""
    g.start(**fields)
    g.join()
    return g, {c.transport: c.channel_id for c in g.s.trainer.channels}  # type: ignore[union-attr]


def want(g: Group, rid: str = "r0") -> desired.DesiredUpdate:
    update = g.desired(rid).update
    assert update is not None
    return update


def compared(g: Group) -> list[events.Compare]:
    return [e for e in g.last if isinstance(e, events.Compare)]


def test_each_worker_has_its_channel_and_each_channel_its_plan() -> None:
    g, by = begun(spread())
    u = g.s.open
    assert u is not None and u.channels == (by["grpc"], by["shm"])
    assert u.parts["r0"].channels == (by["shm"], by["grpc"]) and u.parts["r1"].channels == (by["shm"],) * 2
    told = {c.channel_id: (c.workers, c.plan_id) for c in want(g).channels}
    assert told == {by["shm"]: ((0,), f"p-{by['shm']}"), by["grpc"]: ((1,), f"p-{by['grpc']}")}
    assert [c.workers for c in want(g, "r1").channels] == [(0, 1)]


def test_a_plan_is_made_for_the_workers_of_its_channel() -> None:
    g = spread()
    g.start()
    for rid in ("r0", "r1"):
        for w in range(2):
            g.do(events.WorkerPlacement(rid, g.life(rid), "m", w, f"l-{rid}-{w}"))
        g.report(rid, update_id="u1", stage=Stage.JOINED)
    made = {e.channel_id: [m for m, _ in e.receivers] for e in g.last if isinstance(e, events.MakePlan)}
    by = {c.transport: c.channel_id for c in g.s.trainer.channels}  # type: ignore[union-attr]
    assert made == {by["shm"]: ["r0/0", "r1/0", "r1/1"], by["grpc"]: ["r0/1"]}


def test_rule_4_a_call_waits_for_every_replica_with_a_worker_in_a_channel_that_it_names() -> None:
    g, by = begun(spread())
    (call,) = g.send(1, ((by["grpc"], 0, 4),))
    g.say(Stage.ARMED, "r1")
    assert call not in g.replies, "r0's second worker is not armed"
    assert want(g).calls == (desired.ArmedCall(1, ((by["grpc"], 0, 4),)),)
    assert want(g, "r1").calls == (desired.ArmedCall(1, ()),), "nothing to arm there"
    g.say(Stage.ARMED, "r0")
    assert g.failure(call) is None


def test_rule_4_who_has_no_worker_in_the_channels_named_is_not_waited_for() -> None:
    g, by = begun(spread())
    (call,) = g.send(1, ((by["grpc"], 0, 4),))
    g.say(Stage.ARMED, "r0")
    assert g.failure(call) is None


@pytest.mark.parametrize("first", ["shm", "grpc"])
def test_rule_4_a_replica_is_told_that_all_was_called_once_all_its_channels_are_covered(first: str) -> None:
    g, by = begun(spread())
    second = "grpc" if first == "shm" else "shm"
    g.send(1, ((by[first], 0, 4),))
    g.say(Stage.ARMED)
    assert not want(g).all_called and want(g, "r1").all_called is (first == "shm")
    (finish,) = g.finish()
    assert g.failure(finish) is Reason.INCOMPLETE
    g.send(2, ((by[second], 0, 3),))
    assert not want(g).all_called
    g.send(3, ((by[second], 3, 1),))
    assert want(g).all_called and want(g, "r1").all_called


def test_rule_5_a_vote_is_compared_plan_by_plan_once_the_digests_of_all_of_them_are_in() -> None:
    g, by = begun(spread(ranks=2))
    g.send()
    generation = g.s.trainer.generation  # type: ignore[union-attr]
    g.say(Stage.PREPARED, "r0")
    for transport, rank in (("shm", 0), ("shm", 1), ("grpc", 1)):
        g.do(events.DigestsIn(generation, "u1", 1, rank, f"p-{by[transport]}"))
        assert not compared(g)
    g.do(events.DigestsIn(generation, "u1", 1, 0, f"p-{by['grpc']}"))
    (asked,) = compared(g)
    assert asked.plans == ((f"p-{by['shm']}", ("r0/0",)), (f"p-{by['grpc']}", ("r0/1",)))
    g.say(Stage.PREPARED, "r1")
    (asked,) = compared(g)
    assert asked.plans == ((f"p-{by['shm']}", ("r1/0", "r1/1")),)


def test_rule_5_finish_asks_for_the_digests_of_every_channel() -> None:
    g, by = begun(spread())
    g.send()
    g.do(events.DigestsIn(1, "u1", 1, 0, f"p-{by['shm']}"))
    (finish,) = g.finish()
    assert g.failure(finish) is Reason.DIGESTS_REQUIRED and f"p-{by['grpc']}" in str(g.replies[finish].failure)


def test_plans_of_no_bytes_are_one_plan_and_its_digests_count_for_every_channel() -> None:
    g = spread()
    g.start()
    for rid in ("r0", "r1"):
        for w in range(2):
            g.do(events.WorkerPlacement(rid, g.life(rid), "m", w, "l-nothing"))
        g.report(rid, update_id="u1", stage=Stage.JOINED)
    for e in [e for e in g.last if isinstance(e, events.MakePlan)]:
        g.do(events.PlanMade("u1", e.channel_id, update_state.PlanSummary("p-empty", 0, 0, {})))
    g.send()
    g.do(events.DigestsIn(1, "u1", 1, 0, "p-empty"))
    (finish,) = g.finish()
    g.vote()
    g.applied()
    assert g.failure(finish) is None and g.s.history["u1"].phase is Phase.COMMITTED


def test_a_whole_update_over_two_channels_of_one_replica_commits_once() -> None:
    g = spread().publish()
    u = g.s.history["u1"]
    assert u.phase is Phase.COMMITTED and g.s.committed == u.held
    assert [w.kind for w in g.written].count("decide") == 1


# --- rule 3 ---------------------------------------------------------------------------------------------------------


def test_rule_3_in_place_waits_for_every_staged_channel_also_of_one_replica() -> None:
    g = Group(modes=((Mode.STAGED,), (Mode.IN_PLACE,)), reach=(APART,)).fleet()
    g.start()
    g.join()
    u = g.s.open
    assert u is not None and len(u.channels) == 4
    modes = {c.channel_id: c.modes for c in g.s.trainer.channels}  # type: ignore[union-attr]
    assert all(modes[c] == (Mode.STAGED,) for c in u.parts["r0"].channels)
    one, two = u.parts["r0"].channels
    third, fourth = u.parts["r1"].channels
    g.send(1, ((one, 0, 4),))
    assert g.failure(g.send(2, ((third, 0, 4),))[0]) is Reason.WRONG_PHASE, "one staged channel is not declared"
    g.send(2, ((two, 0, 4),))
    g.do(events.DigestsIn(1, "u1", 1, 0, f"p-{one}"))
    assert g.failure(g.send(3, ((third, 0, 4),))[0]) is Reason.DIGESTS_REQUIRED
    g.do(events.DigestsIn(1, "u1", 1, 0, f"p-{two}"))
    g.send(3, ((third, 0, 4), (fourth, 0, 4)))
    assert want(g, "r1").calls == () and not want(g, "r1").all_called
    g.vote("r0")
    assert [c.ranges for c in want(g, "r1").calls] == [(), (), ((third, 0, 4), (fourth, 0, 4))]
    assert want(g, "r1").all_called


# --- rules 2, 6, 9: exclusion, revocation, rebind -------------------------------------------------------------------


def test_an_excluded_replica_leaves_each_of_its_channels_and_one_that_it_had_alone_is_left_out() -> None:
    g, by = begun(spread(), at_least=1)
    (call,) = g.send()
    g.say(Stage.ARMED, "r1")
    assert call not in g.replies
    g.say(Stage.FAILED, "r0", failure=NO)
    assert g.failure(call) is None, "who is excluded is not waited for"
    u = g.s.open
    assert u is not None and u.parts["r0"].excluded
    assert live_channels(u) == [by["shm"]]
    assert want(g).decision == "ABORT"
    g.do(events.DigestsIn(1, "u1", 1, 0, f"p-{by['shm']}"))
    g.finish()
    g.vote("r1")
    g.applied("r1")
    assert g.s.history["u1"].phase is Phase.COMMITTED


@pytest.mark.parametrize("how", ["abort", "exclude"])
def test_rule_9_after_bytes_were_declared_no_channel_of_a_broken_update_is_used_again(how: str) -> None:
    g, by = begun(spread(), **({"at_least": 1} if how == "exclude" else {}))
    g.send()
    g.say(Stage.FAILED, "r0", failure=NO)
    if how == "abort":
        g.say(Stage.ABORTED, "r1")
    else:
        g.do(events.DigestsIn(1, "u1", 1, 0, f"p-{by['shm']}"))
        g.finish()
        g.vote("r1")
        g.applied("r1")
    assert g.s.open is None
    assert g.failure(g.start("u2")) is Reason.REBIND_REQUIRED
    g.init(generation=1, seed=b"again".ljust(32))
    after = {c.transport: c.channel_id for c in g.s.trainer.channels}  # type: ignore[union-attr]
    assert after.keys() == by.keys() and not set(after.values()) & set(by.values())


def test_a_rebind_changes_only_the_channels_whose_members_changed() -> None:
    g = Group(replicas=3, reach=(APART, TOGETHER, TOGETHER)).fleet()
    before = {c.transport: c.channel_id for c in g.s.trainer.channels}  # type: ignore[union-attr]
    g.hello("r2", incarnation="r2#2")
    g.report("r2")
    assert g.failure(g.start("u2")) is Reason.REBIND_REQUIRED
    g.init(generation=1, seed=b"again".ljust(32))
    after = {c.transport: c.channel_id for c in g.s.trainer.channels}  # type: ignore[union-attr]
    assert after["grpc"] == before["grpc"] and after["shm"] != before["shm"]


def unreachable() -> Group:
    """r0's second worker offers nothing that the trainer has; r1 is well."""
    g = Group(reach=(("shm", "pigeon"), TOGETHER))
    for rid in g.modes:
        g.hello(rid)
        g.report(rid)
    g.init(offers=(Offer("shm"),))
    return g


def test_rule_2_a_replica_that_is_partly_out_of_reach_takes_no_part_and_is_told_which_worker() -> None:
    g = unreachable()
    call = g.start()
    u = g.s.open
    assert u is not None and list(u.parts) == ["r1"] and call not in g.replies
    ((rid, why),) = u.absent
    assert rid == "r0" and why.startswith("no transport reaches worker 1 (") and "shm: the worker: not offered" in why
    assert not needs_rebind(g.s, g.s.trainer, g.now), "binding again would not help"  # type: ignore[arg-type]


def test_rule_2_a_new_life_of_a_replica_that_was_out_of_reach_is_bound_again() -> None:
    g = unreachable()
    g.reach["r0"] = TOGETHER
    g.hello("r0", incarnation="r0#2")
    g.report("r0")
    assert needs_rebind(g.s, g.s.trainer, g.now)  # type: ignore[arg-type]
    assert g.failure(g.start()) is Reason.REBIND_REQUIRED
    g.init(generation=1, offers=(Offer("shm"),))
    g.start()
    assert g.s.open is not None and set(g.s.open.parts) == {"r0", "r1"}


def test_a_worker_that_was_never_bound_asks_for_a_rebind_and_breaks_nothing() -> None:
    """The contract gives a new worker a new incarnation; an agent that breaks it gets a refusal by name."""
    g = spread()
    r = g.s.replicas["r1"]
    more = (*r.workers, replace(r.workers[0], index=2))
    g.do(events.ReplicaHello(99, replace(r, workers=more)))
    assert g.failure(g.start()) is Reason.REBIND_REQUIRED


# --- channels whose members all act together


def together(g: Group) -> list[tuple[str, ...]]:
    """The receivers of each collective channel."""
    return [c.receivers for c in g.s.trainer.channels if c.collective]  # type: ignore[union-attr]


def test_rule_3_a_collective_has_no_member_that_takes_no_part_in_the_update() -> None:
    g = Group(replicas=3, reach=(("nccl",), ("nccl",), ("shm",))).fleet()
    assert together(g) == [("r0/0", "r1/0")]
    call = g.start(exclude=("r1",))
    assert g.failure(call) is Reason.REBIND_REQUIRED
    text = str(g.replies[call].failure)
    assert "all members of a channel of nccl act together, and r1" in text and "the trainer left it out" in text
    g.init(generation=1, seed=b"again".ljust(32))
    assert together(g) == [("r0/0",)]
    (why,) = [c for c in g.s.trainer.choices if c.replica_id == "r1"]  # type: ignore[union-attr]
    assert why.channel_id == "" and why.reason.endswith("takes part in updates: the last update went without it")
    g.start(exclude=("r1",))
    assert g.s.open is not None and set(g.s.open.parts) == {"r0", "r2"}


def test_rule_3_who_was_left_out_of_a_collective_comes_back_by_a_rebind() -> None:
    g = Group(replicas=2, reach=(("nccl",), ("nccl",))).fleet()
    g.start(exclude=("r1",))
    g.init(generation=1, seed=b"again".ljust(32))
    assert needs_rebind(g.s, g.s.trainer, g.now)  # type: ignore[arg-type]
    assert g.failure(g.start()) is Reason.REBIND_REQUIRED, "r1 is there, and bound to nothing"
    g.init(generation=1, seed=b"third".ljust(32))
    assert together(g) == [("r0/0", "r1/0")]
    g.start()
    assert g.s.open is not None and set(g.s.open.parts) == {"r0", "r1"}


def test_rule_3_a_replica_that_may_not_join_is_not_taken_into_a_collective() -> None:
    g = Group(replicas=2, reach=(("nccl",), ("nccl",)))
    for rid in g.modes:
        g.hello(rid)
        g.report(rid)
    g.do(events.Beat("r1", g.life("r1"), process=states.Process.STOPPED))
    g.init()
    assert together(g) == [("r0/0",)]
    g.start()
    assert g.s.open is not None and set(g.s.open.parts) == {"r0"}, "no update waits for it"


def test_other_channels_may_have_members_that_take_no_part() -> None:
    g = Group(replicas=2, reach=(("shm",), ("shm",))).fleet()
    g.start(exclude=("r1",))
    assert g.s.open is not None and set(g.s.open.parts) == {"r0"}
