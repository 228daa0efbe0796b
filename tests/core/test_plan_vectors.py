"""Golden vectors: ids and plans that must never change, for this code and for clients in other languages.

``python -m tests.core.test_plan_vectors`` writes them anew (a change of them is a change of the contract).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import Piece, Placement, full_placement
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.core.planner import LEAF_BYTES, make_plan
from weightplane.controlplane.core.shards import chunk_placement, grid_box

VECTORS = Path(__file__).parent.parent / "vectors"
MANIFESTS = VECTORS / "manifests.json"
PLANS = VECTORS / "plans.json"


def manifest_cases() -> dict[str, Manifest]:
    """The manifests of the vectors, by case."""
    return {
        "no tensors": Manifest.of([]),
        "tiny, tied": Manifest.of(
            [
                TensorMeta("embed.weight", "bfloat16", (8, 4)),
                TensorMeta("norm.weight", "float32", (4,)),
                TensorMeta("scale", "float32", ()),
                TensorMeta("empty", "float16", (0, 4)),
                TensorMeta("lm_head.weight", "bfloat16", (8, 4), "embed.weight"),
            ]
        ),
        "names of every kind": Manifest.of(
            TensorMeta(name, "uint8", (3,))
            for name in [
                "é",
                "e\u0301",
                "权重",
                "𝛼",
                'quote " and \\ backslash',
                "tab\tline\n\u2028",
                "\x00\x7f",
                "/",
                " ",
            ]
        ),
        "dtypes": Manifest.of(
            TensorMeta(dtype, dtype, (2, 2))
            for dtype in ["bool", "float8_e4m3fn", "complex128", "float4_e2m1fn_x2", "uint64"]
        ),
        "large": Manifest.of(
            [TensorMeta("w", "uint8", (5 * LEAF_BYTES + 7,)), TensorMeta("v", "bfloat16", (3, LEAF_BYTES))]
        ),
        "grid": Manifest.of([TensorMeta("a", "float32", (10, 6)), TensorMeta("b", "int64", (3,))]),
    }


def plan_cases() -> dict[str, tuple[str, list[Placement], list[Placement], int]]:
    """Case → (manifest case, senders, receivers, bucket bytes)."""
    m = manifest_cases()
    tied, grid = m["tiny, tied"], m["grid"]
    quarters = [chunk_placement(f"trainer/{k}", grid, k, 4) for k in range(4)]
    tiles = [
        Placement.of(f"tile {r}{c}", [Piece(0, grid_box((10, 6), [(0, 2, r), (1, 2, c)]))])
        for r in (0, 1)
        for c in (0, 1)
    ]
    return {
        "nothing": ("no tensors", [full_placement("s", m["no tensors"])], [full_placement("r", m["no tensors"])], 1),
        "full copy to two": (
            "tiny, tied",
            [full_placement("s", tied)],
            [full_placement("r0", tied), full_placement("r1", tied)],
            64,
        ),
        "an alias only": (
            "tiny, tied",
            [Placement.of("s", [Piece(4, ((0, 8), (0, 4)))])],
            [Placement.of("r", [Piece(0, ((2, 3), (0, 4)))])],
            5,
        ),
        "unicode members": (
            "names of every kind",
            [full_placement("训练/0", m["names of every kind"])],
            [full_placement("réplica", m["names of every kind"])],
            16,
        ),
        "split at leaves": (
            "large",
            [full_placement("s", m["large"])],
            [full_placement("r", m["large"])],
            2 * LEAF_BYTES + 99,
        ),
        "four quarters to two halves": (
            "grid",
            quarters,
            [chunk_placement(f"w/{k}", grid, k, 2) for k in range(2)],
            1 << 20,
        ),
        "tiles to rows and all": (
            "grid",
            tiles,
            [Placement.of("rows", [Piece(0, ((4, 7), (0, 6)))]), Placement.of("all", [Piece(0, ((0, 10), (0, 6)))])],
            100,
        ),
        "replicas": (
            "grid",
            [full_placement(f"s{k}", grid) for k in range(3)],
            [*quarters[:2], full_placement("r", grid)],
            1 << 20,
        ),
        "partial overlap": (
            "grid",
            [Placement.of("a", [Piece(1, ((0, 2),))]), Placement.of("b", [Piece(1, ((1, 3),))])],
            [Placement.of("r", [Piece(1, ((0, 3),))])],
            1 << 20,
        ),
    }


def rows_of(manifest: Manifest) -> list[list[Any]]:
    return [[t.name, t.dtype, list(t.shape), t.alias_of] for t in manifest]


def placement_rows(placements: Iterable[Placement]) -> list[dict[str, Any]]:
    return [
        {"member": p.member, "pieces": [[q.tensor, q.box] for q in p.pieces], "layout_id": p.layout_id}
        for p in placements
    ]


def write() -> None:
    """Write both files from the code as it is."""
    m = manifest_cases()
    manifests = [{"case": case, "tensors": rows_of(x), "nbytes": x.nbytes, "id": x.id} for case, x in m.items()]
    plans = [
        {
            "case": case,
            "manifest": name,
            "senders": placement_rows(senders),
            "receivers": placement_rows(receivers),
            "bucket_bytes": bucket_bytes,
            "plan": make_plan(m[name], senders, receivers, bucket_bytes).to_dict(),
        }
        for case, (name, senders, receivers, bucket_bytes) in plan_cases().items()
    ]
    VECTORS.mkdir(exist_ok=True)
    for path, rows in ((MANIFESTS, manifests), (PLANS, plans)):  # one case a line
        text = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
        path.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def load(path: Path) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in json.loads(path.read_text(encoding="utf-8"))}


def canonical_hash(value: Any) -> str:
    """The hash as documented, written out once more."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def read_placement(row: dict[str, Any]) -> Placement:
    return Placement.of(row["member"], (Piece(i, tuple((a, b) for a, b in box)) for i, box in row["pieces"]))


def test_the_files_hold_every_case() -> None:
    assert list(load(MANIFESTS)) == list(manifest_cases())
    assert list(load(PLANS)) == list(plan_cases())


@pytest.mark.parametrize("case", list(manifest_cases()))
def test_manifest_vectors(case: str) -> None:
    row = load(MANIFESTS)[case]
    manifest = Manifest.of(TensorMeta(name, dtype, tuple(shape), alias) for name, dtype, shape, alias in row["tensors"])
    assert manifest == manifest_cases()[case]
    assert (manifest.id, manifest.nbytes) == (row["id"], row["nbytes"])
    assert row["id"] == "m-" + canonical_hash(row["tensors"])


@pytest.mark.parametrize("case", list(plan_cases()))
def test_plan_vectors(case: str) -> None:
    row = load(PLANS)[case]
    manifest = manifest_cases()[row["manifest"]]
    senders, receivers = ([read_placement(r) for r in row[role]] for role in ("senders", "receivers"))
    assert (row["manifest"], senders, receivers, row["bucket_bytes"]) == plan_cases()[case]
    assert [p.layout_id for p in [*senders, *receivers]] == [
        r["layout_id"] for r in [*row["senders"], *row["receivers"]]
    ]
    plan = make_plan(manifest, senders, receivers, row["bucket_bytes"])
    assert json.loads(json.dumps(plan.to_dict())) == row["plan"]
    assert Plan.from_dict(row["plan"]) == plan
    assert row["plan"]["id"] == "p-" + canonical_hash({k: v for k, v in row["plan"].items() if k != "id"})


if __name__ == "__main__":
    write()
