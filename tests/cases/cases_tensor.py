"""Tensor content: what is sent is what is held, under its own name, or the update fails by name."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from tests.cases.base import TRANSPORTS, Small, bits, case, check, differing, holds, must, site, wired
from tests.cases.cases_names import mismatch
from tests.inference_agent.models import Awkward
from tests.trainer_agent.fleet import fill, same
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.sources import StateDictSource
from weightplane.transports.digest import digest_tensor


@case
def T01_a_tied_head_reaches_the_shard_that_knows_only_its_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    first, last = nn.ModuleDict({"embed": nn.Embedding(8, 4)}), nn.ModuleDict({"head": nn.Linear(4, 8, bias=False)})
    with site() as f:
        f.replica("r0", TorchModuleEngine([first, last]))
        module = Tied()
        publisher = f.publisher(module)
        for step in (1, 2):
            fill(module, step)
            with must("the update commits"):
                publisher.publish(step)
            wanted = bits(module)
            check("the first shard holds B", bits(first)["embed.weight"].equal(wanted["embed.weight"]))
            check("the last shard's head holds B", bits(last)["head.weight"].equal(wanted["head.weight"]))


@case
def T02_strided_sources_arrive_exactly_over_every_transport() -> None:
    base = torch.zeros(24, 32)
    views = {
        "columns": base[:, ::2],
        "turned": base.t(),
        "offset": base[3:11, 5:9],
        "backwards": base[::3].transpose(0, 1)[::2],
        "plain": base[0],
    }

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, view in views.items():
                self.register_buffer(name, torch.zeros(view.shape))

    with site("r0", make=Holder) as f, wired("r0/0"):
        for step, transport in enumerate(TRANSPORTS, 1):
            base.copy_(torch.arange(24 * 32).view(24, 32) + 1000 * step)
            with f.publisher(StateDictSource(views), transport=transport) as publisher:
                with must(f"the update commits over {transport}"):
                    publisher.publish(step)
            held = dict(f.engines["r0"].modules[0].named_buffers())
            wrong = [n for n, v in views.items() if not torch.equal(held[n], v.contiguous())]
            check(f"every strided tensor holds its logical values over {transport}", not wrong, wrong)


@case
def T05_parameters_that_were_replaced_are_found_or_refused_at_the_first_update() -> None:
    engine_module, module = Small(), Small()
    layer: Any = engine_module.layers[1]
    with site() as f:
        engine = TorchModuleEngine(engine_module)
        f.replica("r0", engine)
        publisher = f.publisher(module)
        publisher.publish(1)
        # What a quantising post-load step does: the same values, in a new Parameter object.
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        fill(module, 2)
        with must("the second update commits"):
            publisher.publish(2)
        check(
            "the second update is in the live tensors",
            holds(engine, module),
            differing(bits(engine_module), bits(module)),
        )

        def rewrap(m: Any) -> None:
            m.layers[0].weight = nn.Parameter(m.layers[0].weight.detach().clone())

        f.replica("r1", TorchModuleEngine(Small(), hooks=[rewrap]))
        receipt = publisher.publish(3)
        r1 = next(r for r in receipt.replicas if r.replica_id == "r1")
        check(
            "an engine whose step replaces parameters is told so at its first update",
            r1.state == "DIRTY" and r1.failure is not None and "hook moved or replaced" in r1.failure.message,
            r1,
        )


@case
def T07_a_runtime_buffer_that_is_not_sent_stays_bit_identical() -> None:
    module = Awkward()
    with site("r0", make=Awkward) as f:
        live: Any = f.engines["r0"].modules[0]
        live.scratch.copy_(torch.tensor([1.5, -0.0, float("nan"), 7.0]))
        before = bits(live)["scratch"]
        publisher = f.publisher(module)
        for step, mode in ((1, "staged"), (2, "in_place"), (3, "staged")):
            fill(module, step)
            publisher.publish(step, mode=mode)
            check("the update landed", same(f.engines["r0"], module))
            check("the unsent buffer is unchanged", bits(live)["scratch"].equal(before), live.scratch)


@case
def T10_interleaved_dtypes_land_under_their_own_names_over_every_transport() -> None:
    kinds = (torch.bfloat16, torch.float32, torch.int64, torch.float16, torch.int16)
    state = {f"t{i}.w_{str(kinds[i % 5])[6:]}": torch.full((30, 20), i, dtype=kinds[i % 5]) for i in range(25)}

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, tensor in state.items():
                path, leaf = name.split(".")
                self.add_module(path, nn.Module())
                getattr(self, path).register_buffer(leaf, torch.zeros_like(tensor))

    with site("r0", make=Holder) as f, wired("r0/0"):
        live: Any = f.engines["r0"].modules[0]
        for step, transport in enumerate(TRANSPORTS, 1):
            for tensor in state.values():
                tensor.add_(25)
            with f.publisher(StateDictSource(state), transport=transport) as publisher:
                with must(f"the update commits over {transport}"):
                    publisher.publish(step)
            held = dict(live.named_buffers())
            wrong = [n for n, t in state.items() if not torch.equal(held[n], t)]
            check(f"each tensor holds its own values over {transport}", not wrong, wrong)


@case
def T11_packed_experts_are_unpacked_by_a_mapping_or_refused_before_any_write() -> None:
    experts, inner, hidden = 3, 4, 5
    packed = torch.randn(experts, 2 * inner, hidden)

    class PerExpert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(
                nn.ModuleDict({n: nn.Linear(hidden, inner, bias=False) for n in ("gate_proj", "up_proj")})
                for _ in range(experts)
            )

    def unpacked() -> dict[str, torch.Tensor]:
        out = {}
        for i, expert in enumerate(packed):
            out[f"experts.{i}.gate_proj.weight"], out[f"experts.{i}.up_proj.weight"] = expert.split(inner)
        return out

    with site("r0", make=PerExpert) as f:
        live: Any = f.engines["r0"].modules[0]
        before = bits(live)
        publisher = f.publisher(StateDictSource({"experts.gate_up_proj": packed}))
        e = mismatch("packed names are refused at the start", publisher, 1)
        text = str(e)
        check(
            "what did not match is counted and named",
            "6 missing, 1 extra" in text and "'experts.gate_up_proj'" in text and "experts.0.gate_proj.weight" in text,
            text,
        )
        check("nothing was written", not differing(before, bits(live)) and f.state().committed.version == 0)
        publisher.source = StateDictSource(unpacked)
        with must("the mapped update commits"):
            publisher.publish(2)
        wrong = [n for n, t in unpacked().items() if not torch.equal(live.get_parameter(n), t)]
        check("the mapping is exact", not wrong, wrong)


@case
def T12_an_equal_number_of_elements_does_not_excuse_another_shape() -> None:
    class Blocked(nn.Module):
        """A kernel's own layout of a [16, 8] weight."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 8, 4, 2))

    with site("r0", make=Blocked) as f:
        live: Any = f.engines["r0"].modules[0]
        before = bits(live)
        publisher = f.publisher(StateDictSource({"weight": torch.randn(16, 8)}))
        e = mismatch("a shape of equal size is refused at the start", publisher, 1)
        check("both shapes are named", "[16, 8]" in str(e) and "[2, 8, 4, 2]" in str(e), e)
        check("nothing was written", not differing(before, bits(live)))
        publisher.source = StateDictSource({"weight": torch.ones(2, 8, 4, 2)})
        with must("the engine's own layout is taken"):
            publisher.publish(2)
        check("it holds the values", bool((live.weight == 1).all()))


