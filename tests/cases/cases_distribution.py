"""Distribution: several ranks, several workers, replicas beside each other; each gets its own share, or is told why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.cases.base import MOVERS, Site, Small, bits, case, check, differing, holds, must, refused, site, soon
from tests.cases.wires import WIRES
from tests.trainer_agent.fleet import fill
from tests.transports.collective_tcp import TcpRuntime
from weightplane.controlplane.core.manifest import ManifestError
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.sharding import cut, shard_module
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent import naming
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.receipt import PublishReceipt
from weightplane.trainer_agent.sources import Source, StateDictSource
from weightplane.trainer_agent.sources_gather import GatherSource


def ranks_of(f: Site, sources: Sequence[Source], **options: Any) -> list[Publisher]:
    """The ranks of one trainer, each with its source."""
    options.setdefault("incarnation", "job")
    options.setdefault("trainer_id", "trainer")
    return [f.publisher(s, rank=r, world_size=len(sources), **options) for r, s in enumerate(sources)]


def publish_all(ranks: Sequence[Publisher], step: int, **options: Any) -> list[PublishReceipt]:
    """All ranks publish at once; raises the first rank's error after all have ended."""
    handles = [p.publish_async(step, **options) for p in ranks]
    errors = [h._future.exception(60) for h in handles]
    for error in errors:
        if error is not None:
            raise error
    return [h.result() for h in handles]


class Rows(nn.Module):
    """Values encode the row: row i of the matrix is i, or what is added to it."""

    def __init__(self, rows: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 96), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(rows), requires_grad=False)

    def become(self, base: float) -> None:
        rows = torch.arange(len(self.bias)) + base
        self.bias.copy_(rows)
        self.weight.copy_(rows[:, None].expand_as(self.weight))


def sharded(rows: Rows, workers: int) -> TorchModuleEngine:
    return TorchModuleEngine(shard_module(rows, workers), boxes=cut(workers))


def own_rows(engine: TorchModuleEngine, rows: Rows) -> list[str]:
    """Which workers' parameters do not hold their own share of the source."""
    wrong = []
    for name, whole in rows.named_parameters():
        shares = whole.chunk(len(engine.modules))
        for w, (module, share) in enumerate(zip(engine.modules, shares, strict=True)):
            if not torch.equal(module.get_parameter(name), share):
                wrong.append(f"worker {w}: {name}")
    return wrong


@case
def D01_gathers_inside_the_send_loop_complete_with_exact_values() -> None:
    world, module = 4, Small()
    store = dist.HashStore()  # type: ignore[attr-defined]
    shapes = {n: t.shape for n, t in module.state_dict().items()}

    def gather_of(rank: int, group: Any) -> Callable[[int], Iterator[tuple[str, torch.Tensor]]]:
        """An all-gather among the ranks for every tensor, into memory that is used again."""
        outs = {
            size: [torch.empty(size // world) for _ in range(world)] for size in {s.numel() for s in shapes.values()}
        }

        def fn(step: int) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in module.state_dict().items():
                out = outs[tensor.numel()]
                mine = tensor.detach().reshape(-1).chunk(world)[rank].clone()
                group.allgather([out], [mine]).wait()
                yield name, torch.cat(out).view(shapes[name])
                for part in out:
                    part.fill_(-1)

        return fn

    with site("r0") as f:
        groups: list[Any] = [None] * world

        def join(rank: int) -> None:
            groups[rank] = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=8))

        joining = [threading.Thread(target=join, args=(r,)) for r in range(world)]
        for thread in joining:
            thread.start()
        for thread in joining:
            thread.join()
        for step, transport in enumerate(MOVERS, 1):
            fill(module, step)
            sources = [GatherSource(gather_of(r, g)) for r, g in enumerate(groups)]
            ranks = ranks_of(f, sources, transport=transport, incarnation=f"job {transport}", update_timeout=15)
            with must(f"all ranks complete over {transport}"):
                publish_all(ranks, step)
            wrong = differing(bits(f.engines["r0"].modules[0]), bits(module))
            check(f"the values are exact over {transport}", not wrong, wrong)
            for p in ranks:
                p.close()


