"""The Publisher of one rank against a real control plane and real replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.inference_agent.models import Awkward
from tests.trainer_agent.fleet import Fleet, fill, fleet, same
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine


@pytest.fixture
def f() -> Iterator[Fleet]:
    with fleet() as f:
        yield f


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_two_replicas_get_every_step_bit_for_bit(f: Fleet, transport: str, mode: str) -> None:
    module = Awkward()
    for name in ("r0", "r1"):
        f.replica(name, TorchModuleEngine(Awkward()))
    publisher = f.publisher(module, transport=transport, mode=mode)
    assert publisher.wait_for_replicas(2) == ("r0", "r1")
    versions = []
    for step in range(1, 4):
        fill(module, step)
        receipt = publisher.publish(step)
        assert receipt.committed and receipt.step == step and set(receipt.ready) == {"r0", "r1"}
        assert {r.mode for r in receipt.replicas} == {mode.upper()}
        assert all(r.evidence for r in receipt.replicas), receipt.replicas
        assert all(same(e, module) for e in f.engines.values())
        versions.append(receipt.version)
    assert versions == sorted(set(versions))
    metrics = receipt.metrics()
    assert set(metrics) == {
        *("gather_s", "mirror_s", "mirror_bytes", "wire_s", "pause_s", "apply_s", "verify_s", "total_s"),
        *("bytes", "gbps", "lag_versions", "retries"),
    }
    assert metrics["bytes"] > 0 and metrics["total_s"] > 0 and metrics["lag_versions"] == 0


def test_a_helper_process_holds_the_lease(f: Fleet) -> None:
    f.replica("r0", TorchModuleEngine(nn.Linear(3, 2)))
    module = nn.Linear(3, 2)
    publisher = f.publisher(module, heartbeat="helper")
    publisher.publish(1)
    assert same(f.engines["r0"], module)
    rank = f.state().trainer.ranks[0]
    assert rank.session and not rank.watches
    publisher.close()
    assert f.state().trainer.closed


@pytest.mark.parametrize("hold", [True, False])
def test_a_source_that_moves_between_publishes_frees_its_memory_if_asked(f: Fleet, hold: bool) -> None:
    module = nn.Linear(64, 64, bias=False)
    f.replica("r0", TorchModuleEngine(nn.Linear(64, 64, bias=False)))
    publisher = f.publisher(module, hold_source=hold)
    gone = torch.UntypedStorage._expired
    for step in range(3):
        fill(module, step)
        publisher.publish(step)
        assert same(f.engines["r0"], module)
        weak = module.weight.untyped_storage()._weak_ref()
        module.weight.data = module.weight.data.clone()  # as ``module.to`` does
        if hold:
            assert not gone(weak), "kept, with what was worked out for it"
            publisher.release()
        assert gone(weak)
        torch.UntypedStorage._free_weak_ref(weak)
