"""Orders to sleep and to wake: what is refused so that no weights are lost, and what a replica is meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.harness import Agent, Group, wanted
from weightplane.controlplane.core import events, replica
from weightplane.controlplane.core.evolve import replace
from weightplane.controlplane.core.members import may_join, routable
from weightplane.controlplane.core.model import NONE_HELD, SLEEP_TAGS, Held, SleepOrder
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Admin, Stage, Weights

LOST = Failure(Reason.ENGINE, "its weights were dropped by a sleep of level 2", "r0")


class Bed(Group):
    """A group whose replicas can sleep, and say so when they obeyed."""

    def hello(self, rid: str, incarnation: str = "", session: int = 0) -> None:
        super().hello(rid, incarnation, session)
        self.put(rid, sleep_levels=(1, 2))

    def put(self, rid: str, **changes: object) -> None:
        r = replace(self.s.replicas[rid], **changes)
        self.s = replace(self.s, replicas={**self.s.replicas, rid: r})

    def order(self, level: int = 0, tags: tuple[str, ...] = ()) -> str:
        """A call to sleep at ``level``, or to wake ``tags``."""
        if level:
            return self.call(events.SetSleep, replica_id="r0", level=level)
        return self.call(events.SetAwake, replica_id="r0", tags=tags)

    def obey(self, **fields: object) -> None:
        """r0 carries its order out."""
        o = self.s.replicas["r0"].sleep
        assert o is not None
        self.report("r0", **{"asleep": o.asleep, "sleep_order": o.order, **fields})

    def says(self, **fields: object) -> None:
        """r0 reports as it is."""
        r = self.s.replicas["r0"]
        self.report("r0", **{"asleep": r.asleep, "sleep_order": r.sleep_done, **fields})

    @property
    def r0(self) -> tuple[Admin, tuple[str, ...]]:
        r = self.s.replicas["r0"]
        return r.admin, r.asleep


def bed() -> Bed:
    """Two replicas, which hold what was published."""
    g = Bed()
    g.fleet()
    g.publish()
    return g


def test_it_is_asleep_from_the_order_on_and_the_caller_is_answered_once_it_is_so() -> None:
    g = bed()
    call = g.order(1)
    assert call not in g.replies and g.r0 == (Admin.ASLEEP, ())
    order = g.desired("r0").sleep
    assert order is not None and (order.level, order.asleep) == (1, SLEEP_TAGS)
    g.says()  # of before
    assert call not in g.replies and g.r0[0] is Admin.ASLEEP
    g.obey(pause_holders=("sleep",))
    assert g.failure(call) is None and g.r0 == (Admin.ASLEEP, SLEEP_TAGS)
    r = g.s.replicas["r0"]
    assert r.weights is Weights.READY and may_join(r, g.now) == "it is ASLEEP" and not routable(g.s, r)[2]
    assert [w.data["admin"] for w in g.written if w.kind == "roster"][-1] == Admin.ASLEEP


def test_who_sleeps_is_in_no_update_and_who_has_its_weights_back_is() -> None:
    g = bed()
    g.order(1)
    g.start("u2")
    assert g.s.open is not None and set(g.s.open.parts) == {"r1"}
    g.call(events.AbortUpdate, message="over")
    g.report("r1", update_id="u2", stage=Stage.ABORTED)
    g.obey(pause_holders=("sleep",))
    call = g.order(tags=("weights",))
    assert g.r0[0] is Admin.ASLEEP, "its weights are not there yet"
    g.start("u3")
    assert g.s.open is not None and set(g.s.open.parts) == {"r1"}
    g.call(events.AbortUpdate, message="over")
    g.report("r1", update_id="u3", stage=Stage.ABORTED)
    g.obey(pause_holders=("sleep",))
    assert g.failure(call) is None and g.r0 == (Admin.ACTIVE, ("kv_cache",))
    assert routable(g.s, g.s.replicas["r0"])[3] == "generation is paused by sleep"
    g.init()
    g.start("u4")
    assert g.s.open is not None and set(g.s.open.parts) == {"r0", "r1"}


def test_a_deep_sleep_is_only_left_by_way_of_an_update() -> None:
    """C08 in the core: weights that were dropped are never READY, and never served."""
    g = bed()
    g.order(2)
    lost = {"held": (NONE_HELD,) * 2, "dirty": True, "dirty_reason": LOST, "pause_holders": ("dirty", "sleep")}
    g.obey(**lost)
    assert g.s.replicas["r0"].weights is Weights.DIRTY
    everything = g.order()
    assert g.failure(everything) is Reason.WRONG_PHASE
    failure = g.replies[everything].failure
    assert failure is not None and "dropped" in failure.message and "publish" in failure.message
    assert g.failure(g.order(tags=("kv_cache",))) is Reason.WRONG_PHASE
    weights = g.order(tags=("weights",))
    g.obey(**lost)
    assert g.failure(weights) is None
    rest = g.order(tags=("kv_cache",))
    assert g.failure(rest) is Reason.WRONG_PHASE, "no update yet"
    held = (Held(2, "u2"),) * 2
    g.s = replace(g.s, committed=held[0])
    g.says(held=held, pause_holders=("sleep",))
    rest = g.order(tags=("kv_cache",))
    g.obey(held=held)
    assert g.failure(rest) is None and g.r0 == (Admin.ACTIVE, ())


@pytest.mark.parametrize(
    ("before", "level", "reason"),
    [
        pytest.param(lambda g: g.put("r0", sleep_levels=(1,)), 2, Reason.CAPABILITY, id="a level it has not got"),
        pytest.param(lambda g: g.put("r0", sleep_levels=()), 1, Reason.CAPABILITY, id="no sleep at all"),
        pytest.param(lambda g: g.start("u2"), 1, Reason.WRONG_PHASE, id="in the middle of an update"),
        pytest.param(lambda g: g.put("r0", pending="u1"), 1, Reason.WRONG_PHASE, id="a decided update is owed"),
        pytest.param(lambda g: g.put("r0", draining="u1"), 1, Reason.WRONG_PHASE, id="an aborted one drains"),
        pytest.param(lambda g: g.put("r0", admin=Admin.DRAINING), 1, Reason.WRONG_PHASE, id="being drained"),
        pytest.param(lambda g: g.put("r0", asleep=("kv_cache",)), 1, Reason.WRONG_PHASE, id="half awake"),
        pytest.param(lambda g: g.put("r0", asleep=SLEEP_TAGS), 2, Reason.WRONG_PHASE, id="deeper than it sleeps"),
        pytest.param(lambda g: g.order(1), 1, Reason.WRONG_PHASE, id="an order is under way"),
        pytest.param(lambda g: g.put("r0", reported=False), 1, Reason.WRONG_PHASE, id="not there"),
    ],
)
def test_an_order_to_sleep_is_refused(before: Callable[[Bed], object], level: int, reason: Reason) -> None:
    g = bed()
    before(g)
    admin = g.s.replicas["r0"].admin
    call = g.order(level)
    assert g.failure(call) is reason and g.s.replicas["r0"].admin is admin


def test_a_repeat_is_no_error() -> None:
    g = bed()
    g.order(2)
    g.obey(pause_holders=("sleep",))
    for level in (1, 2):
        assert g.failure(g.order(level)) is None
    g.order()
    g.obey()
    for tags in ((), ("weights",), ("kv_cache",)):
        assert g.failure(g.order(tags=tags)) is None
    assert g.r0 == (Admin.ACTIVE, ())


def test_an_order_that_fails_is_told_and_what_is_true_counts() -> None:
    g = bed()
    call = g.order(1)
    why = Failure(Reason.ENGINE, "no", "r0")
    g.obey(asleep=(), sleep_failure=why)
    assert g.replies[call].failure == why and g.r0 == (Admin.ACTIVE, ())
    again = g.order(1)
    assert again not in g.replies, "the failure of the order before is not this one's"
    g.obey()
    assert g.failure(again) is None and g.r0[0] is Admin.ASLEEP


def test_a_caller_is_answered_in_time_and_when_the_replica_is_lost() -> None:
    g = bed()
    late = g.call(events.SetSleep, replica_id="r0", level=1, deadline=g.now + 2)
    g.sleep(3)
    assert g.failure(late) is Reason.DEADLINE and g.r0[0] is Admin.ASLEEP
    g.obey()
    waits = g.order()
    g.hello("r0", "r0#2")
    g.sleep(0.5)
    assert g.failure(waits) is Reason.MEMBER_LOST


def test_what_a_new_life_says_counts() -> None:
    """An agent that restarted finds its engine asleep; an engine that restarted is awake."""
    g = bed()
    g.order(1)
    g.obey()
    g.hello("r0", "r0#2")
    g.says(asleep=SLEEP_TAGS)
    assert g.r0 == (Admin.ASLEEP, SLEEP_TAGS) and g.desired("r0").sleep is None
    g.hello("r0", "r0#3")
    g.report("r0")
    assert g.r0 == (Admin.ACTIVE, ())


@pytest.mark.parametrize("admin", [Admin.ACTIVE, Admin.DRAINING, Admin.PINNED])
def test_no_other_order_makes_it_active(admin: Admin) -> None:
    g = bed()
    g.order(1)
    g.obey()
    assert g.failure(g.call(events.SetAdmin, replica_id="r0", admin=admin)) is Reason.WRONG_PHASE
    assert g.r0[0] is Admin.ASLEEP


# --- the replica's own machine


def order(n: int, *asleep: str, level: int = 1) -> SleepOrder:
    return SleepOrder(n, level, asleep)


def test_it_obeys_each_order_once_and_says_what_came_of_it() -> None:
    a = Agent()
    assert a.told(sleep=order(5, *SLEEP_TAGS)) == ["SendReport", "Sleep"]
    assert a.told(sleep=order(5, *SLEEP_TAGS)) == []
    held = (Held(1, "u1"),) * 2
    assert a.do(replica.SleepDone(5, SLEEP_TAGS, held)) == ["SendReport"]
    report = replica.report_of(a.s)
    assert (report.asleep, report.sleep_order, report.sleep_failure) == (SLEEP_TAGS, 5, None)
    assert report.pause_holders == ("sleep",) and report.held == held and replica.fenced(a.s)
    assert a.told(sleep=order(5, *SLEEP_TAGS)) == []
    assert a.told(sleep=order(6)) == ["Sleep"]
    no = Failure(Reason.ENGINE, "no")
    a.do(replica.SleepDone(6, SLEEP_TAGS, held, no))
    assert replica.report_of(a.s).sleep_failure == no
    a.told(sleep=order(7))
    a.do(replica.SleepDone(7, (), held))
    assert replica.report_of(a.s).pause_holders == () and not replica.fenced(a.s)


def test_an_order_waits_for_the_update_to_be_over() -> None:
    a = Agent().to("PREPARED")
    assert "Sleep" not in a.told(wanted(), sleep=order(5, *SLEEP_TAGS))
    a.told(wanted(decision="ABORT"), sleep=order(5, *SLEEP_TAGS))
    assert a.do(replica.Drained("u1", False))[-1] == "Sleep"


def test_orders_come_one_after_the_other() -> None:
    a = Agent()
    a.told(sleep=order(5, *SLEEP_TAGS))
    assert a.told(sleep=order(6)) == []
    assert a.do(replica.SleepDone(5, SLEEP_TAGS, ())) == ["SendReport", "Sleep"]


def test_weights_that_a_sleep_dropped_are_fenced_until_an_update() -> None:
    a = Agent()
    a.told(sleep=order(5, *SLEEP_TAGS, level=2))
    effects = a.do(replica.SleepDone(5, SLEEP_TAGS, (NONE_HELD,) * 2, None, LOST))
    assert effects == ["Pause", "SendReport"] and a.s.dirty_reason == LOST


def test_another_cluster_numbers_its_orders_anew() -> None:
    a = Agent()
    a.told(sleep=order(50, *SLEEP_TAGS))
    assert a.told(cluster_id="another", sleep=order(3)) == ["SendReport", "Sleep"]
    a.do(replica.SleepDone(50, SLEEP_TAGS, ()))
    assert a.s.asleep == SLEEP_TAGS and a.s.sleep_done == 0
    a.do(replica.SleepDone(3, (), ()))
    assert replica.report_of(a.s).sleep_order == 3 and a.s.asleep == ()


def test_who_fell_asleep_by_hand_joins_nothing_whatever_its_administrative_state() -> None:
    g = bed()
    g.call(events.SetAdmin, replica_id="r0", admin=Admin.QUARANTINED)
    g.says(asleep=SLEEP_TAGS)
    r = g.s.replicas["r0"]
    assert r.admin is Admin.QUARANTINED and may_join(r, g.now) == "its weights are asleep"
    g.says(asleep=("kv_cache",))
    assert not may_join(g.s.replicas["r0"], g.now)


def test_who_fell_asleep_by_hand_is_asleep() -> None:
    g = bed()
    g.says(asleep=SLEEP_TAGS)
    r = g.s.replicas["r0"]
    assert g.r0 == (Admin.ASLEEP, SLEEP_TAGS) and may_join(r, g.now) == "it is ASLEEP" and not routable(g.s, r)[2]
    g.says(asleep=())
    assert g.r0 == (Admin.ACTIVE, ())
