"""Golden vectors for clients in every language: chunk framing, error details, samples, names in shared memory.

``python -m tests.clients.framing_vectors`` writes them anew (a change of them is a change of the contract).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from google.rpc import error_details_pb2, status_pb2

from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.verify import sampled_regions
from weightplane.controlplane.server.errors import Refused, status_of
from weightplane.transports import shm_ring
from weightplane.transports.grpc_wire import encode_chunk
from weightplane.transports.span_cursor import SpanCursor
from weightplane.v1 import common_pb2, update_pb2

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
    return {"chunks": chunks, "errors": errors, "samples": samples, "shm": shm}


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
