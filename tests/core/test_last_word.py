"""Who is told that an update is over: only those who do not know it by their own last report."""

from __future__ import annotations

from tests.core.harness import Group
from weightplane.controlplane.core.events import AbortUpdate, Push
from weightplane.controlplane.core.states import Phase, Stage


def pushed(g: Group) -> set[str]:
    """Whom the last event had told their desired state."""
    return {rid for e in g.last if isinstance(e, Push) for rid in e.replica_ids}


def test_nobody_who_applied_what_was_committed_is_told_once_more() -> None:
    g = Group(replicas=3).fleet().to(Phase.COMMITTED)
    for rid in ("r0", "r1", "r2"):
        g.applied(rid)
        assert not pushed(g)
    assert g.s.open is None
    g.publish("u2")
    assert g.s.committed.update_id == "u2"


def test_who_did_not_say_that_it_applied_is_told_at_the_deadline_what_was_decided() -> None:
    g = Group(replicas=3).fleet().to(Phase.COMMITTED, update_timeout_s=10.0)
    g.applied("r0", "r1")
    told: set[str] = set()
    while g.s.open is not None:
        g.sleep(0.5)
        told = pushed(g)
    update = g.desired("r2").update
    assert told == {"r2"} and update is not None and (update.update_id, update.decision) == ("u1", "COMMIT")


def test_all_are_told_of_an_abort_that_is_over() -> None:
    g = Group(replicas=3).fleet().to(Phase.TRANSFERRING)
    g.call(AbortUpdate, message="no more")
    for rid in ("r0", "r1"):
        g.say(Stage.ABORTED, rid)
        assert not pushed(g)
    g.say(Stage.ABORTED, "r2")
    assert g.s.open is None and pushed(g) == {"r0", "r1", "r2"}
