"""The Publisher of one rank against a real control plane and real replicas."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from tests.inference_agent.models import Awkward
from tests.trainer_agent.fleet import Fleet, fill, fleet, same
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.dial import Dial
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.client import Client
from weightplane.trainer_agent.errors import UpdateFailed, UpdateRefused, error_from_rpc
from weightplane.v1 import fleet_pb2


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


@pytest.mark.parametrize("step", [None, "1", 1.0, True, torch.tensor([1, 2])])
def test_a_step_that_is_no_number_is_refused_by_name(f: Fleet, step: Any) -> None:
    f.replica("r0", TorchModuleEngine(nn.Linear(3, 2)))
    publisher = f.publisher(nn.Linear(3, 2))
    for publish in (publisher.publish, publisher.publish_async):
        with pytest.raises(TypeError, match="step: expected the trainer's step, an integer"):
            publish(step)
    with pytest.raises(ValueError, match="step: expected a number of 64 bits"):
        publisher.publish(1 << 63)
    assert f.state().committed.version == 0
    assert publisher.publish(torch.tensor(3)).step == 3  # type: ignore[arg-type]


def test_a_wait_that_has_no_time_left_still_says_why_each_replica_may_not_join(f: Fleet) -> None:
    """The last look at the fleet has time of its own: nothing is said of a control plane that did not answer."""
    f.replica("r0", TorchModuleEngine(nn.Linear(3, 2)))
    publisher = f.publisher(nn.Linear(3, 2))
    drain = fleet_pb2.DrainReplicaRequest(request_id="one", group="g", replica_id="r0")
    Client(Dial(f.address)).call("DrainReplica", drain, time.monotonic() + 10)
    with pytest.raises(TimeoutError, match=r"expected 1 replica.*r0: it is DRAINING"):
        publisher.wait_for_replicas(1, timeout=0.0)


def test_whether_an_update_was_opened_is_known_once_a_publish_is_over(f: Fleet) -> None:
    publisher = f.publisher(nn.Linear(3, 2))
    alone = publisher.publish_async(1)
    with pytest.raises(UpdateRefused):
        alone.result(30)
    assert not alone.opened
    f.replica("r0", TorchModuleEngine(nn.Linear(3, 2)))
    served = publisher.publish_async(2)
    served.result(30)
    assert served.opened


@pytest.mark.parametrize("cut", [160, 512])
def test_a_failure_that_was_cut_elsewhere_is_told_once_and_as_long_as_it_is_known(cut: int) -> None:
    """The control plane keeps less of a long text beside each replica than in its answer; or more, of a large fleet."""
    whole = Failure(Reason.MANIFEST_MISMATCH, "the engine does not have " + ", ".join(map(str, range(200))), "a")
    part = replace(whole, message=whole.message[: cut - 3] + "...")
    other = replace(part, message="it has " + part.message, member="b")
    for one, two in ((whole, part), (part, whole)):
        error = UpdateFailed(one, {"a": two, "b": other}, update_id="u", version=1)
        assert str(error) == f"update u (version 1) failed: {whole}; {other}", str(error)
        assert error.failures == {"a": whole, "b": other} and error.failure == whole


def test_every_failure_of_an_update_is_told_alike() -> None:
    first, other = Failure(Reason.ENGINE, "no memory", "a"), Failure(Reason.DEADLINE, "late", "b/0")
    error = UpdateFailed(first, {"a": first, "b": other, "c": Failure(Reason.TRANSPORT, "gone")}, update_id="u")
    assert str(error).endswith("failed: ENGINE [a]: no memory; DEADLINE [b/0]: late; TRANSPORT [c]: gone")


def test_a_call_that_fails_without_details_is_not_told_in_grpcs_own_insides() -> None:
    assert "Rendezvous" not in str(error_from_rpc("StartUpdate", grpc.RpcError()))
