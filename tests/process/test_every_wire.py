"""One update over ``cuda_ipc``, ``nccl``, ``ucx`` and ``shm`` at once, a process for each replica: it commits once.

On cards: trainer and the colocated replica on GPU 0, those by ``nccl`` and ``ucx`` on GPU 1, the one by ``shm`` on the
host, to which the trainer mirrors its memory. Elsewhere the first two have a card that the host plays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.cases.base import QUIET
from tests.cases.card_models import Even, values_of
from tests.cases.cards import TWINS, Twin
from tests.cases.wires import WIRES, Wire
from tests.trainer_agent.fleet import Fleet, eventually, fleet
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.trainer_agent.publisher import Publisher

pytestmark = pytest.mark.timeout(300)

HOST = ("cuda_ipc-host", "nccl-host", "ucx-host", "shm-host")
CARDS = ("cuda_ipc-same", "nccl-across", "ucx-across", "shm-down")


def places(ids: tuple[str, ...], name: str) -> Any:
    wires = [WIRES[i] for i in ids]
    marks: list[Any] = [pytest.mark.gpu] if any(not w.on_host for w in wires) else []
    if missing := [f"{w.id} {why}" for w in wires if (why := w.missing())]:
        marks.append(pytest.mark.skip(reason="; ".join(missing)))
    return pytest.param(wires, id=name, marks=marks)


everywhere = pytest.mark.parametrize("wires", [places(HOST, "host"), places(CARDS, "cards")])


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    TWINS.warm(4)
    yield
    TWINS.close()


@dataclass
class Spread:
    """A fleet whose replicas are named by their transports."""

    fleet: Fleet
    twins: dict[str, Twin]
    module: Even
    publisher: Publisher

    def join(self, wire: Wire, model: str) -> None:
        twin = TWINS.take()
        self.fleet.stack.callback(TWINS.give, twin)
        self.twins[wire.transport] = twin
        twin.do("use", wire=wire.id, plant="")
        twin.do("join", address=self.fleet.address, name=wire.transport, model=model, staged=True, heartbeat=True)
        eventually(lambda: self.fleet.state().replicas[wire.transport].reported, 20)

    def held(self) -> dict[str, tuple[int, str]]:
        return {name: tuple(twin.do("held", name=name)) for name, twin in self.twins.items()}

    def wrong(self) -> dict[str, list[str]]:
        """What each replica has that is not the trainer's."""
        wanted = values_of(self.module)
        found = {name: twin.do("values", name=name) for name, twin in self.twins.items()}
        return {name: [n for n in wanted if said.get(n) != wanted[n]] for name, said in found.items()}

    @property
    def model(self) -> str:
        return "even" if self.module.layers[0].numel() == Even.SIZE else "large"


@pytest.fixture
def spread(wires: list[Wire]) -> Iterator[Spread]:
    with ExitStack() as stack:
        for w in wires:
            stack.enter_context(w.here())
        on_cards = wires[0].sender != "cpu"
        if on_cards:
            torch.cuda.set_device(wires[0].sender)
        module = Even(4 << 20 if on_cards else Even.SIZE).to(wires[0].sender)
        f = stack.enter_context(fleet(QUIET))
        bucket = 8 * module.layers[0].numel()
        publisher = f.publisher(module, transport="", bucket_bytes=bucket, update_timeout=30.0, heartbeat="helper")
        made = Spread(f, {}, module, publisher)
        for w in wires:
            made.join(w, made.model)
        yield made
        made.publisher.close()


@everywhere
@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_one_update_over_all_of_them_commits_once(spread: Spread, wires: list[Wire], mode: str, verify: str) -> None:
    names = {w.transport for w in wires}
    for step in (1, 2, 3):
        spread.module.become(step)
        receipt = spread.publisher.publish(step, mode=mode, verify=verify)
        assert receipt.version == step and receipt.committed and set(receipt.ready) == names
        assert {r.replica_id: r.mode for r in receipt.replicas} == dict.fromkeys(names, mode.upper())
        assert set(spread.held().values()) == {(step, receipt.update_id)}
        assert not any(spread.wrong().values())
    bound = {m: c.transport for c in spread.fleet.state().trainer.channels for m in c.receivers}
    assert bound == {f"{t}/0": t for t in names}
    nbytes = sum(p.nbytes for p in spread.module.parameters())
    mirrored = nbytes if wires[0].sender != "cpu" else 0
    assert receipt.mirror_bytes == mirrored and (receipt.mirror_s > 0) == bool(mirrored), "for shm alone, and counted"
    print({k: round(v, 4) for k, v in receipt.metrics().items()})


@everywhere
@pytest.mark.parametrize("victim", ["cuda_ipc", "nccl", "ucx", "shm"])
def test_one_that_dies_in_a_bucket_keeps_all_at_the_old_version(spread: Spread, wires: list[Wire], victim: str) -> None:
    spread.module.become(1)
    before = spread.publisher.publish(1, mode="staged")
    spread.module.become(2)
    twin = spread.twins.pop(victim)
    twin.do("hold", point="replica.receive.inside", nth=2)
    handle = spread.publisher.publish_async(2, mode="staged")
    assert twin.do("inside", seconds=20)
    twin.kill()
    began = time.monotonic()
    with pytest.raises(UpdateFailed, match=victim):
        handle.result(30)
    assert time.monotonic() - began < 4
    assert set(spread.held().values()) == {(1, before.update_id)}
    spread.module.become(1)
    assert not any(spread.wrong().values()), "survivors serve what they had"
    spread.join(next(w for w in wires if w.transport == victim), spread.model)
    spread.module.become(3)
    spread.publisher.init()
    after = spread.publisher.publish(3)
    assert set(after.ready) == {w.transport for w in wires} and not any(spread.wrong().values())
    assert set(spread.held().values()) == {(after.version, after.update_id)}