@case
def T18_sides_that_disagree_on_a_dtype_are_refused_at_once() -> None:
    module = Small()
    state = {n: t.half() if n == "layers.2.weight" else t for n, t in module.state_dict().items()}
    with site("r0") as f:
        before = bits(f.engines["r0"].modules[0])
        publisher = f.publisher(StateDictSource(state))
        began = time.monotonic()
        e = mismatch("the dtype is refused at the start", publisher, 1)
        check("it did not hang", time.monotonic() - began < 5)
        named = "'layers.2.weight'" in str(e) and "float16" in str(e) and "float32" in str(e)
        check("the tensor and both dtypes are named", named, e)
        check("nothing was written", not differing(before, bits(f.engines["r0"].modules[0])))


@case
def T20_fused_renamed_and_dropped_entries_are_all_honoured() -> None:
    q, k, v = (torch.randn(4, 6) for _ in range(3))
    trained = {
        "q": q,
        "k": k,
        "v": v,
        "old.name": torch.randn(5),
        "rotary": torch.randn(2),
        "same": torch.randn(3),
    }

    class Served(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Parameter(torch.zeros(12, 6))
            self.new = nn.ParameterDict({"name": torch.zeros(5)})
            self.same = nn.Parameter(torch.zeros(3))

    def fused() -> dict[str, torch.Tensor]:
        rest = {n: t for n, t in trained.items() if n not in "qkv"}
        return {"qkv": torch.cat([q, k, v]), **rest}

    with site("r0", make=Served) as f:
        live: Any = f.engines["r0"].modules[0]
        publisher = f.publisher(StateDictSource(fused, rename={"old.name": "new.name", "rotary": None}))
        with must("the mapped update commits"):
            publisher.publish(1)
        check("the fused tensor is exact", torch.equal(live.qkv, torch.cat([q, k, v])))
        check("the renamed tensor is exact", torch.equal(live.new["name"], trained["old.name"]))
        check("the plain tensor is exact", torch.equal(live.same, trained["same"]))
        publisher.source = StateDictSource(fused, rename={"rotary": None})
        e = mismatch("a name that no rule maps is an error", publisher, 2)
        check("it is counted and named", "1 missing, 1 extra" in str(e) and "'old.name'" in str(e), e)


class _Spoilt(TorchModuleEngine):
    """An engine whose apply is wrong: one expert of a grouped parameter becomes NaN."""

    wrong = False

    def apply(self, update_id: str) -> None:
        super().apply(update_id)
        if self.wrong:
            with torch.no_grad():
                self.modules[0].get_parameter("experts")[1].fill_(float("nan"))


def _grouped() -> nn.Module:
    module = nn.Module()
    module.experts = nn.Parameter(torch.zeros(4, 6, 5), requires_grad=False)
    module.norm = nn.Parameter(torch.zeros(5), requires_grad=False)
    return module


@case
def T21_what_the_live_model_holds_is_checked_not_what_the_wire_brought() -> None:
    module = _grouped()
    with site() as f:
        engine = _Spoilt(_grouped())
        f.replica("r0", engine)
        publisher = f.publisher(module)
        fill(module, 1)
        receipt = publisher.publish(1, mode="in_place")
        check("the evidence is that of live memory", receipt.replicas[0].evidence == "LIVE", receipt.replicas)
        wanted = {n: digest_tensor(t) for n, t in module.state_dict().items()}
        check("the live digests are the trainer's", engine.live_digests() == wanted)
        engine.wrong = True
        fill(module, 2)
        (r0,) = publisher.publish(2).replicas
        check(
            "the apply that went wrong is noticed by tensor",
            r0.state == "DIRTY" and r0.failure is not None and "'experts'" in r0.failure.message,
            r0,
        )
        check("generation is fenced", "dirty" in engine.holders() and engine.mixed())
        engine.wrong = False
        check("the next update heals it", publisher.publish(3).ready == ("r0",) and same(engine, module))