@case
def D04_every_worker_of_every_replica_takes_the_payload_of_its_own_identity() -> None:
    rows = Rows()
    with site() as f:
        for name in ("r0", "r1"):
            f.replica(name, sharded(rows, 2))
        for step, transport in enumerate(MOVERS, 1):
            rows.become(100 * step)
            with f.publisher(rows, transport=transport) as publisher:
                with must(f"the update commits over {transport}"):
                    publisher.publish(step)
            wrong = [f"{n}: {w}" for n, e in f.engines.items() for w in own_rows(e, rows)]
            check(f"each worker holds its own payload over {transport}", not wrong, wrong)
        e = refused(
            "a replica without an identity is an error",
            lambda: InferenceAgent(f.address, "g", "", TorchModuleEngine(Rows())),
            ValueError,
        )
        check("and told so", "replica_id" in str(e), e)


def _expert_halves(experts: int = 6) -> list[dict[str, torch.Tensor]]:
    every = {f"experts.{i}.weight": torch.randn(24, 32) for i in range(experts)}
    names = list(every)
    return [{n: every[n] for n in names[r::2]} for r in range(2)]


def _experts(experts: int = 6) -> nn.Module:
    module = nn.Module()
    module.experts = nn.ModuleList(nn.Linear(32, 24, bias=False) for _ in range(experts))
    return module


@case
def D07_the_union_of_what_two_ranks_hold_is_delivered_and_a_missing_half_is_named() -> None:
    halves = _expert_halves()
    whole = naming.merge_manifests(StateDictSource(h).manifest() for h in halves)
    with site("r0", make=_experts) as f:
        live = f.engines["r0"].modules[0]
        for step, transport in enumerate(MOVERS, 1):
            for half in halves:
                for tensor in half.values():
                    tensor.add_(step)
            sources = [StateDictSource(h, manifest=whole) for h in halves]
            ranks = ranks_of(f, sources, transport=transport, incarnation=f"job {transport}")
            with must(f"the update commits over {transport}"):
                publish_all(ranks, step)
            wrong = [n for h in halves for n, t in h.items() if not torch.equal(live.get_parameter(n), t)]
            check(f"the union is delivered over {transport}", not wrong, wrong)
            for p in ranks:
                p.close()
        before = bits(live)
        ranks = ranks_of(f, [StateDictSource(halves[0], manifest=whole) for _ in range(2)], incarnation="job half")
        e = refused("a missing half is an error", lambda: publish_all(ranks, 9, update_timeout=10), UpdateFailed)
        check("what is missing is named", all(n in str(e) for n in halves[1]), e)
        check("nothing was written", not differing(before, bits(live)))


@case
def D08_names_that_two_stages_both_use_are_an_error() -> None:
    stages = [{f"layers.{i}.weight": torch.full((24, 32), 10.0 * s + i) for i in range(2)} for s in range(2)]

    def make() -> nn.Module:
        module = nn.Module()
        module.layers = nn.ModuleList(nn.Linear(32, 24, bias=False) for _ in range(4))
        return module

    parts = [StateDictSource(s).manifest() for s in stages]
    e = refused("a name of two ranks is refused", lambda: naming.merge_manifests(parts), ManifestError)
    check("name and ranks are named", "'layers.0.weight' is declared by part 0 and by part 1" in str(e), e)
    with site("r0", make=make) as f:
        live = f.engines["r0"].modules[0]
        before = bits(live)
        ranks = ranks_of(f, [StateDictSource(s) for s in stages], incarnation="job local")
        e = refused("local numbers are refused", lambda: publish_all(ranks, 1, update_timeout=10), UpdateFailed)
        check("the layers that nobody sends are named", "2 missing" in str(e) and "layers.3.weight" in str(e), e)
        check("nothing was written", not differing(before, bits(live)))
        for p in ranks:
            p.close()
        globally = [
            {f"layers.{2 * s + i}.weight": t for i, t in enumerate(stage.values())} for s, stage in enumerate(stages)
        ]
        whole = naming.merge_manifests(StateDictSource(g).manifest() for g in globally)
        ranks = ranks_of(f, [StateDictSource(g, manifest=whole) for g in globally], incarnation="job global")
        with must("global numbers commit"):
            publish_all(ranks, 2)
        wrong = [n for g in globally for n, t in g.items() if not torch.equal(live.get_parameter(n), t)]
        check("each layer holds its own values", not wrong, wrong)


