"""Replicas that come late, or come back, are brought to the committed version without the trainer publishing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer_agent import fleet as fleets
from tests.trainer_agent.fleet import Fleet, fill, fleet, same
from weightplane.controlplane.core.evolve import replace
from weightplane.controlplane.core.states import Admin, Mode, Weights
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.transports import retained
from weightplane.transports.retained import MEMORY, Retainer


def eventually(look: Callable[[], Any], what: str = "") -> None:
    """Waits long: a machine that others use is slow, not wrong."""
    fleets.eventually(look, 40.0, what)


def model(seed: int, width: int = 64) -> nn.Module:
    made = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))
    fill(made, seed)
    return made


def committed(f: Fleet) -> Any:
    return f.state().committed


def ready(f: Fleet, name: str) -> bool:
    r = f.state().replicas[name]
    return r.weights is Weights.READY and r.held == committed(f)


def admin(f: Fleet, replica_id: str, wanted: Admin) -> None:
    """Put a replica in an administrative state, as an operator or three failures in a row would."""

    async def put() -> None:
        group = f.plane.running.coordinator.ensure("g")
        r = replace(group.state.replicas[replica_id], admin=wanted)
        group.state = replace(group.state, replicas={**group.state.replicas, replica_id: r})

    f.plane.run(put())


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
@pytest.mark.parametrize("holder", ["peer", "trainer"])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_joiner_is_ready_at_the_committed_version_without_a_publish(
    holder: str, mode: Mode, transport: str, where: str, tmp_path: Path
) -> None:
    kept = MEMORY if where == "memory" else str(tmp_path)
    trained = model(1)
    with fleet() as f:
        retain = Retainer(kept) if holder == "peer" else None
        f.replica("a", TorchModuleEngine(model(2)), retain=retain, transports=["shm", "grpc"])
        options = {"heartbeat": "helper", "retain": kept} if holder == "trainer" else {}
        publisher = f.publisher(trained, transport=transport, **options)
        publisher.publish(1)
        sent = {k: v.clone() for k, v in trained.state_dict().items()}
        fill(trained, 9)  # the trainer goes on: what is sent later is what was committed
        engine = TorchModuleEngine(model(3), staged=mode is Mode.STAGED)
        f.replica("b", engine, transports=[transport])
        eventually(lambda: ready(f, "b"), what="b is caught up")
        assert f.agents["b"].status().held == f.agents["a"].status().held
        live = engine.modules[0].state_dict()
        assert all(torch.equal(live[k], v) for k, v in sent.items())
        assert not list(tmp_path.iterdir())  # a file has no name
        fill(trained, 4)
        publisher.publish(2)
        assert same(engine, trained) and ready(f, "b")


def test_nothing_is_ready_before_it_is_verified_and_a_lie_never_is() -> None:
    trained = model(1)
    with fleet() as f:
        retainer = Retainer()
        f.replica("a", TorchModuleEngine(model(2)), retain=retainer)
        f.publisher(trained).publish(1)
        eventually(lambda: f.state().replicas["a"].retained is not None, what="a retains it")
        copy = retainer.get()
        assert copy is not None
        [(weight, _)] = copy.locals("a/0")[0]
        weight[0, 0] += 1  # what a retains is no longer what was committed
        engine = TorchModuleEngine(model(3))
        before = {k: v.clone() for k, v in engine.modules[0].state_dict().items()}
        f.replica("b", engine)
        eventually(lambda: f.state().replicas["b"].catch_ups_failed > 0, what="b is not caught up")
        told = f.state().replicas["b"].catch_up_refusal
        assert "DIGEST_MISMATCH" in told and "'0.weight'" in told
        assert f.state().replicas["b"].weights is Weights.JOINING
        assert all(torch.equal(v, before[k]) for k, v in engine.modules[0].state_dict().items())
        weight[0, 0] -= 1
        eventually(lambda: ready(f, "b"), what="b is caught up at the next try")
        assert same(engine, trained) and not f.state().replicas["b"].catch_up_refusal


def test_without_a_copy_a_joiner_waits_for_the_next_update() -> None:
    trained = model(1)
    with fleet() as f:
        f.replica("a", TorchModuleEngine(model(2)))
        publisher = f.publisher(trained)
        publisher.publish(1)
        f.replica("b", TorchModuleEngine(model(3)))
        at = f.state().ticked_at
        eventually(lambda: f.state().ticked_at > at + 1, what="time passed")
        assert f.state().replicas["b"].weights is Weights.JOINING and not f.state().catch_ups
        publisher.publish(2)
        assert ready(f, "b")


def test_a_copy_that_is_too_large_is_not_kept_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    with fleet() as f:
        f.replica("a", TorchModuleEngine(model(2)), retain=Retainer(MEMORY, 100))
        f.publisher(model(1)).publish(1)
        eventually(lambda: "retain_bytes allows 100" in caplog.text, what="it is said")
        assert f.state().replicas["a"].retained is None


def test_an_unpinned_replica_catches_up() -> None:
    trained = model(1)
    with fleet() as f:
        f.replica("a", TorchModuleEngine(model(2)), retain=Retainer())
        f.replica("b", TorchModuleEngine(model(3)))
        publisher = f.publisher(trained)
        publisher.publish(1)
        admin(f, "b", Admin.PINNED)
        publisher.publish(2)
        assert f.state().replicas["b"].held.version == 1
        admin(f, "b", Admin.ACTIVE)
        eventually(lambda: ready(f, "b"), what="b is caught up")
        assert f.state().replicas["b"].held.version == 2


def test_a_quarantined_replica_that_is_caught_up_works_again() -> None:
    trained = model(1)
    with fleet() as f:
        f.replica("a", TorchModuleEngine(model(2)), retain=Retainer())
        f.publisher(trained).publish(1)
        f.replica("b", TorchModuleEngine(model(3)), transports=["grpc"])
        eventually(lambda: ready(f, "b"), what="b is caught up")
        admin(f, "b", Admin.QUARANTINED)
        eventually(lambda: ready(f, "b") and f.state().replicas["b"].admin is Admin.ACTIVE, what="b works again")


@pytest.mark.parametrize("who", ["peer", "trainer"])
def test_a_copy_that_cannot_be_taken_costs_the_publish_nothing(
    who: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the weights are on their way to the disk")

    monkeypatch.setattr(Retainer, "take", fails)
    with fleet() as f:
        f.replica("a", TorchModuleEngine(model(2)), retain=Retainer() if who == "peer" else None)
        options = {"heartbeat": "helper", "retain": MEMORY} if who == "trainer" else {}
        assert f.publisher(model(1), **options).publish(1).committed
        text = "version 1 is not retained: the weights are on their way to the disk"
        eventually(lambda: text in caplog.text, what="it is said")
        assert ready(f, "a") and f.state().replicas["a"].retained is None


def test_a_replica_needs_the_room_of_one_copy_however_many_versions_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = retained._file

    def disk(folder: str, size: int) -> torch.Tensor:
        if made:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(size)
        return make(folder, size)

    monkeypatch.setattr(retained, "_file", disk)
    trained = model(1)
    with fleet() as f:
        f.replica("a", TorchModuleEngine(model(2)), retain=Retainer(str(tmp_path)))
        publisher = f.publisher(trained)
        for step in (1, 2, 3):
            fill(trained, step + 3)
            publisher.publish(step)
        engine = TorchModuleEngine(model(3))
        f.replica("b", engine)
        eventually(lambda: ready(f, "b"), what="b is caught up from the third version's copy")
        assert same(engine, trained)
