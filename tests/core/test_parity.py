"""Parity checks that a trainer brings with FinishUpdate: kept with their version, and what a failed one means."""

from __future__ import annotations

from typing import Any

from tests.core.harness import Group
from weightplane.controlplane.core import events
from weightplane.controlplane.core.holders import holders
from weightplane.controlplane.core.model import Held, Policy, Retained
from weightplane.controlplane.core.parity import newest
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.states import Admin, Liveness, ParityPolicy, Phase, Stage, Verdict
from weightplane.controlplane.core.update_state import Parity


def check(rid: str = "r0", version: int = 1, verdict: Verdict = Verdict.NOT_AT_PARITY, **fields: Any) -> Parity:
    return Parity(rid, version, verdict, tokens=64, mean_abs=0.5, ess=0.9, **fields)


def tell(g: Group, *checks: Parity, update_id: str = "u1") -> Reason | None:
    """Repeat the FinishUpdate of a committed update, with checks."""
    return g.failure(g.call(events.FinishUpdate, update_id=update_id, parity=checks))


def fleet(policy: ParityPolicy = ParityPolicy.QUARANTINE) -> Group:
    g = Group().fleet()
    g.call(events.SetPolicy, policy=Policy(parity=policy))
    return g.publish()


def test_a_check_is_kept_with_the_update_of_its_version_and_written_down() -> None:
    g = fleet(ParityPolicy.RECORD)
    assert tell(g, check("r0"), check("r1", verdict=Verdict.AT_PARITY)) is None
    assert [p.replica_id for p in g.s.history["u1"].parity] == ["r0", "r1"]
    last = [w for w in g.written if w.kind == "close"][-1]
    assert last.update is not None and last.update.parity == g.s.history["u1"].parity
    assert g.s.replicas["r0"].admin is Admin.ACTIVE, "the policy is to record"
    again = check("r0", verdict=Verdict.AT_PARITY)
    tell(g, again)
    assert newest(g.s)["r0"] == again and len(g.s.history["u1"].parity) == 2


def test_checks_come_with_the_next_update_too() -> None:
    g = fleet(ParityPolicy.RECORD).to(Phase.TRANSFERRING, "u2")
    g.digests()
    g.vote("r0", "r1")
    g.call(events.FinishUpdate, parity=(check(verdict=Verdict.AT_PARITY),))
    g.applied("r0", "r1")
    assert g.s.committed == Held(2, "u2")
    assert g.s.history["u1"].parity and not g.s.history["u2"].parity


def test_a_failed_check_quarantines_the_replica_that_failed_and_a_full_update_heals_it() -> None:
    g = fleet()
    tell(g, check("r0", reason="mean_abs 0.5 > 1e-05"), check("r1", verdict=Verdict.AT_PARITY))
    assert g.s.replicas["r0"].admin is Admin.QUARANTINED and g.s.replicas["r1"].admin is Admin.ACTIVE
    failure = g.s.replicas["r0"].failure
    assert failure is not None and "mean_abs 0.5 > 1e-05" in failure.message and "version 1" in failure.message
    assert any(w.kind == "roster" and w.data["admin"] is Admin.QUARANTINED for w in g.written)
    g.publish("u2")
    r = g.s.replicas["r0"]
    assert (r.admin, r.held.version, r.failure) == (Admin.ACTIVE, 2, None)


def test_who_no_longer_holds_what_was_checked_is_left_alone() -> None:
    g = fleet()
    g.publish("u2")
    tell(g, check("r0"))
    assert g.s.replicas["r0"].admin is Admin.ACTIVE, "version 1 was checked, it holds 2"
    g.hello("r1", "another-life")
    tell(g, check("r1", 2), update_id="u2")
    assert g.s.replicas["r1"].admin is Admin.ACTIVE, "another life was not checked"


def test_an_operators_state_stays_and_what_was_not_measured_accuses_nobody() -> None:
    g = fleet()
    g.call(events.SetAdmin, replica_id="r0", admin=Admin.DRAINING)
    tell(g, check("r0"), check("r1", verdict=Verdict.NOT_MEASURED))
    assert g.s.replicas["r0"].admin is Admin.DRAINING
    assert g.s.replicas["r1"].admin is Admin.ACTIVE
    assert all(r.liveness is Liveness.LIVE for r in g.s.replicas.values())


