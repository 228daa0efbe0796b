"""``external``: the user's own code moves the bytes; versions, digests and commit are ours, and a lie is found."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from weightplane.controlplane.core.plan import Bucket
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.server.thread import ControlPlaneThread
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource
from weightplane.transports.external import set_mover

Spans = Sequence[torch.Tensor]


class Wire:
    """Two movers over a queue, as a user's broadcast would be."""

    def __init__(self) -> None:
        self.queue: queue.Queue[list[torch.Tensor]] = queue.Queue()
        self.corrupt = False

    def send(self, bucket: Bucket, spans: Spans) -> None:
        self.queue.put([s.clone() for s in spans])

    def receive(self, bucket: Bucket, spans: Spans) -> None:
        for mine, theirs in zip(spans, self.queue.get(timeout=20), strict=True):
            mine.copy_(theirs)
        if self.corrupt:
            spans[0][0] ^= 1


@pytest.fixture
def site() -> Iterator[tuple[Any, Wire, torch.nn.Module, TorchModuleEngine]]:
    wire = Wire()
    trained, engine = torch.nn.Linear(64, 64), TorchModuleEngine(torch.nn.Linear(64, 64))
    with ControlPlaneThread() as plane:
        agent = InferenceAgent(plane.address, "g", "a", engine).start()
        set_mover("rank/0", wire.send)
        set_mover("a/0", wire.receive)
        with Publisher(plane.address, "g", ModuleSource(trained), transport="external", bucket_bytes=4096) as publisher:
            publisher.wait_for_replicas(1)
            yield publisher, wire, trained, engine
        agent.stop()
        set_mover("rank/0", None)
        set_mover("a/0", None)


def test_bytes_moved_by_the_user_commit_with_version_and_digests(site: Any) -> None:
    publisher, _, trained, engine = site
    receipt = publisher.publish(1)
    assert receipt.ready == ("a",)
    assert torch.equal(engine.modules[0].weight, trained.weight)


def test_a_user_mover_that_changes_one_bit_is_found_by_name(site: Any) -> None:
    publisher, wire, _, engine = site
    before = engine.modules[0].weight.clone()
    wire.corrupt = True
    with pytest.raises(UpdateFailed) as failed:
        publisher.publish(1)
    assert failed.value.failures["a"].reason is Reason.DIGEST_MISMATCH
    assert failed.value.failures["a"].tensors
    assert torch.equal(engine.modules[0].weight, before), "staged: nothing changed"
    wire.corrupt = False
    while not wire.queue.empty():
        wire.queue.get_nowait()
    publisher.publish(2)


def test_without_a_mover_the_update_fails_and_says_how_to_set_one(site: Any) -> None:
    publisher, _, _, _ = site
    set_mover("a/0", None)
    with pytest.raises(UpdateFailed, match="set_mover"):
        publisher.publish(1)
