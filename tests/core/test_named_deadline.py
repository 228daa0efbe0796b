"""Who is named when time is up: not whoever says so first, but who is behind; and whom a commit did not reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.core.harness import Group
from weightplane.controlplane.core import events, progress, trainers
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Mode, PauseMode, Phase, Stage
from weightplane.controlplane.core.update_state import Update

UP = Failure(Reason.DEADLINE, "did not vote in time; was at joined")


def open_group(**options: Any) -> Group:
    return Group(replicas=3).fleet().to(Phase.TRANSFERRING, update_timeout_s=10.0, **options)


def ended(g: Group) -> Update:
    u = g.s.open or g.s.history["u1"]
    assert u.phase in (Phase.ABORTING, Phase.ABORTED)
    return u


def test_who_is_behind_all_others_is_named() -> None:
    g = open_group()
    for name, nbytes in (("r0", 8), ("r1", 4), ("r2", 8)):
        g.say(Stage.ARMED, name, bytes_received=nbytes)
    g.sleep(9.5)
    failure = ended(g).failure
    assert failure is not None and failure.reason is Reason.DEADLINE and failure.member == "r1"
    assert "r1 is furthest behind, with 4 bytes" in failure.message


def test_nobody_is_named_where_all_have_got_equally_far() -> None:
    g = open_group()
    for name in ("r0", "r1", "r2"):
        g.say(Stage.ARMED, name, bytes_received=8)
    g.sleep(9.5)
    failure = ended(g).failure
    assert failure is not None and failure.reason is Reason.DEADLINE and failure.member == ""


def due(replicas: int, nbytes: int = 8) -> Group:
    """An update in which every replica is to get so many bytes."""
    g = Group(replicas=replicas).fleet().to(Phase.TRANSFERRING, update_timeout_s=10.0)
    u = g.s.open
    assert u is not None
    bytes_for = {f"{name}/0": nbytes for name in u.parts}
    plans = {c: replace(p, bytes_for=bytes_for) for c, p in u.plans.items()}
    g.s = replace(g.s, open=replace(u, plans=dict(list(plans.items())[:1])))
    return g


def armed(g: Group, **received: int) -> None:
    for name, nbytes in received.items():
        g.report(name, update_id="u1", stage=Stage.ARMED, armed_seq=1, bytes_received=nbytes)


@pytest.mark.parametrize("first", ["coordinator", "replica"])
def test_a_trainer_that_sends_nothing_more_is_named_beside_the_replica_that_waited(first: str) -> None:
    """A C++ trainer was stopped: its connection, and so its lease, lives on. It cannot
    be told from a receiver that takes nothing. Also where the replica's clock says first that time is up."""
    g = due(1)
    armed(g, r0=4)
    u = g.s.open
    assert u is not None
    if first == "replica":
        g.sleep(u.prepare_deadline - g.now - 0.05)
        g.say(Stage.FAILED, "r0", failure=UP)
    else:
        g.sleep(9.5)
    failure = ended(g).failure
    assert failure is not None and failure.reason is Reason.DEADLINE and failure.member == "r0", failure
    stage = "FAILED" if first == "replica" else "ARMED"
    assert f"waited for replicas r0 ({stage}); r0 is furthest behind, with 4 bytes;" in failure.message, failure
    assert failure.message.endswith("; trainer ranks [0] did not finish sending to them"), failure
    assert g.s.replicas["r0"].failures_in_a_row == 0


def test_who_is_behind_others_is_named_beside_the_ranks_that_did_not_finish() -> None:
    g = due(2)
    armed(g, r0=8, r1=4)
    g.sleep(9.5)
    failure = ended(g).failure
    assert failure is not None and failure.member == "r1", failure
    assert "r1 is furthest behind, with 4 bytes; trainer ranks [0] did not finish" in failure.message


@pytest.mark.parametrize("what", ["not armed", "all came", "finished"])
def test_a_replica_alone_is_named_for_what_no_trainer_does(what: str) -> None:
    g = due(1)
    if what == "finished":
        g.finish()
    if what != "not armed":
        armed(g, r0=4 if what == "finished" else 8)
    g.sleep(9.5)
    failure = ended(g).failure
    assert failure is not None and failure.member == "r0" and "r0 is furthest behind" in failure.message, failure
    assert "did not finish sending" not in failure.message


