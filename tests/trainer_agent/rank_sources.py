"""What a rank does in the tests of distributed sources; see ``ranks.py``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from weightplane.controlplane.core.placement import Box, Piece, Placement, full_placement
from weightplane.controlplane.core.planner import make_plan
from weightplane.trainer_agent.sources import Source
from weightplane.trainer_agent.sources_dtensor import DTensorSource
from weightplane.trainer_agent.sources_gather import GatherSource
from weightplane.transports.buckets import SourceSpans


class Net(nn.Module):
    """Uneven rows, a tie, a buffer, a wrapper prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.tiny = nn.Parameter(torch.randn(3))  # fewer rows than ranks: one rank's shard is empty
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.5))


def make_net(mesh: Any = None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The sharded module, and its whole values under its plain names."""
    torch.manual_seed(7)
    net = Net()
    whole = {k: v.detach().clone() for k, v in net.state_dict().items()}
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, whole


def send_all(source: Source, rank: int, world_size: int, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Plan from everyone's placement, send this rank's buckets to nobody, and put the regions together on rank 0."""
    manifest = source.manifest()
    ids: list[Any] = [None] * world_size
    dist.all_gather_object(ids, manifest.id)
    assert len(set(ids)) == 1, ids
    rows: list[Any] = [None] * world_size
    dist.all_gather_object(rows, [(p.tensor, p.box) for p in source.placement(rank).pieces])
    placements = [Placement.of(f"rank/{r}", (Piece(i, _box(b)) for i, b in row)) for r, row in enumerate(rows)]
    plan = make_plan(manifest, placements, [full_placement("r/0", manifest)], 64)
    spans = SourceSpans(plan, manifest, f"rank/{rank}", source.tensor)
    mine: list[tuple[int, Box, int, list[int]]] = []
    for bucket in spans.buckets:
        for segment, span in zip(bucket.segments, spans.spans(bucket), strict=True):
            region = plan.regions[segment.region]
            mine.append((region.tensor, region.box, segment.offset, span.tolist()))
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    got = {i: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for i, t in enumerate(manifest)}
    parts: dict[tuple[int, Box], bytearray] = {}
    for part in everyone:
        for tensor, box, _, data in sorted(part):
            parts.setdefault((tensor, _box(box)), bytearray()).extend(data)
    for (tensor, box), data in parts.items():
        view = got[tensor]
        for dim, (start, stop) in enumerate(box):
            view = view.narrow(dim, start, stop - start)
        view.copy_(torch.frombuffer(data, dtype=view.dtype).view(view.shape))
    for i, meta in enumerate(manifest):
        assert torch.equal(got[manifest.root(i)], expected[meta.name]), meta.name
    return {
        "names": [t.name for t in manifest],
        "aliases": {t.name: t.alias_of for t in manifest if t.alias_of},
        "sent": sum(r.nbytes for r in plan.regions if r.sender == f"rank/{rank}"),
        "total": plan.nbytes,
    }


def _box(rows: Any) -> Box:
    return tuple((a, b) for a, b in rows)


def fsdp(rank: int, world_size: int, arguments: dict[str, Any]) -> Any:
    net, whole = make_net()
    return send_all(DTensorSource(net), rank, world_size, whole)


def hsdp(rank: int, world_size: int, arguments: dict[str, Any]) -> Any:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    net, whole = make_net(mesh)
    return send_all(DTensorSource(net), rank, world_size, whole)


def tensor_parallel(rank: int, world_size: int, arguments: dict[str, Any]) -> Any:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(3)
    whole = {
        "both": torch.randn(7, 5),
        "row": torch.randn(5, 3),
        "same": torch.randn(4, 4),
        "nested": torch.randn(9, 2),
    }
    placed = {
        "both": distribute_tensor(whole["both"], mesh, [Shard(0), Shard(1)]),
        "row": distribute_tensor(whole["row"], mesh, [Replicate(), Shard(-2)]),
        "same": distribute_tensor(whole["same"], mesh, [Replicate(), Replicate()]),
        "nested": distribute_tensor(whole["nested"], mesh, [Shard(0), Shard(0)]),
    }
    return send_all(
        DTensorSource(placed, cast=torch.float64), rank, world_size, {k: v.double() for k, v in whole.items()}
    )


def refusals(rank: int, world_size: int, arguments: dict[str, Any]) -> Any:
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (world_size,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    try:
        DTensorSource({"sum": partial}).manifest()
    except ValueError as e:
        return str(e)
    return "accepted"


def gathered(rank: int, world_size: int, arguments: dict[str, Any]) -> Any:
    """FSDP2's full tensors, gathered by the user's own collectives inside the iterator."""
    net, whole = make_net()

    def fn(step: int):
        for name, tensor in net.state_dict().items():
            if name != "head.weight":
                yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    source = GatherSource(fn, aliases={"head.weight": "embed.weight"})
    source.begin(1)
    manifest = source.manifest()
    sends = rank == 0
    got = {}
    for index, local in source.iterate(sends=sends):
        assert (local is not None) == sends
        if local is not None:
            got[manifest.tensors[index].name] = local[0]
    if sends:
        assert all(torch.equal(got[t.name], whole[t.name]) for t in manifest if not t.alias_of)
    return [t.name for t in manifest]


def everything(rank: int, world_size: int, arguments: dict[str, Any]) -> Any:
    """All of the above in one start of the ranks, which costs far more than they do."""
    parts = (fsdp, hsdp, tensor_parallel, refusals, gathered)
    return {part.__name__: part(rank, world_size, arguments) for part in parts}
