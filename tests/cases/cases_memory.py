"""Memory: whose it is, how much of it, and whether the bytes end where the engine looks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.cases.base import MOVERS, TRANSPORTS, bits, case, check, differing, must, site, wired
from tests.trainer_agent.fleet import fill
from weightplane.controlplane.core.plan import Bucket
from weightplane.inference_agent import sink
from weightplane.transports.buckets import SinkSpans


class Layers(nn.Module):
    """Layers of 16 KiB, four buckets of 4 KiB each; the engine holds them turned, so that bytes need scratch."""

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.zeros(64, 64).t() if turned else torch.zeros(64, 64), requires_grad=False)
            for _ in range(4)
        )


def _turned() -> Layers:
    return Layers(turned=True)


class _Watched(SinkSpans):
    """The product's own, which notes how much memory it handed out beside the model's."""

    most = 0

    def spans(self, bucket: Bucket) -> list[torch.Tensor]:
        out = super().spans(bucket)
        _Watched.most = max(_Watched.most, *(b.numel() for b in self._scratch._buffers.values()), 0)
        return out


@case
def M01_a_layer_larger_than_a_bucket_is_exact_although_the_bucket_is_used_again() -> None:
    module = Layers()
    derived: dict[str, torch.Tensor] = {}

    def whole_layers(served: Any) -> None:
        """A loader's work that waits for whole layers: it sees the live tensors, and never a bucket."""
        for i, p in enumerate(served.layers):
            derived[f"layers.{i}"] = p.detach().sum(0)

    _Watched.most = 0
    before = sink.SinkSpans  # type: ignore[attr-defined]
    sink.SinkSpans = _Watched  # type: ignore[attr-defined]
    try:
        with site("r0", make=_turned, hooks=[whole_layers]) as f, wired("r0/0"):
            live = f.engines["r0"].modules[0]
            for step, transport in enumerate(TRANSPORTS, 1):
                fill(module, step)
                with f.publisher(module, transport=transport, verify="off", mode="in_place") as publisher:
                    with must(f"the update commits over {transport}"):
                        publisher.publish(step)
                wrong = [n for n, t in module.named_parameters() if not torch.equal(live.get_parameter(n), t)]
                check(f"every layer is exact over {transport}", not wrong, wrong)
                stale = [
                    n
                    for n, d in derived.items()
                    if not torch.equal(d, module.get_parameter(n).t().contiguous().t().sum(0))
                ]
                check(f"what waited for whole layers is exact over {transport}", not stale, stale)
            check("memory beside the model is one bucket", 0 < _Watched.most <= 4096 + 16 * 4, _Watched.most)
    finally:
        sink.SinkSpans = before  # type: ignore[attr-defined]


@case
def M04_sides_with_different_bucket_sizes_cut_by_one_plan() -> None:
    module = nn.Linear(700, 400)
    with site("r0", make=lambda: nn.Linear(700, 400)) as f:
        live = f.engines["r0"].modules[0]
        step = 0
        for transport in MOVERS:
            for size in (1 << 20, 64 << 20, 4096):
                step += 1
                fill(module, step)
                with f.publisher(module, transport=transport, bucket_bytes=size) as publisher:
                    with must(f"the update commits in buckets of {size} over {transport}"):
                        publisher.publish(step)
                wrong = differing(bits(live), bits(module))
                check(f"the values are exact in buckets of {size} over {transport}", not wrong, wrong)


@case
def M07_a_strided_parameter_of_the_engine_holds_the_value_itself() -> None:
    """Without digests: what is looked at is the live parameter."""

    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.zeros(48, 40)
            self.turned = nn.Parameter(self.base.t()[:24], requires_grad=False)
            self.columns = nn.Parameter(self.base[:, 30::3], requires_grad=False)
            self.plain = nn.Parameter(torch.zeros(33, 7), requires_grad=False)

    names = ("turned", "columns", "plain")
    with site("r0", make=Strided) as f, wired("r0/0"):
        live: Any = f.engines["r0"].modules[0]
        where = {n: live.get_parameter(n).data_ptr() for n in names}
        state = {n: torch.zeros(live.get_parameter(n).shape) for n in names}
        for step, transport in enumerate(TRANSPORTS, 1):
            for mode in ("staged", "in_place"):
                for n, t in state.items():
                    t.copy_(torch.arange(t.numel()).view(t.shape) + 1000 * step + len(mode) + len(n))
                source = nn.ParameterDict(state)
                with f.publisher(source, transport=transport, verify="off", mode=mode) as publisher:
                    with must(f"the {mode} update commits over {transport}"):
                        publisher.publish(10 * step + len(mode))
                wrong = [n for n in names if not torch.equal(live.get_parameter(n), source[n])]
                check(f"the live parameter holds the value {mode} over {transport}", not wrong, wrong)
        check("in the memory that it had", where == {n: live.get_parameter(n).data_ptr() for n in names})