def first_to_say_so() -> Group:
    """r2 says that time is up a moment before the coordinator's clock does; r1 holds all of them up."""
    g = open_group()
    g.finish()
    for name, nbytes in (("r0", 8), ("r1", 4), ("r2", 8)):
        g.say(Stage.ARMED, name, bytes_received=nbytes)
    u = g.s.open
    assert u is not None
    g.sleep(u.prepare_deadline - g.now - 0.05)
    g.say(Stage.ABORTED, "r2", failure=UP)
    return g


def test_who_says_first_that_time_is_up_is_not_named() -> None:
    g = first_to_say_so()
    failure = ended(g).failure
    assert failure is not None and failure.reason is Reason.DEADLINE and failure.member == "r1", failure
    assert {n: r.failures_in_a_row for n, r in g.s.replicas.items()} == {"r0": 0, "r1": 1, "r2": 0}


def test_without_that_rule_an_innocent_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect."""
    monkeypatch.setattr(progress, "_EARLY_S", -1e9)
    failure = ended(first_to_say_so()).failure
    assert failure is not None and failure.member == "r2"


def sender_says(before_s: float, rank: int = -1) -> Failure:
    """The sender lost r2 so long before the deadline, and aborts; r1 is behind all others. Why the update failed."""
    g = open_group()
    for name, nbytes in (("r0", 8), ("r1", 4), ("r2", 8)):
        g.say(Stage.ARMED, name, bytes_received=nbytes)
    u = g.s.open
    assert u is not None
    g.sleep(u.prepare_deadline - g.now - before_s)
    lost = "rank/0 cannot send: PeerLost: 'r2/0' aborted its side"
    g.do(events.AbortUpdate("abort", 1e9, u.generation, "u1", lost, rank))
    failure = ended(g).failure
    assert failure is not None
    return failure


def test_P18_a_sender_that_lost_a_peer_as_time_ran_out_is_not_taken_at_its_word() -> None:
    """That peer ended by its own clock, a moment before the coordinator's."""
    failure = sender_says(0.05)
    assert failure.reason is Reason.DEADLINE and failure.member == "r1" and failure.phase == "TRANSFERRING", failure
    assert "r1 is furthest behind, with 4 bytes" in failure.message
    assert sender_says(2.0).reason is Reason.ABORTED_BY_CALLER, "long before it"
    assert sender_says(0.05, rank=0).reason is Reason.PEER_RANK_FAILED, "what its own code did"


def test_one_that_gives_up_long_before_the_deadline_is_named() -> None:
    g = open_group()
    g.say(Stage.ABORTED, "r2", failure=UP)
    failure = ended(g).failure
    assert failure is not None and failure.member == "r2"


def test_whom_a_commit_did_not_reach_by_the_deadline_is_pending_for_a_reason() -> None:
    g = Group().fleet().to(Phase.VERIFYING)
    g.finish()
    g.vote()
    g.applied("r0")
    g.sleep(121)
    parts = g.s.history["u1"].parts
    assert parts["r0"].failure is None
    failure = parts["r1"].failure
    assert failure is not None and failure.reason is Reason.DEADLINE and failure.member == "r1"


def test_a_call_whose_own_time_is_over_names_the_one_replica_that_is_behind() -> None:
    g = Group(replicas=2).fleet().to(Phase.PREPARING, update_timeout_s=60.0)
    g.join()
    late = g.call(events.UpdateWeights, rank=0, seq=1, ranges=(), deadline=g.now + 1.0)
    g.say(Stage.ARMED, "r1")
    g.sleep(1.5)
    failure = g.replies[late].failure
    assert failure is not None and (failure.reason, failure.member) == (Reason.DEADLINE, "r0")
    assert g.s.open is not None and g.s.open.failure is None, "the update goes on"


# --- a trainer that is stopped ---------------------------------------------------------------------------------------


