"""What is done beside the wire: finish is called while bytes move, and nothing is decided before they are there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.inference_agent.server import eventually
from tests.trainer_agent.fleet import Fleet, fill, fleet, hook, same
from weightplane.controlplane.core.states import Phase, Weights
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.transports.base import PeerLost
from weightplane.transports.shm import ShmSendChannel

SHAPE = (64, 96)


@pytest.fixture
def f() -> Iterator[Fleet]:
    with fleet() as f:
        yield f


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(SHAPE), requires_grad=False) for _ in range(8))


def finished(f: Fleet) -> Any:
    """The open update, once its trainer has called finish."""
    return eventually(lambda: (u := f.state().open) and u.finished_ranks and u, what="finish is called")


def test_finish_is_called_while_bytes_move_and_waits_for_the_last_of_them(f: Fleet) -> None:
    """Without digests nothing is left to be said once everybody is armed."""
    f.replica("r0", TorchModuleEngine(Model()))
    module = Model()
    publisher = f.publisher(module, verify="off", bucket_bytes=8192)
    fill(module, 1)
    go = threading.Event()

    def late(n: int) -> None:
        if n == 3:
            assert go.wait(20)

    with hook("replica.receive.before", late):
        handle = publisher.publish_async(1)
        assert finished(f).phase is Phase.TRANSFERRING and not handle.done()
        go.set()
        assert handle.result(20).committed
    assert same(f.engines["r0"], module)


def test_a_receiver_that_fails_after_finish_was_called_aborts_the_update_by_name(f: Fleet) -> None:
    f.replica("r0", TorchModuleEngine(Model()))
    module = Model()
    publisher = f.publisher(module, verify="off", bucket_bytes=8192)

    def breaks(n: int) -> None:
        if n == 3:
            finished(f)
            raise OSError("the disk is full")

    with hook("replica.receive.before", breaks), pytest.raises(UpdateFailed, match="the disk is full"):
        publisher.publish(1)
    fill(module, 2)
    assert publisher.publish(2).committed
    assert same(f.engines["r0"], module)


def test_a_sender_that_fails_after_the_decision_hears_that_it_committed(
    f: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receivers had every byte, voted, and the fleet decided, before it lost sight of one."""
    f.replica("r0", TorchModuleEngine(Model()))
    module = Model()
    publisher = f.publisher(module, verify="off")
    fill(module, 1)
    real = ShmSendChannel.flush

    def loses(channel: ShmSendChannel) -> None:
        real(channel)
        eventually(lambda: f.state().committed.version == 1, what="the decision")
        raise PeerLost("'r0/0' left", peers=("r0/0",))

    monkeypatch.setattr(ShmSendChannel, "flush", loses)
    receipt = publisher.publish(1)
    assert receipt.committed and receipt.version == 1 and receipt.ready == ("r0",)
    monkeypatch.undo()
    assert publisher.publish(2).committed
    assert same(f.engines["r0"], module)


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_a_tensor_turned_round_between_updates_is_refused_before_the_first_byte(f: Fleet, mode: str) -> None:
    """The same object at the same address: the quick look before the report does not see it, the thorough one does."""
    served = Model()
    engine = TorchModuleEngine(served)
    f.replica("r0", engine)
    module = Model()
    publisher = f.publisher(module, mode=mode)
    assert publisher.publish(1).committed
    held = {n: t.clone() for n, t in served.state_dict().items()}
    with torch.no_grad():
        served.layers[2].t_()
    fill(module, 2)
    with pytest.raises(UpdateFailed, match="another name, shape, stride or dtype"):
        publisher.publish(2)
    served.layers[2].data = served.layers[2].data.t()
    assert f.state().replicas["r0"].weights is Weights.READY, "nothing was written"
    assert all(torch.equal(t, held[n]) for n, t in served.state_dict().items())
    assert publisher.publish(3).committed
    assert same(engine, module)


def test_a_tensor_replaced_while_bytes_move_fails_the_update_by_name(f: Fleet) -> None:
    served = Model()
    f.replica("r0", TorchModuleEngine(served))
    module = Model()
    publisher = f.publisher(module, mode="staged", bucket_bytes=8192)

    def replaces(n: int) -> None:
        if n == 3:
            served.layers[1] = nn.Parameter(torch.zeros(SHAPE))

    with hook("replica.receive.before", replaces), pytest.raises(UpdateFailed, match="replaced or moved"):
        publisher.publish(1)
    fill(module, 2)
    assert publisher.publish(2).committed
    assert same(f.engines["r0"], module)