def test_a_check_of_a_version_that_was_never_committed_is_refused_and_none_is_kept() -> None:
    g = fleet()
    assert tell(g, check("r1", verdict=Verdict.AT_PARITY), check("r0", 7)) is Reason.INVALID_ARGUMENT
    assert not g.s.history["u1"].parity and g.s.replicas["r0"].admin is Admin.ACTIVE
    g.to(Phase.ABORTING, "u2")
    assert tell(g, check("r0", 2)) is Reason.INVALID_ARGUMENT, "its update was aborted"


def test_a_fenced_trainers_checks_change_nothing() -> None:
    g = fleet()
    before = g.s.replicas["r0"]
    failure = g.failure(g.call(events.FinishUpdate, update_id="u1", parity=(check(),), generation=99))
    assert failure is not None and g.s.replicas["r0"] == before and not g.s.history["u1"].parity


def test_the_end_of_the_update_that_was_checked_does_not_bring_back_who_failed_in_it() -> None:
    """FinishUpdate answers at its deadline though a replica is still PENDING; checks come while the update is open."""
    g = Group().fleet()
    g.call(events.SetPolicy, policy=Policy(parity=ParityPolicy.QUARANTINE))
    g.to(Phase.COMMITTED)
    g.applied("r0")
    assert g.s.open is not None
    g.call(events.FinishUpdate, parity=(check("r0"),))
    assert g.s.replicas["r0"].admin is Admin.QUARANTINED
    g.applied("r1")
    r = g.s.replicas["r0"]
    assert g.s.open is None and r.admin is Admin.QUARANTINED and r.failure is not None and "parity" in r.failure.message
    g.publish("u2")
    assert g.s.replicas["r0"].admin is Admin.ACTIVE, "a full update after it does"


def test_who_was_in_quarantine_for_another_reason_is_healed_where_checks_are_only_recorded() -> None:
    g = Group().fleet()
    g.call(events.SetAdmin, replica_id="r0", admin=Admin.QUARANTINED)
    g.to(Phase.COMMITTED)
    g.applied("r0")
    g.call(events.FinishUpdate, parity=(check("r0"),))
    g.applied("r1")
    assert g.s.replicas["r0"].admin is Admin.ACTIVE


def test_who_is_in_quarantine_retains_nothing_for_others() -> None:
    g = fleet()
    for rid in ("r0", "r1"):
        g.report(rid, update_id="u1", stage=Stage.APPLIED, retained=Retained(g.s.committed, "m"))
    assert [h.name for h in holders(g.s)] == ["r0", "r1"]
    tell(g, check("r0"))
    assert [h.name for h in holders(g.s)] == ["r1"]
    g.call(events.SetAdmin, replica_id="r0", admin=Admin.ACTIVE)
    assert [h.name for h in holders(g.s)] == ["r0", "r1"]


def test_a_check_of_a_replica_that_nobody_knows_is_refused() -> None:
    """Names that callers make up would be kept with the update for good, each as large as a check may be."""
    g = fleet()
    assert tell(g, check("r1"), check("r9")) is Reason.UNKNOWN_REPLICA
    assert not g.s.history["u1"].parity and g.s.replicas["r1"].admin is Admin.ACTIVE
    g.call(events.SetAdmin, replica_id="r0", admin=Admin.DRAINING)
    g.do(events.Leave("r0", g.s.replicas["r0"].incarnation))
    g.do(events.Tick())
    assert tell(g, check("r0")) is None, "it took part, whether it is still there or not"


def test_a_rank_that_does_not_exist_tells_nothing() -> None:
    g = fleet()
    for rank in (-1, 1):
        failure = g.failure(g.call(events.FinishUpdate, update_id="u1", parity=(check(),), rank=rank))
        assert failure is Reason.INVALID_ARGUMENT
    assert not g.s.history["u1"].parity and g.s.replicas["r0"].admin is Admin.ACTIVE