def stopped_trainer(beats: bool) -> Group:
    """Its WatchUpdate stream stays open, as a stopped process's does; it beat until then, or never did."""
    g = due(1)
    g.do(events.RankHello("w", 1, 1, 0, watch=True))
    if beats:
        g.beats()
    armed(g, r0=4)
    for _ in range(8):
        g.now += 0.5
        g.do(events.Beat("r0", g.life("r0")))
        g.do(events.Tick())
    return g


def test_a_trainer_that_beat_is_lost_once_its_beats_end_though_its_stream_is_open() -> None:
    g = stopped_trainer(beats=True)
    failure = ended(g).failure
    assert failure is not None and (failure.reason, failure.member) == (Reason.MEMBER_LOST, "rank/0"), failure
    assert "no heartbeat came for 3" in failure.message and "its connection is open" in failure.message, failure
    assert g.s.replicas["r0"].failures_in_a_row == 0
    other = g.init("other")
    assert [g.failure(c) for c in other] == [None], "and its hold is over"


def test_a_trainer_that_never_beat_is_held_by_its_stream_alone() -> None:
    g = stopped_trainer(beats=False)
    assert g.s.open is not None and g.s.open.phase is Phase.TRANSFERRING
    (refused,) = g.init("other")
    assert g.failure(refused) is Reason.TRAINER_HELD


def test_one_that_opens_its_stream_anew_is_held_by_it_until_it_beats_again() -> None:
    g = due(1)
    for again in (False, True):
        g.beats()
        g.do(events.RankHello("w", 1, 1, 0, watch=True))
        g.sleep(5, beats=False)
        rank = g.s.trainer.ranks[0] if g.s.trainer is not None else None
        assert rank is not None and trainers.rank_lives(rank, g.now), again


def test_with_the_stream_taken_for_a_sign_of_life_the_replica_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect."""
    monkeypatch.setattr(trainers, "_by_stream", lambda rank: rank.watches > 0)
    g = stopped_trainer(beats=True)
    assert g.s.open is not None and g.s.open.phase is Phase.TRANSFERRING
    g.sleep(9.5, beats=False)
    failure = ended(g).failure
    assert failure is not None and failure.member == "r0"


@pytest.mark.parametrize("gives_up_first", [True, False])
@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
def test_requests_that_a_pause_waits_for_are_said_to_be_why(mode: Mode, gives_up_first: bool) -> None:
    """Whoever's clock is first: the replica that gives up has let its requests go on, and counts none any more."""
    g = Group(replicas=2, modes=((mode,),)).fleet()
    g.to(Phase.TRANSFERRING, update_timeout_s=10.0, pause=PauseMode.WAIT)
    g.say(Stage.RECEIVED, "r0", bytes_received=8, pause_holders=("update",))
    waits = Stage.RECEIVED if mode is Mode.STAGED else Stage.JOINED
    for n in (7, 3):
        g.report("r1", update_id="u1", stage=waits, running_requests=n)
    g.sleep(g.s.open.prepare_deadline - g.now - 0.05)  # type: ignore[union-attr]
    if gives_up_first:
        g.report("r1", update_id="u1", stage=Stage.FAILED, failure=UP)
    g.sleep(0.5)
    failure = ended(g).failure
    assert failure is not None and failure.reason is Reason.DEADLINE
    said = "r1: generation does not stand still yet (pause=wait), 3 request(s) still in flight"
    assert said in failure.message and "r0: generation" not in failure.message, failure


def test_an_engine_that_tells_of_no_request_may_not_answer_at_all() -> None:
    g = open_group(pause=PauseMode.WAIT)
    g.say(Stage.RECEIVED)
    g.sleep(9.5)
    failure = ended(g).failure
    assert failure is not None and "tells of no request in flight: does it answer?" in failure.message, failure


def test_requests_that_no_pause_waits_for_are_not_said_to_be_why() -> None:
    for pause, holders in ((PauseMode.KEEP, ()), (PauseMode.WAIT, ("update",))):
        g = open_group(pause=pause)
        g.say(Stage.RECEIVED, running_requests=3, pause_holders=holders)
        g.sleep(9.5)
        failure = ended(g).failure
        assert failure is not None and "request" not in failure.message, failure
