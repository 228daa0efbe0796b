"""Who an aborted update failed by, and who failed only because it was aborted."""

from __future__ import annotations

from weightplane.controlplane.core.reasons import Reason
from weightplane.trainer_agent.context import failures_of, guilty
from weightplane.v1 import common_pb2, update_pb2


def update(cause: common_pb2.Failure, **failures: common_pb2.Failure) -> update_pb2.UpdateInfo:
    info = update_pb2.UpdateInfo(failure=cause)
    for name in ("r0", "r1", "r2"):
        info.participants.add(replica_id=name)
        outcome = info.outcomes.add(replica_id=name)
        if name in failures:
            outcome.failure.CopyFrom(failures[name])
    return info


def failure(reason: str, member: str = "", message: str = "") -> common_pb2.Failure:
    return common_pb2.Failure(reason=common_pb2.Reason.Value(f"REASON_{reason}"), member=member, message=message)


def test_a_replica_that_only_heard_of_the_abort_is_innocent() -> None:
    cause = failure("ABORTED_BY_CALLER", message="rank/0 cannot send: PeerLost: 'r1/0' died (peers 'r1/0')")
    info = update(cause, r0=failure("ABORTED_BY_CALLER", "r0"), r2=failure("TRANSPORT", "r2", "'rank/0' aborted"))
    assert guilty(info) == {"r1"}
    assert failures_of(info)["r1"].reason is Reason.TRANSPORT and set(failures_of(info)) == {"r0", "r1", "r2"}


def test_the_member_that_the_coordinator_names_is_guilty_unless_it_is_a_rank_or_a_new_life() -> None:
    assert guilty(update(failure("TRANSPORT", "r2"))) == {"r2"}
    assert guilty(update(failure("TRANSPORT", "r2/0"))) == {"r2"}
    assert guilty(update(failure("MEMBER_RESTARTED", "r2"))) == set()
    assert guilty(update(failure("PEER_RANK_FAILED", "rank/3"))) == set()


def test_own_failures_and_the_unquiesced_are_guilty() -> None:
    info = update(failure("ENGINE", "r0"), r0=failure("ENGINE", "r0"), r1=failure("DIGEST_MISMATCH", "r1"))
    info.outcomes[2].unquiesced = True
    assert guilty(info) == {"r0", "r1", "r2"}
