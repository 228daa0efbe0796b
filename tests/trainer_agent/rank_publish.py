"""What a rank does in the tests of collective publishes; see ``ranks.py``. The parent holds the fleet.

Ranks and parent meet through files in ``folder``: a rank says ``say("x")``, the parent ``heard("x")``, and back.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.trainer_agent.fleet import fill, hook
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource, Source
from weightplane.trainer_agent.sources_dtensor import DTensorSource
from weightplane.trainer_agent.sources_gather import GatherSource
from weightplane.transports.digest import digest_tensor


class Net(nn.Module):
    """Uneven rows, a tie, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.tiny = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(16, 61, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(()))


def sharded() -> nn.Module:
    net = Net()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return net


def whole(seed: int) -> Net:
    """The values that step ``seed`` publishes, whole."""
    net = Net()
    fill(net, seed)
    return net


def digests(net: nn.Module) -> dict[str, int]:
    return {k: digest_tensor(v) for k, v in net.state_dict().items()}


class Parent:
    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.rank = Path(folder), rank

    def say(self, word: str) -> None:
        (self.folder / word).touch()

    def heard(self, word: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not (self.folder / word).exists():
            assert time.monotonic() < end, f"never heard {word!r}"
            time.sleep(0.01)


def load(net: nn.Module, seed: int) -> None:
    """Put the values of ``seed`` into the shards."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    values = dict(whole(seed).state_dict())
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if isinstance(tensor, DTensor):
                part = distribute_tensor(values[name], tensor.device_mesh, tensor.placements)
                tensor.to_local().copy_(part.to_local())
            else:
                tensor.copy_(values[name])


def gathering(net: nn.Module, before: Callable[[int, str], None] = lambda i, name: None) -> GatherSource:
    """Full tensors by the user's own collectives, on every rank."""

    def fn(step: int) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(net.state_dict().items()):
            before(i, name)
            if name != "head.weight":
                yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    return GatherSource(fn, aliases={"head.weight": "embed.weight"})


def attempt(publish: Callable[[], Any]) -> dict[str, Any]:
    """What a publish came to, and when."""
    try:
        receipt = publish()
    except Exception as e:
        failed = isinstance(e, UpdateFailed)
        return {
            "error": type(e).__name__,
            "text": str(e),
            "at": time.monotonic(),
            "failures": sorted(e.failures) if isinstance(e, UpdateFailed) else [],
            "reason": str(e.reason) if isinstance(e, UpdateFailed) and failed else "",
        }
    return {
        "error": "",
        "at": time.monotonic(),
        "version": receipt.version,
        "ready": sorted(receipt.ready),
        "retries": receipt.retries,
    }


def collective(rank: int, world_size: int, arguments: dict[str, Any]) -> Any:
    """All the scenarios that leave the ranks whole, in one start."""
    parent = Parent(arguments["folder"], rank)
    net = sharded()
    out: dict[str, Any] = {}
    publisher = Publisher(
        arguments["address"],
        "g",
        DTensorSource(net),
        rank=rank,
        world_size=world_size,
        incarnation="job-1",
        transport="shm",
        bucket_bytes=4096,
        heartbeat="stream",
        update_timeout=30,
    )

    def run(name: str, source: Source, step: int, **options: Any) -> None:
        load(net, step)
        publisher.source = source
        out[name] = attempt(lambda: publisher.publish(step, **options))
        print(name, out[name], flush=True)
        dist.barrier()

    shards = DTensorSource(net)
    for step in (1, 2):
        run(f"shards{step}", shards, step)
        if not rank:
            parent.say(f"published{step}")
        parent.heard(f"checked{step}")
    gathers = gathering(net)
    for step in (3, 4):
        run(f"gathers{step}", gathers, step)
        if not rank:
            parent.say(f"published{step}")
        parent.heard(f"checked{step}")
    run("in_place", shards, 5, mode="in_place")

    # one rank's source breaks while it is read: no collective between the ranks, all are in our code
    def breaks(i: int, name: str) -> None:
        if rank == 2 and i == 4:
            out["broke_at"] = time.monotonic()
            raise ArithmeticError("rank 2 lost a shard")

    plain = whole(6)

    def local(step: int) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(plain.state_dict().items()):
            breaks(i, name)
            if name != "head.weight":
                yield name, tensor.clone()

    scanned = GatherSource(local, manifest=shards.manifest())
    run("source_breaks", scanned, 6)

    # one rank cannot even say what it has
    class Mute(ModuleSource):
        def manifest(self) -> Any:
            if rank == 1:
                out["mute_at"] = time.monotonic()
                raise ArithmeticError("rank 1 has no words")
            return super().manifest()

    run("before_start", Mute(plain), 7)
    run("after_that", shards, 8)

    # ranks that are not at the same step
    load(net, 9)
    publisher.source = shards
    out["disagree"] = attempt(lambda: publisher.publish(9 if rank else 10))
    out["disagreed_at"] = time.monotonic()
    dist.barrier()
    run("agree", shards, 11)

    # one rank does not come to the others' collective in time
    def late(i: int, name: str) -> None:
        if rank == 3 and i == 4:
            time.sleep(5.0)

    stuck = gathering(net, late)
    stuck._manifest = shards.manifest()  # no first look: that would be late as well
    began = time.monotonic()
    run("stuck", stuck, 12, update_timeout=3)
    out["stuck_for"] = out["stuck"]["at"] - began
    run("unstuck", gathers, 13)

    # a replica dies in mid-transfer: nobody is left behind in a collective, and a retry goes on without it
    def armed(n: int) -> None:
        if not rank:
            parent.say("kill")
        parent.heard("killed")

    with hook("trainer.update.armed", lambda n: armed(n) if n == 1 else None):
        run("retried", gathers, 14, failure="retry")
    if not rank:
        parent.say("published14")
    parent.heard("checked14")
    publisher.close()
    return out


def killed(rank: int, world_size: int, arguments: dict[str, Any]) -> Any:
    """A rank dies in mid-update."""
    publisher = Publisher(
        arguments["address"],
        "g",
        ModuleSource(whole(20)),
        rank=rank,
        world_size=world_size,
        incarnation="job-2",
        takeover=True,
        transport="shm",
        bucket_bytes=4096,
        heartbeat=arguments["heartbeat"],
        update_timeout=30,
    )
    publisher.init()

    def die(n: int) -> None:
        if rank == 1:
            Path(arguments["folder"], "rank1.json").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    with hook("trainer.finish.before", die):
        result = attempt(lambda: publisher.publish(20))
    publisher.close()
    return result
