"""The coordinator's machine by example: the eleven rules of an update, and what the simulator found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.harness import Group
from weightplane.controlplane.core import desired, events, group, members, model, states
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Admin, Liveness, Mode, PauseMode, Phase, Stage, Weights

BOTH = ((Mode.STAGED,), (Mode.IN_PLACE,))


def routable(g: Group, rid: str) -> bool:
    return members.routable(g.s, g.s.replicas[rid])[2]


def test_an_update_from_start_to_commit() -> None:
    g = Group(replicas=3, ranks=2).fleet()
    start = g.start()
    assert g.s.open is not None and g.s.open.phase is Phase.PREPARING and g.s.open.frozen
    g.join()
    assert g.failure(start) is None
    sends = g.send()
    assert not set(sends) & set(g.replies)
    g.say(Stage.ARMED)
    assert [g.failure(c) for c in sends] == [None, None]
    g.digests()
    finishes = g.finish()
    g.vote()
    assert g.s.open.phase is Phase.COMMITTED and not set(finishes) & set(g.replies)
    g.applied()
    assert [g.failure(c) for c in finishes] == [None, None]
    assert g.s.committed == Held(1, "u1") and g.s.open is None
    assert all(r.weights is Weights.READY and routable(g, r.replica_id) for r in g.s.replicas.values())


# --- rule 1 ---------------------------------------------------------------------------------------------------------


def test_rule_1_an_engine_that_restarted_behind_its_agent_is_joining() -> None:
    g = Group().fleet().publish()
    g.hello("r0", "r0#2")
    assert g.s.replicas["r0"].weights is Weights.JOINING and not routable(g, "r0")
    g.report("r0", held=(Held(),) * 2)
    assert g.s.replicas["r0"].weights is Weights.JOINING and g.s.replicas["r0"].held == Held()


def test_rule_1_an_older_hello_that_arrives_late_is_ended_and_changes_nothing() -> None:
    g = Group().fleet()
    g.hello("r0", "r0#9", session=90)
    before = g.s.replicas["r0"]
    g.hello("r0", "r0#1", session=50)
    assert g.s.replicas["r0"] == before
    assert any(isinstance(e, events.EndSession) and e.session == 50 for e in g.last)


def test_rule_1_a_version_of_another_store_is_neither_ready_nor_routable() -> None:
    g = Group().fleet()
    g.report("r0", held=(Held(70, "elsewhere"),) * 2)
    assert g.s.replicas["r0"].weights is Weights.JOINING
    g.to(Phase.TRANSFERRING)
    assert g.s.replicas["r0"].weights is Weights.UPDATING and not routable(g, "r0")


# --- rule 2 ---------------------------------------------------------------------------------------------------------


def test_rule_2_only_eligible_replicas_with_a_live_lease_take_part_and_the_absent_are_named() -> None:
    g = Group(replicas=4).fleet()
    g.call(events.SetAdmin, replica_id="r1", admin=Admin.DRAINING)
    g.do(events.Leave("r2", g.life("r2")))
    g.start(exclude=("r3",))
    u = g.s.open
    assert u is not None and set(u.parts) == {"r0"}
    assert {rid for rid, _ in u.absent} == {"r1", "r2", "r3"}


def test_rule_2_too_few_replicas_refuse_the_start() -> None:
    g = Group(replicas=1).fleet()
    assert g.failure(g.start(at_least=2)) is Reason.NOT_ENOUGH_REPLICAS
    assert g.s.open is None and g.s.last_version == 0


def test_rule_2_after_a_restart_the_start_waits_for_the_roster_and_no_longer_than_two_ttl() -> None:
    g = Group().fleet().publish()
    g.s, _ = group.restarted(replace(g.s, replicas={}), None, 2, g.now)
    g.hello("r0")
    g.report("r0")
    g.init(generation=1)
    start = g.start("u2", generation=1)
    assert start not in g.replies and g.s.open is None
    g.sleep(2 * g.s.config.ttl_s + 1)
    assert g.s.open is not None and ("r1", "its lease ended") in g.s.open.absent


# --- rule 3 ---------------------------------------------------------------------------------------------------------


def mixed() -> tuple[Group, str, str]:
    g = Group(modes=BOTH).fleet()
    g.start()
    g.join()
    u = g.s.open
    assert u is not None
    return g, u.parts["r0"].channels[0], u.parts["r1"].channels[0]


def test_rule_3_a_channel_never_mixes_modes_and_in_place_goes_last() -> None:
    g, staged, in_place = mixed()
    assert staged != in_place
    assert g.failure(g.send(1, ((staged, 0, 4), (in_place, 0, 4)))[0]) is Reason.WRONG_PHASE
    assert g.failure(g.send(1, ((in_place, 0, 4),))[0]) is Reason.WRONG_PHASE
    g.send(1, ((staged, 0, 4),))
    assert g.failure(g.send(2, ((in_place, 0, 4),))[0]) is Reason.DIGESTS_REQUIRED
    g.digests()
    g.send(2, ((in_place, 0, 4),))
    assert g.desired("r1").update is not None and g.desired("r1").update.calls == ()  # type: ignore[union-attr]
    g.vote("r0")
    assert [c.seq for c in g.desired("r1").update.calls] == [1, 2]  # type: ignore[union-attr]


def test_rule_3_the_gate_opens_when_the_last_unprepared_staged_participant_is_excluded() -> None:
    g = Group(replicas=3, modes=((Mode.STAGED,), (Mode.STAGED,), (Mode.IN_PLACE,))).fleet()
    g.start(at_least=2)
    g.join()
    u = g.s.open
    assert u is not None
    g.send(1, ((u.parts["r0"].channels[0], 0, 4),))
    g.digests()
    g.send(2, ((u.parts["r2"].channels[0], 0, 4),))
    g.vote("r0")
    g.say(Stage.FAILED, "r1", failure=Failure(Reason.ENGINE, "no"))
    pushed = {rid for e in g.last if isinstance(e, events.Push) for rid in e.replica_ids}
    assert "r2" in pushed and g.desired("r2").update.calls  # type: ignore[union-attr]


# --- rule 4 ---------------------------------------------------------------------------------------------------------


def test_rule_4_update_weights_answers_once_every_receiver_is_armed_and_every_rank_called() -> None:
    g = Group(ranks=2).fleet()
    g.start()
    g.join()
    first = g.call(events.UpdateWeights, seq=1, rank=0)
    g.say(Stage.ARMED)
    assert first not in g.replies
    second = g.call(events.UpdateWeights, seq=1, rank=1)
    assert g.failure(first) is None and g.failure(second) is None
    again = g.call(events.UpdateWeights, seq=1, rank=1)
    assert g.failure(again) is None and g.s.open is not None and len(g.s.open.calls) == 1


def test_rule_4_calls_name_disjoint_buckets_whose_union_is_the_manifest() -> None:
    g = Group().fleet()
    g.start()
    g.join()
    assert g.s.open is not None
    c = g.s.open.channels[0]
    g.send(1, ((c, 0, 2),))
    assert g.failure(g.send(2, ((c, 1, 2),))[0]) is Reason.INVALID_ARGUMENT
    g.digests()
    assert g.failure(g.finish()[0]) is Reason.INCOMPLETE
    g.send(2, ((c, 2, 2),))
    g.finish()
    assert g.s.open.phase is Phase.TRANSFERRING, "all is declared, and bytes are on the wire"
    g.say(Stage.RECEIVED)
    assert g.s.open.phase is Phase.VERIFYING


def test_a_finish_called_while_bytes_move_is_decided_once_the_last_receiver_has_voted() -> None:
    g = Group(replicas=3).fleet().to(Phase.TRANSFERRING)
    call = g.finish()[0]
    g.vote("r0", "r1")
    assert g.s.open is not None and g.s.open.phase is Phase.TRANSFERRING and call not in g.replies
    g.vote("r2")
    assert g.s.open.phase is Phase.COMMITTED


@pytest.mark.parametrize("when", [Phase.DECIDING, Phase.COMMITTED, None])
def test_a_trainer_that_gives_up_an_update_after_its_decision_is_bound_to_other_channels(when: Phase | None) -> None:
    """It aborted its side of them before it could know."""
    g = Group().fleet().to(when or Phase.COMMITTED)
    if when is None:
        g.applied()
    g.call(events.AbortUpdate, update_id="u1", message="a peer left")
    if when is Phase.DECIDING:
        g.do(events.Stored(g.written[-1].write_id, True))
    if when is not None:
        g.applied()
    assert g.s.open is None and g.s.committed.version == 1
    assert g.failure(g.start("u2")) is Reason.REBIND_REQUIRED
    g.init(generation=1)
    g.start("u3")
    assert g.s.open is not None and g.s.open.update_id == "u3"


def test_a_receiver_that_never_gets_its_bytes_is_left_out_at_the_prepare_deadline_if_the_policy_allows() -> None:
    g = Group(replicas=3).fleet().to(Phase.TRANSFERRING, at_least=2, update_timeout_s=10.0)
    g.finish()
    g.vote("r0", "r1")
    g.say(Stage.ARMED, "r2")
    g.sleep(9.5)
    assert g.s.open is not None and g.s.open.phase is Phase.COMMITTED and g.s.open.parts["r2"].excluded


# --- rule 5 ---------------------------------------------------------------------------------------------------------


def test_rule_5_a_vote_counts_only_once_its_receipts_are_verified() -> None:
    g = Group().fleet().to(Phase.VERIFYING)
    g.vote(verified=False)
    assert g.s.open is not None and g.s.open.phase is Phase.VERIFYING
    failure = Failure(Reason.DIGEST_MISMATCH, "tensor w differs")
    g.do(events.Verified("u1", "r0", g.life("r0"), states.Evidence.NONE, failure))
    assert g.s.open is not None and g.s.open.phase is Phase.ABORTING
    assert g.s.open.failure is not None and g.s.open.failure.reason is Reason.DIGEST_MISMATCH


def test_rule_5_a_failure_after_the_vote_and_before_the_decision_aborts() -> None:
    g = Group().fleet().to(Phase.VERIFYING)
    g.vote("r0")
    g.say(Stage.PREPARED, "r0", failure=Failure(Reason.ENGINE, "staging memory was lost"))
    assert g.s.open is not None and g.s.open.phase is Phase.ABORTING


# --- rule 6 ---------------------------------------------------------------------------------------------------------


def test_rule_6_commit_is_sent_only_after_the_store_confirms_and_aborts_wait() -> None:
    g = Group().fleet().to(Phase.DECIDING)
    assert g.desired("r0").update.decision == ""  # type: ignore[union-attr]
    g.call(events.AbortUpdate, message="too late")
    assert g.s.open is not None and g.s.open.phase is Phase.DECIDING
    g.do(events.Stored(g.written[-1].write_id, True))
    assert g.s.committed.update_id == "u1" and g.desired("r0").update.decision == "COMMIT"  # type: ignore[union-attr]


def test_rule_6_an_unknown_outcome_is_read_back_and_then_the_leader_steps_down() -> None:
    g = Group().fleet().to(Phase.DECIDING)
    write = g.written[-1]
    g.do(events.Stored(write.write_id, None))
    assert any(isinstance(e, events.ReadBack) for e in g.last)
    g.sleep(g.s.config.store_timeout_s + 0.5)
    assert g.s.stepped_down and g.s.committed == Held()
    assert g.failure(g.start("u2")) is Reason.UNKNOWN_OUTCOME


def test_rule_6_stepping_down_answers_everyone_who_waits() -> None:
    g = Group(ranks=1).fleet().to(Phase.DECIDING)
    pause = g.call(events.SetPause, replica_ids=(), holder="operator", on=True)
    policy = g.call(events.SetPolicy, policy=model.Policy(), answer_writes=False)
    queued = g.start("u2", on_busy="WAIT")
    g.do(events.Stored(next(w for w in g.written if w.kind == "decide").write_id, False))
    assert {g.failure(c) for c in (pause, policy, queued)} == {Reason.UNKNOWN_OUTCOME}


def test_a_write_that_the_store_refuses_is_told_as_not_done() -> None:
    g = Group().fleet()
    policy = g.call(events.SetPolicy, policy=model.Policy(min_replicas=2), answer_writes=False)
    g.do(events.Stored(g.written[-1].write_id, False))
    failure = g.replies[policy].failure
    assert failure is not None and failure.reason is Reason.COORDINATOR_RESTARTED
    assert "nothing was written" in failure.message and g.s.stepped_down


def test_rule_6_at_least_decides_at_the_prepare_deadline_without_the_late_ones() -> None:
    g = Group(replicas=3).fleet().to(Phase.VERIFYING, at_least=2, update_timeout_s=10.0)
    g.vote("r0", "r1")
    assert g.s.open is not None and g.s.open.phase is Phase.VERIFYING
    g.sleep(9.5)
    u = g.s.open
    assert u is not None and u.phase is Phase.COMMITTED and u.parts["r2"].excluded


def test_rule_6_undecided_aborts_and_decided_completes_over_a_restart() -> None:
    g = Group().fleet().to(Phase.VERIFYING)
    state, aborted = group.restarted(g.s, g.s.open, 2, g.now)
    assert aborted is not None and aborted.phase is Phase.ABORTED and state.committed == Held()
    assert desired.resolve(state, "u1", "r0") == "ABORT"
    done = Group().fleet().to(Phase.COMMITTED)
    u = done.s.open
    assert u is not None
    state, aborted = group.restarted(replace(done.s, history={"u1": u}), None, 2, done.now)
    assert aborted is None and state.committed.version == 1 and desired.resolve(state, "u1", "r0") == "COMMIT"


# --- rule 7 ---------------------------------------------------------------------------------------------------------


def test_rule_7_at_the_deadline_finish_answers_and_the_unreached_replica_is_pending() -> None:
    g = Group().fleet()
    g.to(Phase.VERIFYING)
    finish = g.finish()[0]
    g.vote()
    g.applied("r0")
    g.sleep(121)
    assert g.failure(finish) is None
    assert g.s.open is None and g.s.replicas["r1"].weights is Weights.PENDING and not routable(g, "r1")
    g.start("u2")
    assert g.s.open is not None and set(g.s.open.parts) == {"r0"}, "PENDING is resolved before it joins another"
    assert g.desired("r1").update.decision == "COMMIT"


def test_rule_7_pending_is_resolved_by_the_late_flip_or_by_a_new_life() -> None:
    g = Group().fleet().to(Phase.COMMITTED)
    g.applied("r0")
    g.sleep(121)
    late = Group().fleet()
    late.s, late.now, late.sequence = g.s, g.now, dict(g.sequence)
    g.report("r1", update_id="u1", stage=Stage.APPLIED, held=(Held(1, "u1"),) * 2)
    assert g.s.replicas["r1"].weights is Weights.READY
    late.hello("r1", "r1#2", session=99)
    assert late.s.replicas["r1"].weights is Weights.JOINING and late.s.replicas["r1"].pending == ""


def test_rule_7_an_apply_that_fails_after_the_decision_leaves_it_committed_and_that_one_dirty() -> None:
    g = Group(replicas=3).fleet().to(Phase.VERIFYING)
    finish = g.finish()[0]
    g.vote()
    g.applied("r0", "r1")
    failure = Failure(Reason.ENGINE, "apply failed")
    g.say(Stage.FAILED, "r2", dirty=True, dirty_reason=failure, failure=failure)
    assert g.failure(finish) is None and g.s.committed.version == 1
    assert g.s.replicas["r2"].weights is Weights.DIRTY
    assert g.s.history["u1"].parts["r2"].dirty and "apply failed" in str(g.s.history["u1"].parts["r2"].failure)


# --- rule 8 ---------------------------------------------------------------------------------------------------------


def test_rule_8_replicas_flip_independently_and_workers_that_differ_are_dirty() -> None:
    g = Group().fleet().to(Phase.COMMITTED)
    g.applied("r0")
    assert g.s.replicas["r0"].weights is Weights.READY and g.s.replicas["r1"].weights is Weights.PENDING
    g.say(Stage.APPLIED, "r1", held=(Held(1, "u1"), Held()))
    assert g.s.replicas["r1"].weights is Weights.DIRTY and not routable(g, "r1")


def test_rule_8_a_dirty_replica_is_healed_by_the_next_full_update() -> None:
    g = Group().fleet().publish()
    g.report("r1", dirty=True, dirty_reason=Failure(Reason.ENGINE, "mix"))
    g.start("u2")
    u = g.s.open
    assert u is not None and set(u.parts) == {"r0", "r1"}
    for stage in (Stage.JOINED, Stage.ARMED, Stage.RECEIVED, Stage.PREPARED):
        g.report("r1", dirty=True, update_id="u2", stage=stage)
        assert g.s.open is not None and g.s.open.phase is Phase.PREPARING and not g.s.open.parts["r1"].dirty


def test_rule_8_each_pause_holder_removes_only_its_own() -> None:
    g = Group().fleet().publish()
    for holder in ("operator", "trainer"):
        g.call(events.SetPause, replica_ids=("r0",), holder=holder, on=True, mode=PauseMode.KEEP)
    g.report("r0", pause_holders=("operator", "trainer"))
    resume = g.call(events.SetPause, replica_ids=("r0",), holder="operator", on=False)
    assert dict(g.desired("r0").pauses) == {"trainer": PauseMode.KEEP} and resume not in g.replies
    g.report("r0", pause_holders=("trainer",))
    assert g.failure(resume) is None and not routable(g, "r0")


def test_rule_10_after_a_restart_heartbeats_alone_keep_the_hold_while_the_stream_redials() -> None:
    """Found by the simulator (seed 5608): beats of ranks that had not said hello again counted for nothing."""
    g = Group().fleet()
    assert g.s.trainer is not None
    trainer = replace(g.s.trainer, ranks={}, channels=(), choices=())  # what is durable of it
    g.s, _ = group.restarted(replace(g.s, replicas={}, trainer=trainer), None, 2, g.now)
    g.sleep(4 * g.s.config.ttl_s)  # with beats
    (call,) = g.init(trainer="other")
    assert g.failure(call) is Reason.TRAINER_HELD
    g.sleep(2 * g.s.config.ttl_s, beats=False)
    (call,) = g.init(trainer="other")
    assert g.failure(call) is None


def test_rule_8_a_pause_outlives_a_restart_of_the_coordinator_and_a_resume_before_the_first_report_counts() -> None:
    g = Group().fleet().publish()
    for resumed in (False, True):
        g.s, _ = group.restarted(replace(g.s, replicas={}), None, g.s.epoch + 1, g.now)
        g.hello("r0", session=1)
        if resumed:
            g.call(events.SetPause, replica_ids=("r0",), holder="operator", on=False)
        g.sequence["r0"] = g.sequence.get("r0", 0) + 1
        g.do(events.Report("r0", "r0#1", g.sequence["r0"], (Held(1, "u1"),) * 2, 1, pause_holders=("operator",)))
        assert any(isinstance(e, events.Push) for e in g.last), "it must learn our epoch, or never reports under it"
        assert ("operator" in dict(g.desired("r0").pauses)) is not resumed


@pytest.mark.parametrize("when", ["while it is silent", "while it is lost", "never"])
def test_rule_8_a_resume_counts_for_a_life_that_finds_the_pause_with_its_engine(when: str) -> None:
    """vLLM stands still for the operator through the death of its agent; the next one tells of that pause at first."""
    g = Group().fleet().publish()
    g.call(events.SetPause, replica_ids=("r0",), holder="operator", on=True)
    g.report("r0", pause_holders=("operator",))
    if when == "while it is lost":
        g.sleep(60, beats=False)
        assert g.s.replicas["r0"].liveness is Liveness.LOST
    if when != "never":
        g.call(events.SetPause, replica_ids=("r0",), holder="operator", on=False)
    g.hello("r0", "r0#2")
    g.report("r0", pause_holders=("operator",))
    assert ("operator" in dict(g.desired("r0").pauses)) is (when == "never")


# --- rule 9 ---------------------------------------------------------------------------------------------------------


def test_rule_9_aborted_waits_for_every_member_to_drain_and_names_who_did_not() -> None:
    g = Group().fleet().to(Phase.TRANSFERRING)
    abort = g.call(events.AbortUpdate, message="no more")
    g.say(Stage.ABORTED, "r0")
    assert abort not in g.replies and g.s.open is not None and g.s.open.phase is Phase.ABORTING
    g.sleep(g.s.config.quiesce_s + 0.5)
    u = g.s.history["u1"]
    assert g.failure(abort) is None and u.phase is Phase.ABORTED
    assert u.parts["r0"].quiesced and u.parts["r1"].unquiesced
    assert g.s.trainer is not None and g.s.trainer.channels == (), "what it could still touch is never used again"


def test_rule_9_an_excluded_participant_can_never_vote_and_is_never_told_to_commit() -> None:
    g = Group(replicas=3).fleet().to(Phase.VERIFYING, at_least=2)
    g.vote("r0", "r1")
    g.say(Stage.FAILED, "r2", failure=Failure(Reason.ENGINE, "no"))
    assert g.s.open is not None and g.s.open.phase is Phase.COMMITTED
    g.say(Stage.PREPARED, "r2")
    assert not g.s.open.parts["r2"].voted and g.desired("r2").update.decision == "ABORT"  # type: ignore[union-attr]
    g.applied("r0", "r1")
    assert g.s.open is None
    g.report("r2", update_id="u1", stage=Stage.PREPARED)
    assert dict(g.desired("r2").resolutions) == {"u1": "ABORT"}


def test_rule_9_a_report_from_before_the_abort_does_not_count_as_drained() -> None:
    g = Group().fleet()
    g.start()
    g.call(events.AbortUpdate, message="no more")
    g.report("r0")
    assert g.s.open is not None and not g.s.open.parts["r0"].quiesced


# --- rule 10 --------------------------------------------------------------------------------------------------------


def test_rule_10_a_living_holder_keeps_the_group_unless_taken_over() -> None:
    g = Group().fleet()
    assert g.failure(g.init("other")[0]) is Reason.TRAINER_HELD
    assert g.failure(g.init("other", takeover=True)[0]) is None
    assert g.s.trainer is not None and g.s.trainer.generation == 2
    assert (
        g.failure(
            g.call(events.StartUpdate, generation=1, request_id="q", manifest_id="m", trainer_step=1, update_id="u9")
        )
        is Reason.TRAINER_FENCED
    )


def test_rule_10_a_successor_gets_it_when_the_ttl_is_over() -> None:
    g = Group().fleet()
    g.sleep(2 * g.s.config.ttl_s + 1, beats=False)
    assert g.failure(g.init("other")[0]) is None


def test_rule_10_a_generation_is_answered_only_once_it_is_durable_and_an_unknown_write_is_repeated() -> None:
    g = Group()
    init = g.call(
        events.InitTransfer,
        request_id="i",
        trainer_id="job",
        incarnation="1",
        world_size=1,
        generation=0,
        lineage="l",
        seed=b"s" * 32,
        answer_writes=False,
    )
    g.do(events.Stored(g.written[-1].write_id, None))
    assert init not in g.replies
    g.do(events.Tick())
    assert g.failure(init) is None and g.s.trainer is not None and g.s.trainer.durable


def test_rule_10_the_confirmation_of_an_older_generation_makes_no_newer_one_durable() -> None:
    g = Group()
    usual = {"request_id": "i", "world_size": 1, "generation": 0, "lineage": "l", "seed": b"s" * 32}
    g.call(events.InitTransfer, trainer_id="a", incarnation="1", answer_writes=False, **usual)
    first = g.written[-1]
    second = g.call(events.InitTransfer, trainer_id="b", incarnation="1", takeover=True, answer_writes=False, **usual)
    g.do(events.Stored(first.write_id, True))
    assert second not in g.replies and g.s.trainer is not None and not g.s.trainer.durable


def test_rule_10_the_end_of_the_fenced_trainers_update_leaves_its_successors_channels_alone() -> None:
    g = Group().fleet().to(Phase.TRANSFERRING)
    g.init("other", takeover=True)
    assert g.s.trainer is not None and g.s.trainer.channels
    for rid in ("r0", "r1"):
        g.say(Stage.ABORTED, rid)
    assert g.s.open is None and g.s.trainer is not None and g.s.trainer.channels
    g.start("u2")
    assert g.s.open is not None


@pytest.mark.parametrize("how", ["takeover", "close"])
def test_rule_10_a_queued_start_of_a_fenced_trainer_never_begins(how: str) -> None:
    g = Group().fleet().to(Phase.PREPARING)
    queued = g.start("u2", on_busy="WAIT")
    for rid in ("r0", "r1"):
        g.hello(rid, f"{rid}#2")  # both are gone: the abort closes at once, and the queue moves
    if how == "takeover":
        g.init("other", takeover=True)
    else:
        g.call(events.CloseTransfer)
    assert g.failure(queued) is not None
    assert g.s.open is None or g.s.open.update_id != "u2"


def test_rule_10_resuming_below_the_committed_step_makes_nobody_routable_and_pauses_with_abort() -> None:
    g = Group().fleet().publish(trainer_step=10)
    assert routable(g, "r0")
    g.init("other", takeover=True, resume_step=4)
    assert not routable(g, "r0")
    g.start("u2", pause=PauseMode.KEEP)
    assert g.s.open is not None and g.s.open.options.pause is PauseMode.ABORT


def test_rule_10_any_ranks_loss_aborts() -> None:
    g = Group(ranks=2).fleet().to(Phase.TRANSFERRING)
    assert g.s.trainer is not None
    g.do(events.Beat("rank/1", "", 1, process=states.Process.DEAD))
    assert g.s.open is not None and g.s.open.phase is Phase.ABORTING
    assert g.s.open.failure is not None and g.s.open.failure.member == "rank/1"


def test_rule_10_a_watch_stream_that_ends_leaves_one_ttl_to_come_back() -> None:
    g = Group().fleet()
    g.do(events.RankHello("w", 1, 1, 0, watch=True))
    g.sleep(20, beats=False)
    for rid in ("r0", "r1"):
        g.do(events.Beat(rid, g.life(rid)))
        g.report(rid)
    g.do(events.RankGone(1, 0))
    g.start()
    g.do(events.Tick())
    assert g.s.open is not None and g.s.open.phase is Phase.PREPARING


# --- rule 11 --------------------------------------------------------------------------------------------------------


def test_rule_11_a_busy_group_refuses_waits_or_supersedes() -> None:
    g = Group().fleet().to(Phase.PREPARING)
    assert g.failure(g.start("u2")) is Reason.UPDATE_IN_PROGRESS
    g.start("u3", on_busy="WAIT")
    g.start("u4", on_busy="SUPERSEDE")
    assert g.s.open is not None and g.s.open.update_id == "u1" and g.s.open.phase is Phase.ABORTING
    g.say(Stage.ABORTED)
    assert g.s.open is not None and g.s.open.update_id == "u3"


def test_rule_11_a_repeated_start_gets_the_same_update_and_other_content_is_refused() -> None:
    g = Group().fleet()
    g.start("u1", fingerprint="a")
    again = g.start("u9", request_id="u1", fingerprint="a")
    g.join()
    assert g.replies[again].update_id == "u1" and g.s.last_version == 1
    assert g.failure(g.start("u9", request_id="u1", fingerprint="b")) is Reason.REQUEST_ID_REUSED


# --- leases and deadlines -------------------------------------------------------------------------------------------


def test_silence_between_updates_costs_nothing_and_ends_an_update_that_waits() -> None:
    g = Group().fleet()
    g.sleep(8, beats=False)
    assert g.s.replicas["r0"].liveness is Liveness.SUSPECT
    g.beats()
    assert g.s.replicas["r0"].liveness is Liveness.LIVE
    g.init(generation=1)
    g.to(Phase.TRANSFERRING)
    g.sleep(g.s.config.ttl_s + g.s.config.beat_s, beats=False)
    assert g.s.open is None and g.s.history["u1"].phase is Phase.ABORTED


def half_a_second_with_r0_stopped(g: Group) -> None:
    g.now += 0.5
    g.do(events.Beat("rank/0", "", 1))
    g.do(events.Beat("r1", g.life("r1")))
    g.do(events.Beat("r0", g.life("r0"), process=states.Process.STOPPED))
    g.do(events.Tick())


def test_a_stopped_process_is_found_although_its_helper_beats() -> None:
    g = Group().fleet().to(Phase.TRANSFERRING)
    for _ in range(9):
        half_a_second_with_r0_stopped(g)
    assert g.s.open is not None and g.s.open.phase is Phase.ABORTING
    assert g.s.replicas["r0"].liveness is Liveness.LOST


def test_a_replica_that_stays_stopped_is_routable_until_its_routing_budget_is_over_and_again_when_it_goes_on() -> None:
    g = Group().fleet().publish()
    assert members.routable(g.s, g.s.replicas["r0"])[2]
    ok = []
    for _ in range(40):
        half_a_second_with_r0_stopped(g)
        ok.append(members.routable(g.s, g.s.replicas["r0"]))
    assert [o[2] for o in ok] == sorted((o[2] for o in ok), reverse=True)
    assert abs(sum(o[2] for o in ok) * 0.5 - g.s.config.routing_budget_s) <= 1.0
    assert ok[-1] == (True, False, False, "its process is stopped")
    g.beats()
    assert members.routable(g.s, g.s.replicas["r0"])[2]


def test_every_update_ends_by_its_deadline_and_one_second() -> None:
    g = Group().fleet().to(Phase.TRANSFERRING, update_timeout_s=5.0, prepare_timeout_s=5.0)
    began = g.now
    while g.s.open is not None and g.now < began + 30:
        g.now += 0.1
        g.beats()
        g.do(events.Tick())
    assert g.now <= began + 6.0
