"""Sources in one process: names, ties, casts, odd strides, and that a source is never written to."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightplane.controlplane.core.manifest import Manifest, ManifestError, TensorMeta
from weightplane.controlplane.core.placement import full_box, full_placement
from weightplane.controlplane.core.planner import make_plan
from weightplane.trainer_agent.naming import NameRules, SourceError, merge_manifests
from weightplane.trainer_agent.sources import ModuleSource, Source, StateDictSource
from weightplane.trainer_agent.sources_gather import GatherSource
from weightplane.trainer_agent.sources_safetensors import SafetensorsSource
from weightplane.transports.buckets import SourceSpans
from weightplane.transports.digest import digest_tensor


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.arange(3.0), persistent=False)


def names(manifest: Manifest) -> list[str]:
    return [t.name for t in manifest]


def published(source: Source) -> dict[str, torch.Tensor]:
    """What a receiver of everything would hold, by the real plan and the real spans."""
    manifest = source.manifest()
    plan = make_plan(manifest, [source.placement(0)], [full_placement("r/0", manifest)], 64)
    spans = SourceSpans(plan, manifest, "rank/0", source.tensor)
    parts: dict[int, list[bytes]] = {}
    for bucket in spans.buckets:
        for segment, span in zip(bucket.segments, spans.spans(bucket), strict=True):
            parts.setdefault(plan.regions[segment.region].tensor, []).append(bytes(span.tolist()))
    out = {}
    for i, meta in enumerate(manifest):
        raw = b"".join(parts.get(manifest.root(i), []))
        dtype = getattr(torch, meta.dtype)
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        out[meta.name] = flat.view(dtype).view(meta.shape)
    return out


def test_module_ties_are_aliases_and_runtime_buffers_stay() -> None:
    module = Tied()
    source = ModuleSource(module)
    manifest = source.manifest()
    assert names(manifest) == list(module.state_dict())
    assert "cache" not in names(manifest)
    head = manifest.get("head.weight")
    assert head is not None and head.alias_of == "embed.weight"
    assert manifest.get("norm.num_batches_tracked") == TensorMeta("norm.num_batches_tracked", "int64", ())
    got = published(source)
    for name, tensor in module.state_dict().items():
        assert torch.equal(got[name], tensor), name


def test_a_tie_by_storage_is_found_without_the_same_object() -> None:
    base = torch.randn(4, 3)
    state = {"a": base, "b": base.detach(), "c": base.t(), "d": base[:], "e": base.clone(), "f": base[1:]}
    manifest = StateDictSource(state).manifest()
    assert [t.alias_of for t in manifest] == ["", "a", "", "a", "", ""]
    got = published(StateDictSource(state))
    assert all(torch.equal(got[k], v) for k, v in state.items())


def test_dropping_the_first_of_a_tie_makes_the_second_its_root() -> None:
    source = ModuleSource(Tied(), rename={"embed.weight": None})
    head = source.manifest().get("head.weight")
    assert head is not None and head.alias_of == ""


def test_a_tie_cast_apart_is_no_alias() -> None:
    source = ModuleSource(Tied(), cast={"head.*": torch.bfloat16})
    head = source.manifest().get("head.weight")
    assert head is not None and (head.dtype, head.alias_of) == ("bfloat16", "")


@pytest.mark.parametrize(
    "raw",
    [
        "module.layers.0.w",
        "_orig_mod.layers.0.w",
        "_fsdp_wrapped_module.layers._fsdp_wrapped_module.0._checkpoint_wrapped_module.w",
        "module._orig_mod.layers.0._orig_mod.w",
    ],
)
def test_wrapper_prefixes_are_stripped_anywhere(raw: str) -> None:
    assert NameRules().name(raw) == "layers.0.w"
    assert NameRules(strip=()).name(raw) == raw


def test_real_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped = nn.Sequential(checkpoint_wrapper(plain[0]), torch.compile(plain[1]))  # type: ignore[call-overload]
    assert names(ModuleSource(nn.DataParallel(wrapped)).manifest()) == list(plain.state_dict())


def test_renames_by_mapping_and_by_function() -> None:
    state = {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}
    assert names(StateDictSource(state, rename={"a": "x", "b": None}).manifest()) == ["x", "c"]
    assert names(StateDictSource(state, rename=lambda n: f"model.{n}").manifest()) == ["model.a", "model.b", "model.c"]
    with pytest.raises(SourceError, match="name map gives ''"):
        StateDictSource(state, rename=lambda n: "").manifest()


def test_two_names_for_one_target_are_refused() -> None:
    state = {"module.a": torch.ones(1), "a": torch.zeros(1)}
    with pytest.raises(ManifestError, match="'a' is declared twice"):
        StateDictSource(state).manifest()


def test_casts_equal_torch_and_touch_floating_tensors_only() -> None:
    state = {
        "w": torch.randn(5, 3),
        "i": torch.arange(4),
        "b": torch.tensor([True, False]),
        "z": torch.randn(3, dtype=torch.complex64),
        "t": torch.randn(6, 4).t(),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64):
        got = published(StateDictSource(state, cast=dtype))
        assert torch.equal(got["w"].view(torch.uint8), state["w"].to(dtype).view(torch.uint8))
        assert torch.equal(got["t"].contiguous().view(torch.uint8), state["t"].to(dtype).contiguous().view(torch.uint8))
        assert all(torch.equal(got[k], state[k]) for k in "ibz")


def test_casts_by_pattern_and_by_function() -> None:
    state = {"a.norm.w": torch.ones(2), "a.w": torch.ones(2)}
    by_pattern = StateDictSource(state, cast={"*norm*": torch.float32, "*": torch.bfloat16}).manifest()
    assert [t.dtype for t in by_pattern] == ["float32", "bfloat16"]
    by_function = StateDictSource(state, cast=lambda n, d: None if "norm" in n else torch.float16).manifest()
    assert [t.dtype for t in by_function] == ["float32", "float16"]


def test_strided_lazy_empty_and_scalar_tensors_are_exact() -> None:
    base = torch.randn(8, 6)
    state = {
        "columns": base[:, ::2],
        "transposed": base.t(),
        "offset": base[3:],
        "flipped": base.flip(0),
        "expanded": torch.randn(1, 4).expand(5, 4),
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "nan": torch.tensor([0x7FC01234, 0x7F800001], dtype=torch.int32).view(torch.float32),
        "名前": torch.arange(3),
    }
    got = published(StateDictSource(state))
    for name, tensor in state.items():
        want = tensor.resolve_conj().contiguous()
        assert got[name].shape == want.shape
        assert digest_tensor(got[name]) == digest_tensor(want), name


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised"),
        (torch.ones(2).to_sparse(), "layout"),
        (torch.empty(2, device="meta"), "meta"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(TypeError, match=f"'bad'.*{why}"):
        StateDictSource({"good": torch.ones(1), "bad": tensor}).manifest()


def test_a_state_dict_entry_that_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match="'extra' of the state dict is a dict"):
        StateDictSource({"extra": {}}).manifest()


def test_the_source_is_never_written(tmp_path: Path) -> None:
    module = Tied()
    before = {k: (digest_tensor(v), v.data_ptr(), v._version) for k, v in module.state_dict().items()}
    source = ModuleSource(module, cast=torch.bfloat16)
    plain = ModuleSource(module)
    for step in range(100):
        for s in (source, plain):
            s.begin(step)
            published(s)
            s.end()
    assert {k: (digest_tensor(v), v.data_ptr(), v._version) for k, v in module.state_dict().items()} == before


def test_metadata_and_values_are_read_afresh() -> None:
    module = nn.Linear(2, 3)
    source = ModuleSource(module)
    first = source.manifest().id
    source.end()
    with torch.no_grad():
        module.weight.fill_(7)
    assert source.manifest().id == first
    assert torch.equal(published(source)["weight"], module.weight.detach())
    module.weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    changed = source.manifest()
    assert changed.id != first and changed.tensors[0].dtype == "bfloat16"


def test_a_fixed_manifest_takes_what_this_rank_holds() -> None:
    mine, theirs = {"e.0": torch.ones(2)}, {"e.1": torch.ones(3)}
    parts = [StateDictSource(d).manifest() for d in (mine, theirs)]
    whole = merge_manifests(parts)
    source = StateDictSource(mine, manifest=whole)
    assert source.manifest() is whole
    assert [p.tensor for p in source.placement(0).pieces] == [0]
    assert source.tensor(0)[1] == full_box((2,))
    with pytest.raises(KeyError, match=r"e\.1"):
        source.tensor(1)
    with pytest.raises(SourceError, match=r"'e\.1': expected float32 \[3\], found float32 \[2\].*'x' is not in"):
        StateDictSource({"e.1": torch.ones(2), "x": torch.ones(1)}, manifest=whole).manifest()


def test_an_alias_held_alone_serves_its_root() -> None:
    shared = torch.ones(2)
    whole = StateDictSource({"layer1.x": shared, "layer11.x": shared}).manifest()
    source = StateDictSource({"layer11.x": shared}, manifest=whole)
    source.manifest()
    assert source.placement(0).pieces == full_placement("rank/0", whole).pieces
    assert torch.equal(source.tensor(0)[0], shared)


def test_colliding_names_of_two_ranks_are_refused() -> None:
    a = Manifest.of([TensorMeta("layers.0.w", "float32", (2,))])
    b = Manifest.of([TensorMeta("layers.0.w", "float32", (3,))])
    with pytest.raises(ManifestError, match=r"'layers\.0\.w' is declared by part 0 and by part 1"):
        merge_manifests([a, a])
    with pytest.raises(ManifestError, match=r"part 0 declares float32 \[2\], part 1 float32 \[3\]"):
        merge_manifests([a, b], replicated=True)
    assert merge_manifests([a, a], replicated=True) == a


# --- safetensors ----------------------------------------------------------------------------------------------------


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], pad: int = 0) -> None:
    import json

    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, t in tensors.items():
        raw = bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist())
        entry = {"dtype": kinds[t.dtype], "shape": list(t.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        header[name] = entry  # type: ignore[assignment]
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {
        "w": torch.randn(4, 3),
        "h": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "i": torch.tensor(7),
        "none": torch.empty(0, 3),
    }


@pytest.mark.parametrize("pad", [0, 1, 3])
def test_a_safetensors_file(tmp_path: Path, state: dict[str, torch.Tensor], pad: int) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, state, pad)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    got = published(SafetensorsSource(path))
    assert got.keys() == state.keys()
    assert all(torch.equal(got[k], v) and got[k].dtype == v.dtype for k, v in state.items())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest


def test_a_safetensors_folder_with_and_without_index(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    first = {k: state[k] for k in ("w", "i")}
    second = {k: state[k] for k in ("h", "flags", "none")}
    write_safetensors(tmp_path / "model-1.safetensors", first)
    write_safetensors(tmp_path / "model-2.safetensors", second)
    got = published(SafetensorsSource(tmp_path))
    assert {k: v.shape for k, v in got.items()} == {k: v.shape for k, v in state.items()}
    index = tmp_path / "model.safetensors.index.json"
    weight_map = dict.fromkeys(first, "model-1.safetensors") | dict.fromkeys(second, "model-2.safetensors")
    index.write_text(__import__("json").dumps({"weight_map": weight_map}))
    assert published(SafetensorsSource(tmp_path)).keys() == state.keys()
    index.write_text(__import__("json").dumps({"weight_map": weight_map | {"w": "model-2.safetensors"}}))
    with pytest.raises(SourceError, match=r"first 'w': expected in model-2\.safetensors, found in model-1"):
        SafetensorsSource(tmp_path)
    index.write_text(__import__("json").dumps({"weight_map": weight_map | {"x": "model-3.safetensors"}}))
    with pytest.raises(SourceError, match=r"lacks: \['model-3\.safetensors'\]"):
        SafetensorsSource(tmp_path)
    index.write_text(__import__("json").dumps({"weight_map": {"w": "../model-1.safetensors"}}))
    with pytest.raises(SourceError, match="same folder"):
        SafetensorsSource(tmp_path)


def test_one_name_in_two_shards_is_refused(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    write_safetensors(tmp_path / "a.safetensors", state)
    write_safetensors(tmp_path / "b.safetensors", {"w": state["w"]})
    with pytest.raises(SourceError, match=r"'w' is in a\.safetensors and in b\.safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("header", "body", "why"),
    [
        (b"not json", b"", "not JSON"),
        (b"[]", b"", "not a JSON object"),
        (b'{"a": 3}', b"", "malformed entry"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', b"1234", "inside the file"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"1234", "expected 8 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"1234", "inside the file"),
        (b'{"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 1]}}', b"1", "dtype 'Q4'"),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', b"12", "begins at byte 1, expected 0"),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"12", "end at byte 1 of 2"),
        (b'{"a": {}, "a": {}}', b"", "duplicate key 'a'"),
    ],
)
def test_a_malformed_safetensors_file_is_refused(tmp_path: Path, header: bytes, body: bytes, why: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)
    with pytest.raises(SourceError, match=why):
        SafetensorsSource(path)


def test_not_safetensors_at_all(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\xff" * 16)
    with pytest.raises(SourceError, match="not a safetensors file"):
        SafetensorsSource(path)
    with pytest.raises(SourceError, match="neither a file nor a folder"):
        SafetensorsSource(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"holds no \.safetensors"):
        SafetensorsSource(tmp_path / "empty")


# --- gather ---------------------------------------------------------------------------------------------------------


def test_gather_scans_once_then_replays() -> None:
    runs: list[int] = []

    def fn(step: int):
        runs.append(step)
        for i in range(3):
            yield f"module.t{i}", torch.full((2,), float(step + i))

    source = GatherSource(fn, aliases={"tied": "t1"}, cast=torch.bfloat16)
    source.begin(5)
    manifest = source.manifest()
    assert names(manifest) == ["t0", "t1", "t2", "tied"] and runs == [5]
    got = list(source.iterate(sends=True))
    assert [i for i, _ in got] == [0, 1, 2] and runs == [5, 5]
    local = got[2][1]
    assert local is not None and torch.equal(local[0], torch.full((2,), 7.0).bfloat16())
    assert [local for _, local in source.iterate(sends=False)] == [None, None, None]
    assert source.placement(0).pieces == full_placement("rank/0", manifest).pieces
    assert source.placement(1).pieces == ()


def test_gather_that_yields_something_else_is_refused_then_scanned_again() -> None:
    shapes = {0: (2,), 1: (3,)}

    def fn(step: int):
        yield "a", torch.zeros(shapes[step])

    source = GatherSource(fn)
    source.begin(0)
    first = source.manifest()
    source.begin(1)
    with pytest.raises(SourceError, match=r"'a': expected float32 \[2\], found float32 \[3\]"):
        list(source.iterate(sends=True))
    assert source.manifest() != first
    assert len(list(source.iterate(sends=True))) == 1


def test_gather_order_and_count_are_the_manifests() -> None:
    manifest = Manifest.of([TensorMeta("a", "float32", (1,)), TensorMeta("b", "float32", (1,))])

    def run(*order: str):
        source = GatherSource(lambda step: ((n, torch.ones(1)) for n in order), manifest=manifest)
        return list(source.iterate(sends=True))

    assert len(run("a", "b")) == 2
    with pytest.raises(SourceError, match="expected tensor 'a' next, found 'b'"):
        run("b", "a")
    with pytest.raises(SourceError, match="of the manifest were not yielded"):
        run("a")
    with pytest.raises(SourceError, match="the manifest ends before it"):
        run("a", "b", "c")


def test_gather_ranks_that_do_not_send() -> None:
    manifest = Manifest.of([TensorMeta("a", "float32", (1,))])
    source = GatherSource(lambda step: iter([("a", None)]), manifest=manifest)
    assert list(source.iterate(sends=False)) == [(0, None)]
    with pytest.raises(SourceError, match="sending rank yielded None"):
        list(source.iterate(sends=True))
    with pytest.raises(SourceError, match="meta device"):
        GatherSource(lambda step: iter([("a", None)])).manifest()
    meta = GatherSource(lambda step: iter([("a", torch.empty(1, device="meta"))]))
    assert meta.manifest() == manifest and list(meta.iterate(sends=False)) == [(0, None)]


def test_gather_that_reuses_memory() -> None:
    memory = torch.zeros(2)

    def fn(step: int):
        for i in range(3):
            yield f"t{i}", memory.fill_(i)

    source = GatherSource(fn, reuses=True)
    locals_ = [local for _, local in source.iterate(sends=True)]
    assert [local[0][0].item() for local in locals_ if local is not None] == [0.0, 1.0, 2.0]


# --- a module's manifest, while it is as it was


def model() -> Any:
    module: Any = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.BatchNorm1d(4), "c": nn.Linear(3, 4, bias=False)})
    module["c"].weight = module["a"].weight
    return module


@pytest.mark.parametrize("options", [{}, {"rename": {"a.bias": None, "b.weight": "norm"}}, {"cast": torch.float16}])
def test_the_manifest_of_a_module_that_is_as_it_was_is_the_same_object_and_its_tensors_are_live(
    options: dict[str, Any],
) -> None:
    module = model()
    source = ModuleSource(module, **options)
    first = source.manifest()
    source.end()
    module["a"].weight.data.add_(1)
    assert source.manifest() is first
    fresh = ModuleSource(module, **options)
    assert fresh.manifest() == first and source.placement(0) == fresh.placement(0)
    for i, meta in enumerate(first):
        if not meta.alias_of:
            assert torch.equal(source.tensor(i)[0], fresh.tensor(i)[0]) and not source.tensor(i)[0].requires_grad
    source.end()
    assert not source._tensors


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m["a"], "weight", nn.Parameter(torch.ones(3, 3))),
        lambda m: setattr(m["c"], "weight", nn.Parameter(torch.ones(4, 3))),
        lambda m: setattr(m["a"].weight, "data", torch.ones(4, 3)),
        lambda m: m.to(torch.float64),
        lambda m: m.__delitem__("b"),
        lambda m: m.__setitem__("d", nn.Linear(1, 1)),
        lambda m: m["b"].register_buffer("running_mean", torch.ones(4), persistent=False),
        lambda m: setattr(m["c"], "weight", m["c"].weight),
    ],
    ids=["shape", "untied", "memory", "dtype", "removed", "added", "transient", "nothing"],
)
def test_a_module_that_changed_has_the_manifest_of_now(change: Callable[[Any], object]) -> None:
    module = model()
    source = ModuleSource(module)
    source.manifest()
    source.end()
    change(module)
    for _ in range(2):
        fresh = ModuleSource(module)
        assert source.manifest() == fresh.manifest()
        for i, meta in enumerate(fresh.manifest()):
            if not meta.alias_of:
                assert source.tensor(i)[0].data_ptr() == fresh.tensor(i)[0].data_ptr()
        source.end()


def test_rules_that_are_functions_are_asked_each_time() -> None:
    asked: list[str] = []

    def rename(name: str) -> str:
        asked.append(name)
        return name

    source = ModuleSource(nn.Linear(2, 2), rename=rename)
    source.manifest()
    source.manifest()
    assert len(asked) == 4
