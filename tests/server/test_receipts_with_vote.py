"""Receipts that come with the vote they are for: they count as those of PutReceipt do; a stale one hurts nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.scripted import Replica, fleet, reason_of, refused, server, until
from weightplane.controlplane.core.states import Weights
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt


async def test_a_receipt_counts_whichever_way_it_comes() -> None:
    async with server() as running, fleet(running.address, 2) as (trainer, replicas):
        replicas[1].with_vote = False
        done = await trainer.publish()
        assert [o.state for o in done.outcomes] == [up.WEIGHTS_STATE_READY] * 2
        assert [o.evidence for o in done.outcomes] == [cm.EVIDENCE_LIVE] * 2
        assert replicas[0].report.ByteSize() < 1024


async def test_a_wrong_digest_beside_the_vote_is_found_and_named() -> None:
    async with server() as running, fleet(running.address, 2) as (trainer, replicas):
        replicas[1].corrupt = {1}
        u = await trainer.start()
        await trainer.weights(u)
        error = await refused(trainer.rest(u), "DIGEST_MISMATCH")
        assert "r1" in str(error.details())


async def test_a_vote_without_a_receipt_is_refused_by_name() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, replicas):
        said = replicas[0].send_report

        async def forgets(**fields: Any) -> None:
            fields.pop("receipts", None)
            await said(**fields)

        replicas[0].send_report = forgets  # type: ignore[method-assign]
        u = await trainer.start()
        await trainer.weights(u)
        error = await refused(trainer.rest(u), "INCOMPLETE")
        assert "r0/0 voted without a complete receipt" in str(error.details())


async def _voting(replica: Replica, **fields: Any) -> None:
    """Say a vote of our own for the update that the replica takes."""
    update_id = replica.report.update_id
    receipt = {"update_id": update_id, "member": f"{replica.rid}/0", "evidence": cm.EVIDENCE_LIVE, "total": 3}
    report = ag.ReplicaReport(
        sequence=replica.report.sequence + 100,
        held=[replica.held],
        update_id=update_id,
        stage=fields.pop("stage", ag.REPLICA_STAGE_PREPARED),
        receipts=[up.Receipt(**{**receipt, **fields})],
    )
    replica.say(ag.SessionRequest(report=report))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"plan_id": "p-0"}, "receipt.plan_id"),
        ({"update_id": "u-0"}, "report.receipts"),
        ({"stage": ag.REPLICA_STAGE_ARMED}, "report.receipts"),
        ({"member": "r0/7"}, "member"),
        ({"bytes_received": -1}, "receipt.bytes_received"),
    ],
)
async def test_what_can_never_be_right_ends_the_stream_and_says_what(wrong: dict[str, Any], told: str) -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, replicas):
        u = await trainer.start()
        replica = replicas[0]
        await _voting(replica, **{"plan_id": u.channels[0].plan_id, **wrong})
        await until(lambda: replica.ended is not None, "its stream ends")
        assert replica.ended is not None
        assert reason_of(replica.ended) == "INVALID_ARGUMENT" and told in str(replica.ended.details())


async def test_one_of_an_update_that_has_ended_counts_for_nothing_and_ends_nothing() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, replicas):
        replica, never = replicas[0], asyncio.Event()
        replica.hooks["prepare"] = lambda _: never.wait()  # type: ignore[assignment, return-value]
        u = await trainer.start()
        await trainer.weights(u)
        group = running.coordinator.group("g")
        abort = wt.AbortUpdateRequest(request_id="a", group="g", generation=trainer.generation, update_id=u.update_id)
        await trainer.stub.AbortUpdate(abort, timeout=5)
        await until(lambda: group.find(u.update_id).closed, "the abort is over")  # type: ignore[union-attr]
        replica.report.update_id = u.update_id
        await _voting(replica, plan_id=u.channels[0].plan_id)
        replica._sequence = iter(range(1000, 2000))  # type: ignore[assignment]
        del replica.hooks["prepare"]
        await trainer.init()  # its channels went with the update
        done = await trainer.publish()
        assert done.outcomes[0].state == up.WEIGHTS_STATE_READY and replica.ended is None
        assert group.state.replicas["r0"].weights is Weights.READY
