"""Parity checks as callers may send them: each number that is none is refused, and nothing of it kept."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from tests.server.scripted import FAST, fleet, server
from weightplane.controlplane.server.app import ServerConfig
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import update_pb2 as up


def result(**fields: Any) -> up.ParityResult:
    figures = {"mean_abs": 0.5, "p99_abs": 0.6, "max_abs": 0.7, "kl": 0.1, "ess": 0.9, "clip_fraction": 0.1}
    said = {"replica_id": "r0", "version": 1, "verdict": up.PARITY_VERDICT_NOT_AT_PARITY, "tokens": 10}
    return up.ParityResult(**{**said, **figures, **fields})


REFUSED: list[dict[str, Any]] = [
    {"mean_abs": -1.0},
    {"kl": -math.inf},
    {"ess": 1.5},
    {"ess": math.inf},
    {"clip_fraction": 5.0},
    {"tokens": -1},
    {"version": 0},
    {"version": 99},
    {"verdict": 0},
    {"verdict": 9},
    {"reason": "x" * 1025},
    {"verdict": up.PARITY_VERDICT_AT_PARITY, "tokens": 0},
    {"verdict": up.PARITY_VERDICT_AT_PARITY, "mean_abs": math.nan},
]


async def test_a_check_that_cannot_be_is_refused_and_its_field_named() -> None:
    async with server(ServerConfig(MemoryStore(), core=FAST)) as running, fleet(running.address, 1) as (trainer, _):
        u = await trainer.start()
        await trainer.weights(u)
        await trainer.rest(u)
        for fields in REFUSED:
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await trainer.finish(u, parity=[result(**fields)])
            assert e.value.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
            assert (e.value.details() or "").startswith("parity"), e.value.details()
        assert not (await trainer.get(u.update_id)).parity
        kept = await trainer.finish(u, parity=[result(kl=math.inf, max_abs=math.nan, mean_abs=1e308)])
        assert math.isinf(kept.parity[0].kl) and math.isnan(kept.parity[0].max_abs)
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await trainer.finish(u, parity=[result(replica_id="nobody")])
        assert e.value.code() is grpc.StatusCode.NOT_FOUND
