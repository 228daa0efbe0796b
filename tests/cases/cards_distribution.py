"""Distribution over wires: each worker its own share; one GPU twice is refused at init."""

from __future__ import annotations

import time

from tests.cases.base import Small, check, refused, soon
from tests.cases.cards import cards, on, on_sender
from tests.cases.cases_distribution import Rows, _expert_halves, publish_all, ranks_of
from tests.cases.wires import Wire, one_card
from weightplane.trainer_agent import naming
from weightplane.trainer_agent.errors import PublishError
from weightplane.trainer_agent.sources import StateDictSource

HERE_ONLY = ("nccl-across",)  # every member needs a GPU of its own: more than two cards


@on(but=HERE_ONLY)
def D04_every_worker_of_every_replica_takes_the_payload_of_its_own_identity(w: Wire) -> None:
    rows = on_sender(w, Rows())
    with cards(w) as c:
        for name in ("r0", "r1"):
            c.join(name, "rows", workers=2)
        publisher = c.publisher(rows)
        for step in (1, 2):
            rows.become(100 * step)
            c.commits("the update commits", publisher, step)
            wrong = [f"{n}: {x}" for n in ("r0", "r1") for x in c.twin.do("own", name=n, base=100 * step)]
            check("each worker holds its own payload", not wrong, wrong)


@on(but=HERE_ONLY)
def D11_four_workers_hold_their_own_rows(w: Wire) -> None:
    rows = on_sender(w, Rows())
    with cards(w) as c:
        c.join("r0", "rows", workers=4)
        publisher = c.publisher(rows)
        for step in (1, 2):
            rows.become(100 * step)
            c.commits("the update commits", publisher, step)
            wrong = c.twin.do("own", name="r0", base=100 * step)
            check("each worker holds its own rows", not wrong, wrong)


@on(but=HERE_ONLY)
def D07_the_union_of_what_two_ranks_hold_is_delivered(w: Wire) -> None:
    halves = [{n: t.to(w.sender) for n, t in half.items()} for half in _expert_halves()]
    whole = naming.merge_manifests(StateDictSource(h).manifest() for h in halves)
    with cards(w, "experts") as c:
        for step in (1, 2):
            for half in halves:
                for tensor in half.values():
                    tensor.add_(step)
            sources = [StateDictSource(h, manifest=whole) for h in halves]
            ranks = ranks_of(c, sources, transport=w.transport, incarnation=f"job {step}")
            try:
                publish_all(ranks, step)
            except PublishError as e:
                check("the union is delivered", False, e)
            c.exact("the union is delivered", {**halves[0], **halves[1]})
            for p in ranks:
                p.close()


@on("nccl", but=("nccl-across",))
def D05_one_gpu_twice_is_refused_with_the_advice(w: Wire) -> None:
    """On the host both offer one card's UUID; on a GPU trainer and replica are on GPU 0. The library is never asked."""
    with one_card(), cards(w, "small", shared_card=True) as c:
        module = on_sender(w, Small(1))
        publisher = c.publisher(module, update_timeout=8)
        began = time.monotonic()
        e = refused("one GPU twice is refused", lambda: publisher.publish(1), PublishError)
        check("one GPU twice is refused with the advice", "use cuda_ipc" in str(e), e)
        check("one GPU twice is refused at once", time.monotonic() - began < 4, time.monotonic() - began)
        soon("nobody waits for it", lambda: c.state().open is None, 5)
