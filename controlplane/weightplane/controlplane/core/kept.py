"""What is kept of the committed version so that a catch-up can be verified after a restart. Pure.

The manifest, which regions each plan had, and the expected digests of those regions as the trainer gave them. The first
two are *bodies*: compressed, named by the hash of their content, and equal from one publish to the next; a store writes
one only when it is new. The digests are packed, 8 bytes a region, in the order of the plan; a seal covers them.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from sys import byteorder

from .manifest import Manifest, ManifestError, TensorMeta
from .model import Held
from .placement import Box
from .plan import Plan
from .states import Verify
from .verify import sampled_regions

__all__ = [
    "MOST_BYTES",
    "Kept",
    "KeptError",
    "check",
    "known",
    "manifest_body",
    "manifest_of",
    "pack",
    "problem",
    "regions_body",
    "sealed",
]

#: More than this is not kept: a million tensors in four million regions take some 60 MB.
MOST_BYTES = 128 << 20
_MOST_TEXT = 1 << 30  # of a body, unpacked


class KeptError(ValueError):
    """What was kept is not what was written. The text names it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What proves one update. ``digests``: of each plan, the id of its regions' body and their packed digests (none
    where nothing was hashed). ``bodies``: by id, of the manifest and of each of those. ``seal``: see ``sealed``."""

    update_id: str
    manifest_id: str
    verify: str
    digests: tuple[tuple[str, bytes], ...]
    bodies: Mapping[str, bytes]
    seal: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(len(d) for _, d in self.digests) + sum(map(len, self.bodies.values()))

    @property
    def needs(self) -> tuple[str, ...]:
        """Ids of the bodies that belong to it."""
        return tuple(dict.fromkeys((self.manifest_id, *(i for i, _ in self.digests))))


def _seal(kept: Kept) -> str:
    head = [kept.update_id, kept.manifest_id, kept.verify, [[i, len(d)] for i, d in kept.digests]]
    content = hashlib.sha256(json.dumps(head, separators=(",", ":")).encode())
    for _, digests in kept.digests:
        content.update(digests)
    return content.hexdigest()


def sealed(kept: Kept) -> Kept:
    """The same with its seal: the hash of everything but the bodies, whose ids say what is in them."""
    return kept if kept.seal else replace(kept, seal=_seal(kept))


def problem(kept: Kept | None, committed: Held, manifest_id: str) -> str:
    """Why ``kept``, as stored, does not prove what is committed; empty if it does."""
    version = f"version {committed.version} (update {committed.update_id})"
    again = "nobody is caught up to it; the next publish is kept again"
    if not committed.version:
        return ""
    if kept is None or kept.update_id != committed.update_id:
        found = f", but of update {kept.update_id!r}" if kept is not None else ""
        return f"the store holds no digests of {version}{found}: {again}"
    if kept.manifest_id != manifest_id or kept.seal != _seal(kept):
        return f"the stored digests of {version} are damaged: they do not match their seal; {again}"
    return ""


# --- bodies


def _packed(prefix: str, text: bytes) -> tuple[str, bytes]:
    return prefix + hashlib.sha256(text).hexdigest()[:32], zlib.compress(text, 1)


def _unpacked(body_id: str, kept: Kept, what: str) -> bytes:
    body = kept.bodies.get(body_id)
    if body is None:
        raise KeptError(f"the stored {what} {body_id} is missing")
    unpack = zlib.decompressobj()
    try:
        text = unpack.decompress(body, _MOST_TEXT)
    except zlib.error as e:
        raise KeptError(f"the stored {what} {body_id} is damaged: {e}") from e
    if not unpack.eof or body_id[2:] != hashlib.sha256(text).hexdigest()[:32]:
        raise KeptError(f"the stored {what} {body_id} is damaged: its content has another hash")
    return text


def check(kept: Kept) -> None:
    """Raise ``KeptError`` if a body is damaged or missing, or does not fit its digests."""
    _unpacked(kept.manifest_id, kept, "manifest")
    for body_id, packed in kept.digests:
        _regions_text(body_id, kept, len(packed))


def _regions_text(body_id: str, kept: Kept, digest_bytes: int) -> bytes:
    text = _unpacked(body_id, kept, "list of regions")
    regions = text.count(b"\n")
    if digest_bytes != 8 * regions:
        raise KeptError(f"{digest_bytes} bytes of digests are stored for the {regions} regions of {body_id}")
    return text


def manifest_body(manifest: Manifest) -> tuple[str, bytes]:
    """A manifest's id, and its body: what the id hashes."""
    return _packed("m-", manifest.canonical())


def manifest_of(kept: Kept) -> Manifest:
    """The manifest. Raises ``KeptError``."""
    text = _unpacked(kept.manifest_id, kept, "manifest")
    try:
        rows = json.loads(text.decode("utf-8", "surrogatepass"))
        manifest = Manifest.of(TensorMeta(name, dtype, tuple(shape), alias) for name, dtype, shape, alias in rows)
    except (ValueError, TypeError, ManifestError) as e:
        raise KeptError(f"the stored manifest {kept.manifest_id} cannot be read: {e}") from e
    _ = manifest.id  # hashed here
    return manifest


def regions_body(plan: Plan) -> tuple[str, bytes]:
    """The id and the body of a plan's regions, in its order: a line each, as in ``Placement.canonical``."""
    lines = [f"{r.tensor} {','.join([f'{a}:{b}' for a, b in r.box])}\n" for r in plan.regions]
    return _packed("r-", "".join(lines).encode("ascii"))


def _regions(text: bytes) -> list[tuple[int, Box]]:
    out: list[tuple[int, Box]] = []
    for line in text.decode("ascii").splitlines():
        tensor, _, box = line.partition(" ")
        ranges = [r.partition(":") for r in box.split(",")] if box else []
        out.append((int(tensor), tuple((int(a), int(b)) for a, _, b in ranges)))
    return out


# --- digests


def pack(table: array[int]) -> bytes:
    """Digests in the order of a plan's regions (``verify.expected_table``), 8 bytes each, little-endian."""
    return _little(table).tobytes()


def _little(table: array[int]) -> array[int]:
    if byteorder == "little":
        return table
    swapped = array("Q", table)
    swapped.byteswap()
    return swapped


def known(kept: Kept) -> dict[tuple[int, Box], int]:
    """What the kept digests say of the manifest, by root tensor and box: as ``verify.known_digests``.

    Raises ``KeptError``.
    """
    out: dict[tuple[int, Box], int] = {}
    for body_id, packed in kept.digests:
        regions = _regions(_regions_text(body_id, kept, len(packed)))
        table = array("Q")
        table.frombytes(packed)
        table = _little(table)
        which: Sequence[int] = range(len(table))
        if kept.verify == Verify.SAMPLED.value:
            which = sampled_regions(kept.update_id, len(table))
        out.update((regions[i], table[i]) for i in which)
    return out
