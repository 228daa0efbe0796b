"""A heartbeat helper that is slow to start, as a process is on a busy machine."""

from __future__ import annotations

import pytest
from torch import nn

from tests.trainer_agent.fleet import eventually, fleet
from weightplane.controlplane.heartbeat import HeartbeatHelper
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine


def test_until_its_helper_beats_the_trainer_renews_its_lease_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet() as f:
        f.replica("a", TorchModuleEngine(nn.Linear(3, 3)))
        monkeypatch.setattr(HeartbeatHelper, "start", lambda self: None)  # a process that never gets so far
        publisher = f.publisher(nn.Linear(3, 3), heartbeat="helper")
        first = publisher.publish(1)

        def renewed() -> bool:
            (rank,) = f.state().trainer.ranks.values()
            return bool(rank.lease_until > came + 3 * f.state().config.ttl_s)

        (rank,) = f.state().trainer.ranks.values()
        came = rank.lease_until
        eventually(renewed, 30, "three leases on it is there still")
        assert publisher.publish(2).version == first.version + 1
