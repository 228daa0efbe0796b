"""A replica on a card: bounced into, hashed where it lies, applied in few calls. Run on H200s, 2026-11-29."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.inference_agent.models import Awkward, manifest_of
from tests.inference_agent.test_receipts import Worker
from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.states import Verify
from weightplane.inference_agent.engines import arena
from weightplane.inference_agent.engines.base import Engine, EngineError
from weightplane.inference_agent.engines.conformance import EngineConformance
from weightplane.inference_agent.engines.live import Copies
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.receipts import Ledger, RegionMemory, Sink
from weightplane.transports.digest import digest_tensor
from weightplane.transports.dtypes import as_bytes

pytestmark = pytest.mark.gpu


class TestTorchModuleOnACard(EngineConformance):
    def build(self) -> Engine:
        return TorchModuleEngine(Awkward().cuda())

    def manifest_of(self, engine: Engine) -> Manifest:
        assert isinstance(engine, TorchModuleEngine)
        return manifest_of(engine.modules[0])


def on_card() -> Worker:
    w = Worker({i: torch.zeros(8, 8, device="cuda") for i in range(12)})
    w.values = [v.cuda() for v in w.values]
    return w


@pytest.mark.parametrize("kinds", [{"cpu"}, {"cpu", "cuda"}], ids=["bounced", "direct"])
@pytest.mark.parametrize("verify", [Verify.FULL, Verify.SAMPLED])
def test_bytes_land_and_are_hashed_on_the_card(kinds: set[str], verify: Verify) -> None:
    w = on_card()
    w.values = [v.cpu() for v in w.values] if "cuda" not in kinds else w.values
    sink = Sink(w.share, w.targets, frozenset(kinds))
    for _ in range(2):
        took = Ledger(w.share, "u1", verify, True, sink)
        for b in w.share.buckets:
            spans = w.take(sink, took, b)
            assert {s.device.type for s in spans} == ({"cuda"} if "cuda" in kinds else {"cpu"})
        want = {i: d for i, d in w.digests.items() if i in w.share.hashed("u1", verify)}
        assert took.digests == want
        for i, (t, _) in w.targets.items():
            assert torch.equal(t.cpu(), w.values[i % 12].cpu())
        for v in w.values:
            v.add_(1)


@pytest.mark.parametrize("untouched", [False, True])
def test_live_memory_is_read_back_on_the_card(untouched: bool) -> None:
    w = on_card()
    sink, live = Sink(w.share, w.targets), RegionMemory(w.share, w.targets)
    took = Ledger(w.share, "u1", Verify.FULL, False, sink, untouched=untouched)
    for b in w.share.buckets:
        w.take(sink, took, b)
    took.read_back(live)
    assert took.digests == w.digests
    as_bytes(w.targets[4][0])[0] ^= 1
    again = Ledger(w.share, "u1", Verify.FULL, False, sink)
    again._digests.update(w.digests)
    with pytest.raises(EngineError, match="'t4'"):
        again.read_back(live)


def test_copies_of_many_tensors_are_few_calls() -> None:
    made = [torch.randn(33, 7, device="cuda").to(d) for d in (torch.bfloat16, torch.float32, torch.bool) * 20]
    targets = [torch.zeros_like(t) for t in made]
    copies = Copies(list(zip(targets, made, strict=True)))
    assert len(list(copies.steps())) == 3
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(targets, made, strict=True))


def test_staging_is_refused_when_the_card_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    free = arena.device_bytes(torch.device("cuda", 0))
    assert 0 < free <= torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(arena, "_LEFT_ALONE", 1 << 50)
    engine = TorchModuleEngine(nn.Linear(64, 64, device="cuda"))
    assert "are left alone" in engine.staging_refusal


def test_live_digests_are_the_hosts() -> None:
    engine = TorchModuleEngine(Awkward().cuda())
    found = engine.live_digests()
    assert found == {n: digest_tensor(t.cpu()) for live in engine._live[0] for n in live.names for t in [live.tensor]}
