"""Golden vectors for clients in every language: chunk framing, error details, samples, names in shared memory,
proofs of transports that pull, how buckets go over a collective.

``python -m tests.clients.framing_vectors`` writes them anew (a change of them is a change of the contract).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from google.rpc import error_details_pb2, status_pb2

from weightplane.controlplane.core.plan import Bucket, Segment
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.verify import sampled_regions
from weightplane.controlplane.server.errors import Refused, status_of
from weightplane.transports import collective_layout, pull_wire, shm_ring
from weightplane.transports.base import ArmToken
from weightplane.transports.collective_layout import Large, Tuning, encoded
from weightplane.transports.grpc_wire import encode_chunk
from weightplane.transports.span_cursor import SpanCursor
from weightplane.v1 import common_pb2, transport_pb2, update_pb2

FILE = Path(__file__).parent.parent / "vectors" / "framing.json"

CHUNKS = [(0, 0, 1), (1, 127, 128), (128, 2 << 20, 300), (2**31 - 1, 2**40 + 5, 2), (300, 2**62, 16384)]
ERRORS = {
    "held": (Failure(Reason.TRAINER_HELD, "group 'g' is held by trainer 'é'"), None),
    "of a member": (Failure(Reason.MEMBER_LOST, "replica 'a' is silent", "a", "TRANSFERRING"), None),
    "of an aborted update": (
        Failure(Reason.DIGEST_MISMATCH, "1 tensor differs", "b", "VERIFYING", ("w",), 1),
        update_pb2.UpdateInfo(update_id="u-1", version=7, phase=update_pb2.UPDATE_PHASE_ABORTED),
    ),
}
SHM = [("c-1", "rank/0", "u-1", 3, 5), ("канал " * 40, "rank/11", "u-" + "0" * 30, 2**40, 0)]
#: Tuning (large, pack, slots) and the bytes of a bucket's segments.
STEPS = [
    ((32 << 20, 96 << 20, 2), [3, 280_004, 36_000_000, 4, 31 << 20, 31 << 20, 31 << 20, 31 << 20]),
    ((1000, 300, 2), [16, 17, 1, 299, 999, 1000, 5, *[1000] * 70]),
    ((32 << 20, 4 << 20, 3), [3 << 20, (2 << 20) + 5, 1, 0]),
]
FENCES = [("c-0123456789ab", "u-c7dcc8bd6b588fad119593c5", 3, 5), ("c", 'a "quoted" one', 2**40, 2**62)]
SAMPLES = [("u-1", 0), ("u-1", 5), ("u-1", 40), ("u-2", 40), ("ü", 1000)]


def content() -> dict[str, list[dict[str, Any]]]:
    """What the file holds."""
    chunks = []
    for bucket, offset, nbytes in CHUNKS:
        message = encode_chunk(bucket, offset, SpanCursor([torch.zeros(nbytes, dtype=torch.uint8)]), nbytes)
        chunks.append({"bucket": bucket, "offset": offset, "nbytes": nbytes, "header": message[:-nbytes].hex()})
    errors = []
    for case, (failure, update) in ERRORS.items():
        details = status_of(Refused(failure, update, ended=update is not None)).SerializeToString(deterministic=True)
        row = {"case": case, "details": details.hex(), "reason": str(failure.reason), "message": failure.message}
        errors.append({**row, "member": failure.member, "update_id": update.update_id if update is not None else ""})
    samples = [{"update_id": u, "regions": n, "chosen": sampled_regions(u, n)} for u, n in SAMPLES]
    shm = []
    for channel, sender, update_id, epoch, generation in SHM:
        row = {
            "channel_id": channel,
            "sender": sender,
            "update_id": update_id,
            "epoch": epoch,
            "generation": generation,
        }
        key = bytes(range(32))
        proof = shm_ring._digest(key, 32, "sender", channel, sender).hex()
        name, fence = shm_ring.segment_name(channel, sender), shm_ring.fence_of(update_id, epoch, generation).hex()
        shm.append({**row, "name": name, "fence": fence, "key": key.hex(), "proof": proof})
    pulls = []
    for channel, sender, *_ in SHM:
        hello = transport_pb2.PullHello(channel_id=channel, sender=sender, receiver="ü/0", nonce=bytes(range(32, 64)))
        ours = bytes(range(64, 96))
        shown = {side: pull_wire.proof(bytes(range(32)), side, hello, ours).hex() for side in ("sender", "receiver")}
        nonces = {"key": bytes(range(32)).hex(), "nonce": hello.nonce.hex(), "sender_nonce": ours.hex()}
        pulls.append({"channel_id": channel, "member": sender, "peer": hello.receiver, **nonces, **shown})
    steps = []
    for tuning, sizes in STEPS:
        whole = Bucket(0, "rank/0", ("a/0",), tuple(Segment(i, 0, n) for i, n in enumerate(sizes)), sum(sizes))
        found = [
            {"large": isinstance(s, Large), "parts": [[p.offset, p.nbytes, p.at] for p in s.parts]}
            for s in collective_layout.steps_of(whole, Tuning(*tuning))
        ]
        steps.append({"tuning": list(tuning), "segments": sizes, "steps": found})
    fences = []
    for channel, update_id, epoch, generation in FENCES:
        buckets = [Bucket(n, "rank/0", ("a/0",), (), 2**33 + n) for n in (7, 8)]
        said = collective_layout.fence(channel, ArmToken(update_id, epoch, generation), buckets, Tuning())
        raw = encoded(said).rstrip(b"\0").decode("ascii")
        where = {"channel_id": channel, "update_id": update_id, "epoch": epoch, "generation": generation}
        fences.append({**where, "first": 7, "buckets": 2, "bytes": 2**34 + 15, "text": raw})
    shared = {"chunks": chunks, "errors": errors, "samples": samples, "shm": shm}
    return {**shared, "pulls": pulls, "steps": steps, "fences": fences}


def meaning(details: str) -> list[Any]:
    """What error details say: their bytes may hold a map's entries in any order."""
    status = status_pb2.Status.FromString(bytes.fromhex(details))
    kinds = {
        k.DESCRIPTOR.full_name: k for k in (error_details_pb2.ErrorInfo, common_pb2.Failure, update_pb2.UpdateInfo)
    }
    said = [kinds[any_.TypeName()].FromString(any_.value) for any_ in status.details]
    return [status.code, status.message, *said]


def write() -> None:
    """Write the file from the code as it is: one case a line."""
    parts = []
    for name, rows in content().items():
        lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
        parts.append(f'"{name}": [\n{lines}\n]')
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
