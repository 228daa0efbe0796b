"""The device's digests against the CPU's. The kernels run on a card if there is one, else in Triton's interpreter.

Without a card: ``TRITON_INTERPRET=1 pytest tests/transports/test_digest_cuda.py`` where Triton is installed (the
interpreter must be chosen before anything imports Triton).
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from weightplane.transports import digest_cuda
from weightplane.transports.digest import LEAF_BYTES, digest_bytes, digest_tensor, hex_digest
from weightplane.transports.digest_cuda import RegionGroup, RegionHasher, digest_tensors, grouped

CARD = torch.cuda.is_available()
INTERPRETED = not CARD and os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cuda", 0) if CARD else torch.device("cpu")
kernels = pytest.mark.filterwarnings("default") if INTERPRETED else pytest.mark.gpu
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "digests.json").read_text())


def noise(nbytes: int, seed: int = 1) -> torch.Tensor:
    """Bytes on the device under test, at an address that is a multiple of 16."""
    flat = torch.frombuffer(bytearray(random.Random(seed).randbytes(nbytes + 16)), dtype=torch.uint8)
    if CARD:
        return flat.to(DEVICE)[:nbytes]
    return flat[-flat.data_ptr() % 16 :][:nbytes]


def on_device(flats: Sequence[torch.Tensor]) -> list[int]:
    """Their digests by the kernels."""
    hasher = RegionHasher(DEVICE, [t.numel() for t in flats])
    hasher.begin()
    hasher.launch(hasher.table([(i, 0, t.data_ptr(), t.numel()) for i, t in enumerate(flats) if t.numel()]))
    return hasher.values()


def on_host(flats: Sequence[torch.Tensor]) -> list[int]:
    return [digest_bytes(bytes(t.cpu().numpy())) for t in flats]


@kernels
def test_the_published_vectors() -> None:
    published = {
        b"": "c77b3abb6f87acd9",
        b"a": "98c36938fa6e7cb2",
        bytes(range(256)) * 4: "d62d07f06275a714",
        bytes(131072): "ee3e73086fe28846",
        bytes(131073): "060a842cbd19f4eb",
        bytes(range(256)) * 4096: "9255e35cff329a55",
    }
    flats = [torch.frombuffer(bytearray(b or b"?"), dtype=torch.uint8)[: len(b)].to(DEVICE) for b in published]
    assert [hex_digest(v) for v in on_device(flats)] == list(published.values())


@kernels
def test_the_byte_vectors() -> None:
    def pattern(n: int) -> torch.Tensor:
        i = torch.arange(n)
        return ((131 * i + i // 251) % 256).to(torch.uint8).to(DEVICE)

    assert [hex_digest(v) for v in on_device([pattern(v["nbytes"]) for v in VECTORS["bytes"]])] == [
        v["digest"] for v in VECTORS["bytes"]
    ]


@kernels
def test_every_length_around_a_block_and_a_leaf() -> None:
    lengths = [0, 1, 7, 8, 9, 63, 64, 65, 1023, 1024, 1025, 131071, 131072, 131073, (1 << 20) + 7]
    base = noise(sum(lengths) + 16 * len(lengths))
    flats, at = [], 0
    for n in lengths:
        flats.append(base[at : at + n])
        at += n + (-n % 16)
    assert on_device(flats) == on_host(flats)


@kernels
def test_every_address() -> None:
    base = noise(4096)
    flats = [base[start : start + n] for start in range(9) for n in (1, 8, 15, 2049)]
    whole = noise(LEAF_BYTES + 32, 3)
    flats += [whole[start : start + LEAF_BYTES] for start in (0, 4, 8, 16)]
    assert on_device(flats) == on_host(flats)


@kernels
def test_a_region_that_comes_in_parts_from_anywhere_and_in_any_order() -> None:
    size = 3 * LEAF_BYTES + 1500
    flat, small = noise(size), noise(40, 2)
    hasher = RegionHasher(DEVICE, [size, 40])
    cuts = [(0, 0, LEAF_BYTES), (0, 2 * LEAF_BYTES, size - 2 * LEAF_BYTES), (1, 0, 40), (0, LEAF_BYTES, LEAF_BYTES)]
    for _ in range(2):
        hasher.begin()
        for region, offset, n in cuts:
            part = (small if region else flat[offset : offset + n]).clone()  # another address each time
            with pytest.raises(RuntimeError, match="leaves were not hashed"):
                hasher.values()
            hasher.launch(hasher.table([(region, offset, part.data_ptr(), n)]))
            hasher.wait()
            part.zero_()
        assert hasher.values() == on_host([flat, small])
        flat.add_(1)


@kernels
def test_a_group_is_replayed_and_sees_what_is_there_now() -> None:
    flats = [noise(5000, 1), noise(LEAF_BYTES, 2), noise(100, 3)]
    groups = grouped([(10 + i, t) for i, t in enumerate(flats)], 4096)
    assert [g.keys for g in groups] == [[10], [11], [12]]
    for _ in range(2):
        for g in groups:
            g.start()
        assert [v for g in groups for v in g.values()] == on_host(flats)
        for t in flats:
            t[-1] += 1
    one = grouped([(i, t) for i, t in enumerate(flats)], 1 << 40)
    assert [g.keys for g in one] == [[0, 1, 2]] and one[0].nbytes == sum(t.numel() for t in flats)


@kernels
def test_some_regions_of_a_group_are_hashed_alone_and_then_all_again() -> None:
    flats = [noise(5000, 1), noise(2 * LEAF_BYTES, 2), noise(100, 3), noise(LEAF_BYTES + 3, 4)]
    (group,) = grouped([(10 + i, t) for i, t in enumerate(flats)], 1 << 40)
    for keys in ({13, 11}, {10}, {12, 99}, {10, 11, 12, 13}):
        part = group.part(keys)
        assert part is not None and part.keys == sorted(keys & {10, 11, 12, 13})
        part.start()
        wanted = [flats[k - 10] for k in part.keys]
        assert part.values() == on_host(wanted) and part.nbytes == sum(t.numel() for t in wanted)
        flats[1][7] += 1
    assert group.part({99}) is None
    group.start()
    assert group.values() == on_host(flats)


@kernels
def test_the_device_is_tried_once_and_works() -> None:
    assert digest_cuda.unusable(DEVICE) == ""


@pytest.mark.gpu
def test_tensors_of_every_kind_on_a_card() -> None:
    tensors = [
        torch.randn(300, 500, device=DEVICE).bfloat16(),
        torch.randn(30, 50, device=DEVICE).t(),
        torch.zeros(0, device=DEVICE),
        torch.tensor(3.0, device=DEVICE),
        torch.randn(20, dtype=torch.complex64, device=DEVICE).conj(),
        torch.randn(9),
    ]
    assert digest_tensors(tensors) == [digest_tensor(t.cpu()) for t in tensors]


# --- without kernels


def test_tensors_on_the_host_are_hashed_by_the_host() -> None:
    tensors = [torch.randn(3, 4).t(), torch.zeros(0), torch.randn(100).bfloat16()]
    assert digest_tensors(tensors) == [digest_tensor(t) for t in tensors]
    with pytest.raises(TypeError, match="'q'"):
        digest_tensors([torch.zeros(2, dtype=torch.float32).to_sparse()], ["q"])


def test_a_part_that_cuts_a_leaf_is_refused_by_name() -> None:
    hasher = RegionHasher(torch.device("cpu"), [300_000])
    for offset, n in ((5, 10), (0, 5), (LEAF_BYTES, 10), (0, 300_001), (0, 0)):
        with pytest.raises(ValueError, match="region 0"):
            hasher.table([(0, offset, 4096, n)])


def test_a_value_of_the_last_update_is_never_given_for_this_one() -> None:
    hasher = RegionHasher(torch.device("cpu"), [10])
    hasher.begin()
    with pytest.raises(RuntimeError, match="1 leaves were not hashed"):
        hasher.values()


def test_the_rows_of_a_table() -> None:
    hasher = RegionHasher(torch.device("cpu"), [2 * LEAF_BYTES + 5, 0, LEAF_BYTES])
    table = hasher.table([(0, 0, 4096, 2 * LEAF_BYTES + 5), (2, 0, 1 << 20, LEAF_BYTES)])
    assert table.leaves == 4
    assert [c.tolist() for c in table.whole] == [[4096, 4096 + LEAF_BYTES, 1 << 20], [0, 1, 5]]
    assert [c.tolist() for c in table.rest] == [[4096 + 2 * LEAF_BYTES], [5], [2]]
    some = table.some([2])
    assert [c.tolist() for c in some.whole] == [[1 << 20], [5]] and some.leaves == 1 and not len(some.rest[0])
    hasher.begin([0])
    with pytest.raises(RuntimeError, match="3 leaves were not hashed"):
        hasher.values()
    odd = hasher.table([(2, 0, (1 << 20) + 8, LEAF_BYTES)])
    assert [c.tolist() for c in odd.rest] == [[(1 << 20) + 8], [LEAF_BYTES], [5]], "16-byte loads need such addresses"
    assert RegionGroup(torch.device("cpu"), [(7, torch.zeros(9, dtype=torch.uint8))]).keys == [7]


def test_what_cannot_be_hashed_on_the_device_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cuda, "_reasons", {})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "hashed by the CPU" in digest_cuda.unusable(torch.device("cpu"))
    assert "taken on the CPU" in digest_cuda.unusable(torch.device("meta"))
    if importlib.util.find_spec("triton") is None:
        assert "pip install triton" in digest_cuda._try(torch.device("cuda", 0))


def test_a_card_whose_digests_are_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels' module needs Triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(digest_cuda, "_digest_flat", lambda device, flat: [0] * len(flat))
    assert "are wrong" in digest_cuda._try(torch.device("cpu"))

    def fails(device: torch.device, flat: Sequence[torch.Tensor]) -> list[int]:
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(digest_cuda, "_digest_flat", fails)
    assert "no kernel image" in digest_cuda._try(torch.device("cpu"))
