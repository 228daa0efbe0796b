"""An agent against the real control plane: updates over shm and grpc, staged and in place, failures, restarts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.inference_agent.models import Awkward, manifest_of
from tests.inference_agent.server import Server, eventually, server
from tests.inference_agent.trainer import Trainer, state_of
from weightplane.controlplane.core.model import Held, Mode, Verify
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.conformance import values_for
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.transports.dtypes import as_bytes


@pytest.fixture
def plane() -> Iterator[Server]:
    with server() as s:
        yield s


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def replica(stack: ExitStack, plane: Server, name: str, engine: TorchModuleEngine, **options: object) -> InferenceAgent:
    agent = InferenceAgent(plane.address, "g", name, engine, **options)  # type: ignore[arg-type]
    stack.callback(agent.stop)
    agent.start()
    eventually(lambda: name in plane.state().replicas and plane.state().replicas[name].reported, what=f"{name} is here")
    return agent


def holds(engine: TorchModuleEngine, values: dict) -> bool:
    manifest = manifest_of(engine.modules[0])
    names = dict(engine.modules[0].state_dict(keep_vars=True))
    return all(as_bytes(names[t.name]).equal(as_bytes(values[manifest.root(i)])) for i, t in enumerate(manifest))


@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("verify", [Verify.FULL, Verify.SAMPLED, Verify.OFF])
def test_two_replicas_commit_together(
    plane: Server, stack: ExitStack, transport: str, mode: Mode, verify: Verify
) -> None:
    engines = [TorchModuleEngine(Awkward()) for _ in range(2)]
    agents = [replica(stack, plane, f"r{i}", e) for i, e in enumerate(engines)]
    manifest = manifest_of(Awkward())
    trainer = stack.enter_context(Trainer(plane.address, manifest, transport, bucket_bytes=4096))
    trainer.init()
    for step in (1, 2, 3):
        values = values_for(manifest, step)
        done = trainer.publish(values, step, mode=mode, verify=verify)
        assert [state_of(o) for o in done.outcomes] == ["READY", "READY"], done
        for engine, agent in zip(engines, agents, strict=True):
            assert holds(engine, values)
            assert engine.held() == (Held(done.version, done.update_id),)
            assert not engine.holders() and agent.status().updates_since_start == step
            with engine.forward() as tag:
                assert (tag.version, tag.trainer_step, tag.incarnation) == (done.version, step, agent.incarnation)
    assert plane.state().committed == Held(done.version, done.update_id)
