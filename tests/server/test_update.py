"""Whole updates against a real server on loopback."""

from __future__ import annotations

from tests.server.scripted import fleet, server
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import update_pb2 as up


async def test_three_replicas_commit_together() -> None:
    async with server() as running, fleet(running.address) as (trainer, replicas):
        info = await trainer.publish()
        assert info.phase == up.UPDATE_PHASE_COMMITTED and info.version == 1
        assert [o.replica_id for o in info.outcomes] == ["r0", "r1", "r2"]
        for outcome in info.outcomes:
            assert outcome.state == up.WEIGHTS_STATE_READY
            assert outcome.held == cm.HeldVersion(version=1, update_id=info.update_id)
            assert outcome.evidence == cm.EVIDENCE_LIVE
        assert all(r.held.version == 1 for r in replicas)
        again = await trainer.publish()
        assert again.version == 2 and again.timings.total_s > 0
