"""Cases of kind memory that are not critical, by id: whose it is, how much of it, and that it comes back."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases.base import MOVERS, Small, bits, differing, holds, site
from tests.cases.card_models import Even
from tests.cases.cards import cards, kept_by
from tests.cases.cards_memory import flats
from tests.cases.cases_distribution import Rows, own_rows, publish_all, ranks_of, sharded
from tests.cases.cases_memory import Layers
from tests.cases.test_cards import twins
from tests.cases.wires import WIRES, Wire, param
from tests.inference_agent.server import eventually
from tests.trainer_agent.fleet import fill
from weightplane.inference_agent import sink
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent import sending, sources
from weightplane.trainer_agent.sources import ModuleSource, StateDictSource
from weightplane.transports import buckets

__all__ = ["twins"]

EVERYWHERE = [param(WIRES[f"{t}-host"]) for t in ("shm", "grpc", "ucx", "cuda_ipc", "nccl")]
PULLED = [param(WIRES[f"{t}-host"]) for t in ("ucx", "cuda_ipc")]
SIZE = Even.SIZE


class Made:
    """Memory that the product has made for updates beside the model's, and is still there: scratch, casts."""

    def __init__(self, m: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._known: dict[int, tuple[Any, int]] = {}
        take, cast = buckets._Scratch.take, sources.cast_to

        def taken(scratch: Any, *args: Any) -> torch.Tensor:
            out = take(scratch, *args)
            for buffer in scratch._buffers.values():
                self._note(buffer)
            return out

        def casting(*args: Any) -> torch.Tensor:
            out = cast(*args)
            if out is not args[0]:
                self._note(out)
            return out

        m.setattr(buckets._Scratch, "take", taken)
        m.setattr(sources, "cast_to", casting)

    def _note(self, tensor: torch.Tensor) -> None:
        self._known[tensor.data_ptr()] = tensor.untyped_storage()._weak_ref(), tensor.nbytes
        self.most = max(self.most, self.now)

    @property
    def now(self) -> int:
        """Bytes that are there."""
        gone = torch.UntypedStorage._expired
        return sum(n for weak, n in list(self._known.values()) if not gone(weak))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


@pytest.mark.parametrize("wire", PULLED[1:])
def test_M09_ranks_whose_copy_is_never_read_export_nothing(wire: Wire) -> None:
    with cards(wire, "even") as c:
        state = flats(wire, 1.0)
        whole = StateDictSource(state).manifest()
        held = [StateDictSource(state), *(StateDictSource({}, manifest=whole) for _ in range(3))]
        ranks = ranks_of(c, held, transport=wire.transport, bucket_bytes=Even.BUCKET)
        for step in (1, 2, 3):
            for name in state:
                state[name].add_(1)
            publish_all(ranks, step)
            c.exact("the values of the one that holds them arrive", state)
            first, *others = (kept_by(r, wire.sender) for r in ranks)
            assert first["bytes"] > 0 and all(k == {"entries": 0, "bytes": 0} for k in others), others
        state.clear()
        ranks[0].release()
        assert kept_by(ranks[0], wire.sender) == {"entries": 0, "bytes": 0}
        for r in ranks:
            r.close()


@pytest.mark.parametrize("wire", EVERYWHERE)
def test_M10_what_was_made_for_an_update_is_free_when_it_is_over(wire: Wire, made: Made) -> None:
    """A consumer that keeps what it saw until it generates again; the trainer does nothing but publish."""
    with cards(wire, "even", clones=True) as c:
        wide = {n: torch.stack([t, t + 1], 1).double() for n, t in flats(wire, 1.0).items()}
        source = StateDictSource({n: t[:, 0] for n, t in wide.items()}, cast=torch.float32)
        publisher = c.publisher(source, bucket_bytes=SIZE)
        for step in (1, 2, 3):
            for t in wide.values():
                t.add_(1)
            c.commits("the update commits", publisher, step, verify="full" if step == 2 else "off")
            c.exact("the values are exact", {n: t[:, 0].float() for n, t in wide.items()})
            assert made.most > 0 and made.now == 0, f"{made.now} bytes of {made.most}"
            assert kept_by(publisher, wire.sender)["bytes"] == 0
            assert c.twin.do("kept")["mapped"] == 0


@pytest.mark.parametrize("wire", PULLED)
def test_M11_memory_that_was_exported_comes_back_when_nobody_holds_it_any_more(wire: Wire) -> None:
    """The consumer copied and dropped it; the producer drops it between updates, and calls nothing."""
    with cards(wire, "even") as c:
        publisher = c.publisher(StateDictSource({}), bucket_bytes=Even.BUCKET)
        before: list[Any] = []
        for step in (1, 2, 3):
            state = flats(wire, 7.0 * step)
            weak = [t.untyped_storage()._weak_ref() for t in state.values()]
            publisher.source = StateDictSource(dict(state))
            c.commits("the update commits", publisher, step)
            c.exact("the values are exact", state)
            state.clear()
            assert all(map(torch.UntypedStorage._expired, before)), "what the update before brought"
            before = weak
        publisher.source = StateDictSource({})
        publisher.release()
        assert all(map(torch.UntypedStorage._expired, before))
        assert kept_by(publisher, wire.sender) == {"entries": 0, "bytes": 0} and c.twin.do("kept")["mapped"] == 0


@pytest.mark.parametrize("wire", EVERYWHERE)
@pytest.mark.parametrize("kind", ["strided", "cast"])
def test_M19_packing_takes_memory_by_the_bucket_and_not_by_the_model(
    wire: Wire, kind: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a transport that reads the sender's memory, what was packed stays until it was read: it is flushed in time."""
    monkeypatch.setattr(sending, "_RETAINED", 2 * SIZE)
    with cards(wire, "even") as c:
        wide = {n: torch.stack([t, t + 1], 1) for n, t in flats(wire, 1.0).items()}
        state = {n: t[:, 0] for n, t in wide.items()}
        source = StateDictSource(state)
        if kind == "cast":
            source = StateDictSource({n: t.contiguous().double() for n, t in state.items()}, cast=torch.float32)
        publisher = c.publisher(source, bucket_bytes=SIZE)
        model = sum(t.numel() * 4 for t in state.values())
        for step in (1, 2):
            c.commits("the update commits", publisher, step)
            c.exact("the values are exact", state)
        tensor = SIZE * 4  # a cast makes a whole one
        assert 0 < made.most <= (8 * SIZE if kind == "strided" else 3 * tensor) < model, made.most


@pytest.mark.parametrize("wire", EVERYWHERE)
def test_M20_tensors_in_any_order_are_exact_and_take_no_memory(wire: Wire, made: Made) -> None:
    """Nothing of a layer is kept until the rest has come: every byte has its place from the start."""
    with cards(wire, "even") as c:
        state = flats(wire, 1.0)
        for step, seed in enumerate((1, 2, 3), 1):
            names = random.Random(seed).sample(sorted(state), len(state))
            for t in state.values():
                t.add_(seed)
            with c.publisher(
                StateDictSource({n: state[n] for n in names}), bucket_bytes=SIZE, incarnation=f"job {step}"
            ) as publisher:
                c.commits("the update commits", publisher, step, mode="in_place")
            c.exact("the values are exact", state)
        assert made.most == 0
    with site("r0") as f:  # the receiver's side, with its staging: in this process
        module = Small(1)
        shuffled = dict(random.Random(4).sample(sorted(module.state_dict().items()), 9))
        publisher = f.publisher(StateDictSource(shuffled))
        publisher.publish(1)
        assert holds(f.engines["r0"], module) and made.most == 0


@pytest.mark.parametrize("transport", MOVERS)
def test_M21_an_engine_that_is_shut_down_keeps_nothing_of_any_update(transport: str) -> None:
    storages: dict[int, Any] = {}

    def note(tensors: Iterable[torch.Tensor]) -> None:
        for t in tensors:
            if t.data_ptr() not in storages or torch.UntypedStorage._expired(storages[t.data_ptr()]):
                storages[t.data_ptr()] = t.untyped_storage()._weak_ref()

    class Noting(TorchModuleEngine):
        def targets(self, worker: int) -> Any:
            out = super().targets(worker)
            note(t for t, _ in out.values())
            return out

    def mapped() -> int:
        return sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    with site() as f:
        engine = Noting(Small())
        f.replica("r0", engine)
        note(engine.modules[0].state_dict(keep_vars=True).values())
        source = Small(1)
        note(source.state_dict(keep_vars=True).values())
        with f.publisher(source, transport=transport) as publisher:
            for step in (1, 2, 3):
                fill(source, step)
                publisher.publish(step, mode="in_place" if step == 2 else "staged")
            publisher.source = ModuleSource(nn.Module())
            del source
        f.agents["r0"].stop()
        engine.close()
    f.engines.clear()
    f.agents.clear()
    f.stack.close()
    del engine, publisher, f
    assert len(storages) > 2 * 9, "live, staged, and the source's"

    def gone() -> bool:
        gc.collect()  # does nothing while another thread collects, which this waits for
        return all(torch.UntypedStorage._expired(s) for s in storages.values()) and mapped() <= before

    eventually(gone, what="nothing is left of any update")


@pytest.mark.parametrize("transport", MOVERS)
@pytest.mark.parametrize("size", [4096, 16384, 65536])
def test_M22_an_update_in_place_takes_a_bucket_beside_the_model(
    transport: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's tensors are turned, so that all that comes needs to be unpacked; there is no second copy."""
    most = [0]

    class Watched(buckets.SinkSpans):
        def spans(self, bucket: Any) -> list[torch.Tensor]:
            out = super().spans(bucket)
            most[0] = max(most[0], self._scratch.nbytes)
            return out

    monkeypatch.setattr(sink, "SinkSpans", Watched)
    with site("r0", make=lambda: Layers(turned=True), staged=False) as f:
        module = Layers()
        publisher = f.publisher(module, transport=transport, mode="in_place", bucket_bytes=size)
        for step in (1, 2):
            fill(module, step)
            assert publisher.publish(step).replicas[0].mode == "IN_PLACE"
            live = f.engines["r0"].modules[0]
            assert all(torch.equal(live.get_parameter(n), t) for n, t in module.named_parameters())
        assert 0 < most[0] <= size + 16 * 4


@pytest.mark.parametrize("transport", MOVERS)
def test_M24_each_receiver_stages_and_is_sent_its_own_part_alone(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, staged = Rows(32), [0] * 8
    targets = TorchModuleEngine.targets

    def noting(engine: TorchModuleEngine, worker: int) -> Any:
        out = targets(engine, worker)
        staged[worker] = sum(t.nbytes for t, _ in out.values())
        return out

    monkeypatch.setattr(TorchModuleEngine, "targets", noting)
    with site() as f:
        engine = sharded(rows, 8)
        f.replica("r0", engine)
        publisher = f.publisher(rows, transport=transport)
        rows.become(100)
        before = [bits(m) for m in engine.modules]
        receipt = publisher.publish(1, mode="staged")
        assert receipt.ready == ("r0",) and own_rows(engine, rows) == []
        assert all(differing(bits(m), b) for m, b in zip(engine.modules, before, strict=True))
        whole = sum(t.nbytes for t in rows.state_dict().values())
        assert sum(staged) <= whole + 8 * 4096 and max(staged) <= whole // 8 + 4096, staged
        assert receipt.bytes <= whole + 8 * 4096