@case
def D09_ranks_that_come_in_opposite_orders_both_get_their_init() -> None:
    module = Small()
    with site("r0", "r1") as f:
        for step, order in enumerate(((0, 1), (1, 0)), 1):
            fill(module, step)
            sources = [StateDictSource(dict(module.state_dict())) for _ in range(2)]
            ranks = ranks_of(f, sources, init_timeout=5, incarnation=f"job {step}")
            errors: list[BaseException] = []

            def init(rank: Publisher, errors: list[BaseException] = errors) -> None:
                try:
                    rank.init()
                except Exception as error:
                    errors.append(error)

            first, second = (threading.Thread(target=init, args=(ranks[r],)) for r in order)
            first.start()
            arrived = f"the init of rank {order[0]} arrives first"
            soon(arrived, lambda n=f"job {step}": (t := f.state().trainer) is not None and t.incarnation == n)  # type: ignore[misc]
            second.start()
            for thread in (first, second):
                thread.join(20)
            check(f"both inits succeed in the order {order}", not errors, errors)
            with must("the update commits"):
                publish_all(ranks, step)
            check("every receiver holds it", all(holds(e, module) for e in f.engines.values()))
            for p in ranks:
                p.close()


@case
def D11_four_workers_hold_their_own_rows_and_together_the_source() -> None:
    rows = Rows()
    with site() as f:
        engine = sharded(rows, 4)
        f.replica("r0", engine)
        for step, transport in enumerate(MOVERS, 1):
            rows.become(100 * step)
            with f.publisher(rows, transport=transport) as publisher:
                with must(f"the update commits over {transport}"):
                    publisher.publish(step)
            wrong = own_rows(engine, rows)
            check(f"each worker holds its own rows over {transport}", not wrong, wrong)
            whole = torch.cat([m.get_parameter("weight") for m in engine.modules])
            check(f"the shards are the source over {transport}", torch.equal(whole, rows.weight))


@case
def D12_ranks_are_unique_and_contiguous_over_replicas_and_workers() -> None:
    """Two replicas of two workers and one trainer make one communicator of five. ``nccl``'s own code, over sockets."""
    rows, seen = Rows(), []
    connect = TcpRuntime.connect

    def noting(self: Any, unique_id: bytes, rank: int, senders: int, receivers: int, *rest: Any) -> Any:
        seen.append((rank, senders + receivers))
        return connect(self, unique_id, rank, senders, receivers, *rest)

    with pytest.MonkeyPatch.context() as m, WIRES["nccl-host"].here(), site() as f:
        m.setattr(TcpRuntime, "connect", noting)
        for name in ("r0", "r1"):
            f.replica(name, sharded(rows, 2))
        with f.publisher(rows, transport="nccl", update_timeout=6) as publisher:
            for step in (1, 2):
                rows.become(100 * step)
                with must("everybody connects"):
                    publisher.publish(step)
                check("ranks are 0 to 4 in a world of 5", sorted(seen) == [(r, 5) for r in range(5)], sorted(seen))
                wrong = [f"{n}: {w}" for n, e in f.engines.items() for w in own_rows(e, rows)]
                check("each worker holds its own rows", not wrong, wrong)
