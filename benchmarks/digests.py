"""Digests where the weights lie: the GPU's against the card's read bandwidth, a core's against nothing.

``python benchmarks/digests.py --json PATH`` on a host with a card; elsewhere it measures the CPU's alone. Also, because
they share the tensor lists: the mirror that host transports read (against pinned copies), and a staged apply (against
copies within the card). Every digest of the first round is held against the CPU's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from benchmarks._common import GB, SAMPLES, WARM_UPS, Report, Result, parser
from benchmarks._limits import CardLimits, fill
from benchmarks._models import model
from weightplane.controlplane.core.plan import Bucket, Segment
from weightplane.inference_agent.engines.live import Copies
from weightplane.trainer_agent.mirror import Mirror
from weightplane.transports import digest_cuda
from weightplane.transports.digest import digest_bytes, digest_tensor, memory_of
from weightplane.transports.dtypes import as_bytes, dtype_of

_BUCKET = 256 << 20


def rate(nbytes: int, work: Callable[[], object], samples: int, warm_ups: int) -> list[float]:
    """GB/s of each sample."""
    out = []
    for i in range(warm_ups + samples):
        start = time.monotonic()
        work()
        if i >= warm_ups:
            out.append(nbytes / (time.monotonic() - start) / GB)
    return out


def cpu(report: Report, samples: int, warm_ups: int) -> None:
    """One core, 1 GiB."""
    data = torch.empty(1 << 30, dtype=torch.uint8)
    fill(data, 1)
    view = memory_of(data)
    report.add(Result.of("digest, one CPU core", "GB/s", rate(1 << 30, lambda: digest_bytes(view), samples, warm_ups)))


def hashed(report: Report, name: str, flats: Sequence[torch.Tensor], read: float, samples: int, warm_ups: int) -> None:
    """All regions of a model: as a trainer (one launch) and as a replica's read-back (several)."""
    nbytes = sum(f.numel() for f in flats)
    for what, group_bytes in (("one launch", 1 << 62), ("in six", nbytes // 6)):
        groups = digest_cuda.grouped(list(enumerate(flats)), group_bytes)

        def work(groups: list[digest_cuda.RegionGroup] = groups) -> list[int]:
            for group in groups:
                group.start()
            return [value for group in groups for value in group.values()]

        wrong = [i for i, value in enumerate(work()) if i % 37 == 0 and value != digest_tensor(flats[i].cpu())]
        if wrong:
            report.fail(
                f"digest, {name}, {what}", f"{len(wrong)} digests are not the CPU's, first of tensor {wrong[0]}"
            )
            continue
        found = rate(nbytes, work, samples, warm_ups)
        details = {"bytes": nbytes, "tensors": len(flats), "launches": len(groups)}
        report.add(Result.of(f"digest, {name}, {what}", "GB/s", found, read, limit_name="read", details=details))


def mirrored(report: Report, name: str, flats: Sequence[torch.Tensor], pinned: float, samples: int) -> None:
    """The first gigabytes of a model through the trainer's mirror, bucket after bucket, one ahead."""
    buckets: list[tuple[Bucket, list[torch.Tensor]]] = []
    for flat in flats:
        for part in flat.split(_BUCKET):
            if not buckets or sum(p.numel() for p in buckets[-1][1]) + part.numel() > _BUCKET:
                buckets.append((Bucket(len(buckets), "", (), (), 0), []))
            buckets[-1][1].append(part)
    made = []
    for bucket, parts in buckets[:16]:
        n = sum(p.numel() for p in parts)
        made.append((Bucket(bucket.index, "", (), (Segment(0, 0, n),), n), parts))
    mirror = Mirror(_BUCKET, 3)

    def work() -> None:
        mirror.reset()
        for i, (bucket, parts) in enumerate(made):
            mirror.take(bucket, parts)
            if i + 1 < len(made):
                mirror.begin(*made[i + 1])

    nbytes = sum(b.nbytes for b, _ in made)
    found = rate(nbytes, work, samples, 1)
    report.add(Result.of(f"mirror to the host, {name}", "GB/s", found, pinned, limit_name="pinned copy to the host"))


def applied(report: Report, name: str, flats: Sequence[torch.Tensor], near: float, samples: int) -> None:
    """A staged update's copies into live tensors. GB/s of payload."""
    pairs = [(torch.empty_like(f), f) for f in flats]
    copies = Copies(pairs)
    nbytes = sum(f.numel() for f in flats)

    def work() -> None:
        for _ in copies.steps():
            pass

    found = rate(nbytes, work, samples, 2)
    report.add(Result.of(f"staged apply, {name}", "GB/s", found, near, limit_name="copy within the card"))


def main() -> None:
    """See the module's text."""
    options = parser(__doc__ or "")
    options.add_argument("--model", action="append", choices=("dense", "moe", "dense-cpu", "moe-cpu", "tiny"))
    options.add_argument("--leaves", type=int, nargs="*", help="also with these numbers of leaves a program")
    args = options.parse_args()
    samples, warm_ups = (3, 1) if args.quick else (SAMPLES, WARM_UPS)
    cuda = torch.cuda.is_available()
    report = Report("digests", args.json, cuda=cuda)
    cpu(report, samples, warm_ups)
    if not cuda:
        report.write()
        return
    device = torch.device("cuda", 0)
    why = digest_cuda.unusable(device)
    if why:
        report.fail("digest on the card", why)
    card = CardLimits("cuda:0", "cuda:0")

    def limit(name: str, take: Callable[[], dict[str, float]]) -> float:
        found = [s["bytes"] / (s["end"] - s["start"]) / GB for s in (take() for _ in range(5))]
        return report.add(Result.of(name, "GB/s", found)).value

    read, near = limit("read (a reduction)", card.read), limit("copy within the card", card.same_gpu_copy)
    pinned = limit("pinned copy to the host", card.to_host)
    del card
    for name in args.model or ("dense", "moe"):
        tensors = [torch.empty(shape, dtype=dtype_of(d), device=device) for _, d, shape in model(name)]
        flats = [as_bytes(t) for t in tensors]
        for seed, flat in enumerate(flats):
            fill(flat, seed)
        torch.cuda.synchronize()
        for leaves in [digest_cuda._LEAVES, *(args.leaves or ())] if not why else []:
            digest_cuda._LEAVES = leaves
            hashed(report, f"{name}, {leaves} leaves", flats, read, samples, warm_ups)
        digest_cuda._LEAVES = 8
        mirrored(report, name, flats, pinned, samples)
        applied(report, name, flats, near, samples)
        del tensors, flats
        torch.cuda.empty_cache()
    report.write()


if __name__ == "__main__":
    main()
