"""Selectors, exclusions, pins and ``min_replicas`` with real engines: who is left out keeps its bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.trainer_agent.fleet import Fleet, eventually, fill, fleet, same
from weightplane.controlplane.core.reasons import Reason
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.errors import UpdateRefused
from weightplane.v1 import fleet_pb2

ZONES = {"r0": "a", "r1": "b", "r2": "b"}


def model() -> nn.Module:
    return nn.Linear(16, 16)


def held(f: Fleet) -> dict[str, torch.Tensor]:
    """What r0 holds."""
    module = f.engines["r0"].modules[0]
    assert isinstance(module, nn.Module)
    return {n: p.detach().clone() for n, p in module.named_parameters()}


@pytest.fixture
def f() -> Iterator[Fleet]:
    with fleet() as made:
        for name, zone in ZONES.items():
            made.replica(name, TorchModuleEngine(model()), labels={"zone": zone})
        yield made


def test_only_who_is_selected_takes_the_update_and_the_next_takes_all(f: Fleet) -> None:
    source = model()
    publisher = f.publisher(source)
    assert set(publisher.publish(1).ready) == set(ZONES)
    before = held(f)
    fill(source, 2)
    receipt = publisher.publish(2, replica_selector={"zone": "b"})
    assert sorted(receipt.ready) == ["r1", "r2"] and "selector" in receipt.absent["r0"]
    assert all(torch.equal(p, before[n]) for n, p in held(f).items())
    assert same(f.engines["r1"], source) and same(f.engines["r2"], source)
    fill(source, 3)
    receipt = publisher.publish(3, replica_selector={"zone": "b"}, exclude=("r2",))
    assert receipt.ready == ("r1",) and sorted(receipt.absent) == ["r0", "r2"]
    assert set(publisher.publish(4).ready) == set(ZONES)
    assert all(same(f.engines[name], source) for name in ZONES)


def test_too_few_that_match_are_refused_by_name_and_nothing_changes(f: Fleet) -> None:
    source = model()
    publisher = f.publisher(source)
    publisher.publish(1)
    policy = fleet_pb2.GroupPolicy(min_replicas=3)
    request = fleet_pb2.UpdateGroupRequest(request_id="policy", group="g", policy=policy)
    publisher._hold.client.call("UpdateGroup", request, time.monotonic() + 5)
    with pytest.raises(UpdateRefused) as caught:
        publisher.publish(2, replica_selector={"zone": "b"})
    assert caught.value.reason is Reason.NOT_ENOUGH_REPLICAS and "r0" in str(caught.value), caught.value
    assert f.state().committed.version == 1
    assert set(publisher.publish(3).ready) == set(ZONES)


def test_a_pinned_replica_keeps_its_bytes_and_the_publish_is_whole_without_it(f: Fleet) -> None:
    source = model()
    publisher = f.publisher(source, failure="raise")
    publisher.publish(1)
    before = held(f)
    names = {"group": "g", "replica_id": "r0"}
    call = publisher._hold.client.call
    call("PinReplica", fleet_pb2.PinReplicaRequest(request_id="p", **names), time.monotonic() + 5)
    for step in (2, 3):
        fill(source, step)
        receipt = publisher.publish(step)
        assert receipt.committed and sorted(receipt.ready) == ["r1", "r2"] and receipt.absent["r0"] == "it is PINNED"
    assert all(torch.equal(p, before[n]) for n, p in held(f).items())
    call("UnpinReplica", fleet_pb2.UnpinReplicaRequest(request_id="u", **names), time.monotonic() + 5)
    eventually(lambda: f.state().replicas["r0"].admin == "ACTIVE", what="it is unpinned")
    assert set(publisher.publish(4).ready) == set(ZONES) and same(f.engines["r0"], source)
