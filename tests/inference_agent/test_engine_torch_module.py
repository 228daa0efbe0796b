"""TorchModuleEngine: the conformance kit, and what is its own: ties, buffers, versions, hooks, shards, refusals."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from tests.inference_agent.models import Awkward, Constant, manifest_of
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.states import CachePolicy, Mode, PauseMode
from weightplane.inference_agent.engines import arena, live
from weightplane.inference_agent.engines.base import Engine, EngineError, EngineUpdate
from weightplane.inference_agent.engines.conformance import EngineConformance, fill, values_for
from weightplane.inference_agent.engines.sharding import cut, shard_module
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.transports.dtypes import as_bytes


class TestTorchModule(EngineConformance):
    def build(self) -> Engine:
        return TorchModuleEngine(Awkward())

    def manifest_of(self, engine: Engine) -> Manifest:
        assert isinstance(engine, TorchModuleEngine)
        return manifest_of(engine.modules[0])


class TestTorchModuleWithoutStaging(TestTorchModule):
    def build(self) -> Engine:
        return TorchModuleEngine(Awkward(), staged=False)


class TestTwoWorkersWithHalves(EngineConformance):
    def build(self) -> Engine:
        return TorchModuleEngine(shard_module(Awkward(), 2), boxes=cut(2))

    def manifest_of(self, engine: Engine) -> Manifest:
        return manifest_of(Awkward())


class TestInferenceTensors(TestTorchModule):
    def build(self) -> Engine:
        with torch.inference_mode():
            return TorchModuleEngine(Awkward())


def update(manifest: Manifest, version: int, mode: Mode = Mode.STAGED) -> EngineUpdate:
    return EngineUpdate(f"u{version}", version, version, "lin", mode, CachePolicy.CLEAR, manifest)


def publish(engine: TorchModuleEngine, manifest: Manifest, version: int, mode: Mode = Mode.STAGED) -> dict:
    values = values_for(manifest, version)
    engine.begin(update(manifest, version, mode))
    engine.pause("update", PauseMode.KEEP)
    assert engine.wait_paused("update", 10)
    if mode is Mode.IN_PLACE:
        engine.writing(f"u{version}")
    for w in range(len(engine.workers)):
        fill(engine, manifest, values, w)
    engine.prepare(f"u{version}")
    if mode is Mode.STAGED:
        engine.apply(f"u{version}")
    engine.commit(f"u{version}")
    engine.resume("update")
    return values


@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
def test_T07_unsent_buffers_ties_addresses_and_version_counters(mode: Mode) -> None:
    module = Awkward()
    engine, manifest = TorchModuleEngine(module), manifest_of(module)
    assert "scratch" not in manifest.index and "norm.num_batches_tracked" in manifest.index
    scratch = as_bytes(module.scratch).clone()
    where = {n: p.data_ptr() for n, p in module.named_parameters(remove_duplicate=False)}
    counters = {n: p._version for n, p in module.named_parameters()}
    for version in (1, 2):
        values = publish(engine, manifest, version, mode)
    assert module.scratch._version == 0 and torch.equal(as_bytes(module.scratch), scratch)
    assert module.head.weight is module.embed.weight
    tied = values[manifest.index["embed.weight"]]
    assert torch.equal(as_bytes(module.head.weight), as_bytes(tied))
    assert {n: p.data_ptr() for n, p in module.named_parameters(remove_duplicate=False)} == where
    assert not module.turned.is_contiguous()
    assert torch.equal(as_bytes(module.turned), as_bytes(values[manifest.index["turned"]]))
    assert all(p._version > counters[n] for n, p in module.named_parameters()), "R04: derived caches cannot notice"


def test_T51_two_entries_for_one_tied_tensor_are_refused() -> None:
    module = Awkward()
    separate = Manifest.of(TensorMeta(t.name, t.dtype, t.shape) for t in manifest_of(module))
    failure = TorchModuleEngine(module).describe(separate, ["r/0"]).failure("r")
    assert failure is not None and "'head.weight'" in failure.message and "alias_of" in failure.message


def test_T01_a_tied_name_may_be_left_out_only_where_it_is_tied() -> None:
    module = Awkward()
    without = Manifest.of(t for t in manifest_of(module) if t.name != "head.weight")
    assert not TorchModuleEngine(module).describe(without, ["r/0"]).problems
    module.head.weight = nn.Parameter(module.embed.weight.detach().clone())
    failure = TorchModuleEngine(module).describe(without, ["r/0"]).failure("r")
    assert failure is not None and failure.tensors == ("head.weight",)


def test_T45_a_worker_that_knows_only_the_alias_gets_its_tensor() -> None:
    embed, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    first, last = nn.ModuleDict({"embed": embed}), nn.ModuleDict({"head": head})
    manifest = Manifest.of(
        [TensorMeta("embed.weight", "float32", (4, 2)), TensorMeta("head.weight", "float32", (4, 2), "embed.weight")]
    )
    engine = TorchModuleEngine([first, last])
    said = engine.describe(manifest, ["r/0", "r/1"])
    assert not said.problems and [[p.tensor for p in x.pieces] for x in said.placements] == [[0], [1]]
    values = publish(engine, manifest, 1)
    assert torch.equal(as_bytes(embed.weight), as_bytes(values[0]))
    assert torch.equal(as_bytes(head.weight), as_bytes(values[0]))


def test_T56_refusals_count_name_five_and_suggest_the_nearest() -> None:
    module = nn.ModuleDict({f"layer{i}": nn.Linear(2, 2, bias=False) for i in range(9)})
    wrapped = Manifest.of(TensorMeta(f"model.{t.name}", t.dtype, t.shape) for t in manifest_of(module))
    failure = TorchModuleEngine(module).describe(wrapped, ["r/0"]).failure("r")
    assert failure is not None and failure.tensor_count == 18 and len(failure.tensors) == 5
    assert "9 missing, 9 extra" in failure.message and "(nearest: 'model.layer0.weight')" in failure.message
    assert "And 8 more" in failure.message


def test_a_refusal_of_many_long_names_says_the_first_few_and_how_many_more_in_what_has_room() -> None:
    module = nn.Linear(2, 2, bias=False)
    long = [f"base_model.model.layers.{i}.self_attention.query_key_value.{'x' * 150}" for i in range(130)]
    more = [TensorMeta(name, "float32", (4,)) for name in long]
    wrong = Manifest.of([TensorMeta("weight", "float32", (3, 2)), *more])
    failure = TorchModuleEngine(module).describe(wrong, ["r/0"]).failure("r")
    assert failure is not None and failure.tensor_count == 131 and len(failure.message.encode()) <= 1024
    shown = sum(repr(name) in failure.message for name in ("weight", *long))
    assert "130 extra, 1 mis-shaped" in failure.message and "'weight'" in failure.message and shown >= 2
    assert failure.message.endswith(f" And {131 - shown} more.")


def test_T12_T49_equal_element_counts_do_not_excuse_a_shape() -> None:
    module = nn.Linear(4, 6, bias=False)
    for shape in ((4, 6), (24,), (6, 4, 1), (5, 4)):
        failure = (
            TorchModuleEngine(module)
            .describe(Manifest.of([TensorMeta("weight", "float32", shape)]), ["r/0"])
            .failure("r")
        )
        assert failure is not None and f"the manifest has {list(shape)}, the engine [6, 4]" in failure.message


def test_allow_lists_are_explicit_and_reported() -> None:
    lora = nn.Linear(2, 2, bias=False)
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "lora": lora})
    manifest = Manifest.of([TensorMeta("a.weight", "float32", (2, 2)), TensorMeta("draft.weight", "float32", (1,))])
    assert len(TorchModuleEngine(module).describe(manifest, ["r/0"]).problems) == 2
    engine = TorchModuleEngine(module, allow_extra=["draft.*"], allow_missing=["lora.*"])
    said = engine.describe(manifest, ["r/0"])
    assert (said.problems, said.ignored, said.kept) == ((), ("draft.weight",), ("lora.weight",))
    before = as_bytes(lora.weight).clone()
    publish(engine, manifest, 1)
    assert torch.equal(as_bytes(lora.weight), before)


def test_staging_that_cannot_be_reserved_leaves_in_place_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    small = TorchModuleEngine(Constant(), staging_limit=1000)
    assert small.modes == (Mode.IN_PLACE,) and "the limit is 1000" in small.staging_refusal
    monkeypatch.setattr(arena, "available_bytes", lambda: 10)
    full = TorchModuleEngine(Constant())
    assert full.modes == (Mode.IN_PLACE,) and "10 are available" in full.staging_refusal
    with pytest.raises(EngineError, match="10 are available"):
        full.begin(update(manifest_of(Constant()), 1, Mode.STAGED))


def test_a_card_that_is_nearly_full_is_not_filled_by_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    monkeypatch.setattr(arena, "device_bytes", lambda device: (1 << 30) + (256 << 20))
    arena._check_device(card, 1 << 30)
    with pytest.raises(arena.StagingRefused, match="cuda:0, 1342177280 can be taken and 268435456 are left alone"):
        arena._check_device(card, (1 << 30) + 1)


def test_R04_hooks_refresh_derived_copies_and_a_failing_one_leaves_it_mixed() -> None:
    module = nn.Linear(3, 2, bias=False)
    derived: list[torch.Tensor] = []
    full = threading.Event()

    def hook(m: nn.Module) -> None:
        if full.is_set():
            raise RuntimeError("no room")
        derived[:] = [module.weight.double()]

    engine, manifest = TorchModuleEngine(module, hooks=[hook]), manifest_of(module)
    values = publish(engine, manifest, 1)
    assert torch.equal(torch.nan_to_num(derived[0]), torch.nan_to_num(values[0].double()))
    full.set()
    with pytest.raises(RuntimeError, match="no room"):
        publish(engine, manifest, 2)
    assert engine.mixed() and "dirty" in engine.holders()


@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
def test_T05_a_hook_that_replaces_parameters_is_an_error_not_a_silent_stale_copy(mode: Mode) -> None:
    module = nn.Linear(3, 2, bias=False)

    def rewrap(_: nn.Module) -> None:
        module.weight = nn.Parameter(module.weight.detach().clone())

    engine = TorchModuleEngine(module, hooks=[rewrap])
    with pytest.raises(EngineError, match="hook moved or replaced"):
        publish(engine, manifest_of(module), 1, mode)
    assert engine.mixed()


def test_a_parameter_replaced_between_begin_and_apply_is_refused() -> None:
    module = Constant()
    engine, manifest = TorchModuleEngine(module), manifest_of(module)
    engine.begin(update(manifest, 1))
    module.layers[0] = nn.Parameter(torch.zeros(4096))
    with pytest.raises(EngineError, match="moved"):
        engine.prepare("u1")
    engine.abort("u1", False, "test")
    publish(engine, manifest, 2)


def test_C37_a_policy_without_an_implementation_is_not_offered_and_a_failing_one_is_dirty() -> None:
    with pytest.raises(ValueError, match="on_cache"):
        TorchModuleEngine(Constant(), cache_policies=[CachePolicy.KEEP])
    called: list[CachePolicy] = []

    def on_cache(policy: CachePolicy) -> None:
        called.append(policy)
        if len(called) == 2:
            raise RuntimeError("blocks are in use")

    module = Constant()
    engine, manifest = TorchModuleEngine(module, on_cache=on_cache), manifest_of(module)
    publish(engine, manifest, 1)
    assert called == [CachePolicy.CLEAR] and engine.cache_epoch == 1
    with pytest.raises(RuntimeError, match="in use"):
        publish(engine, manifest, 2)
    assert engine.mixed() and engine.held()[0].version == 1


@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
@pytest.mark.parametrize("pause", [PauseMode.KEEP, PauseMode.WAIT])
def test_C15_C20_no_pass_ever_sees_two_versions(mode: Mode, pause: PauseMode) -> None:
    """Threads hammer the model across many flips; every element of version k is k."""
    module = Constant()
    engine, manifest = TorchModuleEngine(module), manifest_of(module)
    stop, faults, seen = threading.Event(), [], set()

    def hammer() -> None:
        while not stop.is_set():
            with engine.request():
                for _ in range(3):
                    with engine.forward() as tag:
                        got = set(module())
                    if got != {float(tag.version)}:
                        faults.append((tag.version, got))
                    seen.add(tag.version)

    threads = [threading.Thread(target=hammer, daemon=True) for _ in range(4)]
    for t in threads:
        t.start()
    for version in range(1, 16):
        u = update(manifest, version, mode)
        engine.begin(u)
        if mode is Mode.IN_PLACE:
            engine.pause("update", pause)
            assert engine.wait_paused("update", 10)
            engine.writing(u.update_id)
        for index, (tensor, _) in engine.targets(0).items():
            with torch.no_grad():
                tensor.fill_(version)
            time.sleep(0.0002 * (index % 2))
        engine.prepare(u.update_id)
        if mode is Mode.STAGED:
            engine.pause("update", pause)
            assert engine.wait_paused("update", 10)
            engine.apply(u.update_id)
        engine.commit(u.update_id)
        engine.resume("update")
        time.sleep(0.002)
    stop.set()
    for t in threads:
        t.join(10)
    assert not faults and len(seen) > 5


def test_four_quarters_land_in_two_halves() -> None:
    """Worker boxes come from one cut; reading both shards back gives the whole."""
    whole = Awkward(rows=8)
    engine = TorchModuleEngine(shard_module(whole, 2), boxes=cut(2))
    manifest = manifest_of(whole)
    values = publish(engine, manifest, 1)
    halves = [dict(m.named_parameters(remove_duplicate=False)) for m in engine.modules]
    joined = torch.cat([halves[0]["embed.weight"], halves[1]["embed.weight"]])
    assert torch.equal(as_bytes(joined), as_bytes(values[manifest.index["embed.weight"]]))
    assert halves[0]["head.weight"] is halves[0]["embed.weight"]


# --- the layout, and copies made ready once


def test_a_fleet_of_workers_is_looked_at_as_a_whole() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    engine = TorchModuleEngine(modules)
    first = engine.layout()
    assert engine.layout() == first == 1
    modules[1].weight.data = torch.zeros(2, 2)
    assert engine.layout() == 2 == engine.layout()


def test_copies_of_every_dtype_keep_bits_and_addresses_and_raise_versions() -> None:
    frozen = []
    with torch.inference_mode():
        frozen.append(torch.zeros(5))
    targets = [torch.zeros(3, 4).t(), torch.zeros(6, dtype=torch.bool), torch.zeros(3, dtype=torch.complex128), *frozen]
    sources = [
        torch.randn(4, 3),
        torch.empty(6, dtype=torch.bool),
        torch.randn(3, dtype=torch.complex128),
        torch.ones(5),
    ]
    as_bytes(sources[1]).copy_(torch.arange(6))
    where = [t.data_ptr() for t in targets]
    copies = live.Copies(list(zip(targets, sources, strict=True)))
    for _ in range(2):
        before = [t._version for t in targets[:3]]
        assert list(copies.steps()) == [48, 6, 48, 20]
        assert all(t._version > v for t, v in zip(targets, before, strict=False))
        assert [as_bytes(t).tolist() for t in targets] == [as_bytes(s).tolist() for s in sources]
        sources[0].add_(1)
    assert [t.data_ptr() for t in targets] == where
