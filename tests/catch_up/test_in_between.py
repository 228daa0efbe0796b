"""What comes in between: a publish, a death, a restart, too few replicas, a layout that nobody hashed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.catch_up.test_catch_up import committed, eventually, model, ready
from tests.trainer_agent.fleet import Fleet, fill, fleet, hook, same
from weightplane.controlplane import failpoints
from weightplane.controlplane.core.placement import Box
from weightplane.controlplane.core.states import Verify, Weights
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.transports.retained import Retainer

WIDE = 2048  # 16 MiB: more buckets than one


def big(seed: int) -> nn.Module:
    made = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3))
    fill(made, seed)
    return made


class Held:
    """Stands in the way of a catch-up's n-th bucket until told to let go."""

    def __init__(self, nth: int) -> None:
        self.nth, self.there, self.go = nth, threading.Event(), threading.Event()

    def __call__(self, n: int) -> None:
        if n == self.nth:
            self.there.set()
            assert self.go.wait(40)


def begin(f: Fleet, held: Held, join: Callable[[], object]) -> None:
    """``join`` makes somebody be caught up; returns once the catch-up stands before the bucket."""
    join()
    assert held.there.wait(40)
    assert len(f.state().catch_ups) == 1


def test_a_publish_goes_first_and_the_catch_up_goes_on_after_it() -> None:
    trained = big(1)
    held = Held(2)
    with fleet() as f, hook("serve.bucket", held):
        f.replica("a", TorchModuleEngine(big(2)), retain=Retainer())
        publisher = f.publisher(trained, bucket_bytes=0)
        publisher.publish(1)
        engine = TorchModuleEngine(big(3))
        begin(f, held, lambda: f.replica("b", engine))
        old = {k: v.clone() for k, v in trained.state_dict().items()}
        fill(trained, 5)
        assert publisher.publish(2).absent == {"b": "it is being caught up to version 1"}
        held.go.set()
        eventually(lambda: f.state().replicas["b"].held.version >= 1, what="b is caught up to version 1")
        eventually(lambda: ready(f, "b"), what="b is caught up to version 2")
        assert same(engine, trained) and not torch.equal(old["0.weight"], trained.state_dict()["0.weight"])
        fill(trained, 6)
        assert not publisher.publish(3).absent
        assert same(engine, trained)


def test_a_damaged_copy_is_never_applied_and_the_next_holder_is_asked() -> None:
    trained = model(1)
    kept = Retainer()
    with fleet() as f:
        f.replica("a", TorchModuleEngine(model(2)), retain=kept)
        f.replica("b", TorchModuleEngine(model(3)), retain=Retainer())
        f.publisher(trained).publish(1)
        eventually(lambda: all(f.state().replicas[r].retained is not None for r in "ab"), what="both retain version 1")
        copy = kept.get()
        assert copy is not None
        for of_worker in (copy.locals(member) for member in copy.members):
            for tensor, _ in (held for root in of_worker.values() for held in root):
                tensor.add_(1.0)
        engine = TorchModuleEngine(model(4))
        f.replica("c", engine)
        eventually(lambda: "DIGEST_MISMATCH" in f.state().replicas["c"].catch_up_refusal, what="a's copy is refused")
        assert f.state().replicas["c"].weights is Weights.JOINING
        eventually(lambda: ready(f, "c"), what="c is caught up from b")
        assert same(engine, trained)


def test_no_bucket_is_begun_while_an_update_is_on_its_way() -> None:
    trained = big(1)
    begun, started = threading.Event(), threading.Event()
    phases: list[str] = []
    with fleet() as f:

        def on(name: str, n: int) -> None:
            if name == "serve.bucket" and n == 1:
                begun.set()
                assert started.wait(40)
            elif name == "serve.bucket":
                u = f.state().open
                phases.append(u.phase if u is not None else "NONE")
            elif name == "trainer.start.after":
                started.set()  # every participant has joined, and with it the holder was told to hold back

        f.replica("a", TorchModuleEngine(big(2)), retain=Retainer())
        publisher = f.publisher(trained, bucket_bytes=0)
        publisher.publish(1)
        failpoints.set_hook(on)
        try:
            f.replica("b", TorchModuleEngine(big(3)))
            assert begun.wait(40)
            publisher.publish(2)
            eventually(lambda: ready(f, "b"), what="b is caught up")
        finally:
            failpoints.set_hook(None)
    assert len(phases) >= 2 and set(phases) <= {"NONE", "COMMITTED"}, phases


def test_where_too_few_are_left_the_update_takes_it_along() -> None:
    trained = big(1)
    held = Held(2)
    with fleet() as f, hook("serve.bucket", held):
        engine = TorchModuleEngine(big(3))
        agent = f.replica("a", engine)
        publisher = f.publisher(trained, bucket_bytes=0, heartbeat="helper", retain="memory")
        publisher.publish(1)
        agent.stop()
        begin(f, held, lambda: f.replica("b", TorchModuleEngine(big(2))))
        fill(trained, 5)
        done = threading.Thread(target=publisher.publish, args=(2,))
        done.start()
        eventually(lambda: not f.state().catch_ups, what="the catch-up is given up for the update")
        held.go.set()
        done.join(40)
        assert ready(f, "b") and f.state().replicas["b"].held.version == 2
        assert same(f.engines["b"], trained)


@pytest.mark.parametrize("who", ["holder", "joiner"])
def test_who_dies_in_between_hurts_nobody_else(who: str) -> None:
    trained = big(1)
    held = Held(2)
    with fleet() as f, hook("serve.bucket", held):
        f.replica("a", TorchModuleEngine(big(2)), retain=Retainer())
        f.replica("c", TorchModuleEngine(big(4)), retain=Retainer())
        publisher = f.publisher(trained, bucket_bytes=0)
        publisher.publish(1)
        engine = TorchModuleEngine(big(3))
        begin(f, held, lambda: f.replica("b", engine))
        [catch_up] = f.state().catch_ups.values()
        dead = catch_up.holder if who == "holder" else "b"
        f.agents[dead].engine_restarted("its process died, and came back")
        held.go.set()
        if who == "holder":
            other = "c" if dead == "a" else "a"
            eventually(lambda: ready(f, "b"), what=f"b is caught up by {other}")
        else:
            eventually(lambda: ready(f, "b"), what="the next life of b is caught up")
        assert same(engine, trained)
        fill(trained, 5)
        assert not publisher.publish(2).absent
        assert all(same(e, trained) for e in f.engines.values())


def test_a_coordinator_that_restarts_leaves_the_joiner_whole_and_begins_anew() -> None:
    trained = big(1)
    held = Held(2)
    with fleet() as f, hook("serve.bucket", held):
        f.replica("a", TorchModuleEngine(big(2)), retain=Retainer())
        publisher = f.publisher(trained, bucket_bytes=0)
        publisher.publish(1)
        engine = TorchModuleEngine(big(3))
        begin(f, held, lambda: f.replica("b", engine))
        f.plane.stop()
        held.go.set()
        f.plane.start()
        eventually(lambda: ready(f, "b"), what="b is caught up by the coordinator's next life")
        assert same(engine, trained) and f.state().replicas["b"].held.version == 1
        fill(trained, 5)
        assert not publisher.publish(2).absent
        assert ready(f, "a") and ready(f, "b") and same(engine, trained)


@pytest.mark.parametrize(("verify", "caught"), [(Verify.SAMPLED, True), (Verify.OFF, False)])
def test_what_was_never_hashed_is_not_caught_up(verify: Verify, caught: bool) -> None:
    with fleet() as f:
        f.replica("a", TorchModuleEngine(model(2)), retain=Retainer())
        f.publisher(model(1)).publish(1, verify=verify.lower())
        f.replica("b", TorchModuleEngine(model(3)))
        if caught:
            eventually(lambda: ready(f, "b"), what="b is caught up")
        else:
            eventually(lambda: f.state().replicas["b"].catch_up_refusal, what="b is told why not")
            told = f.state().replicas["b"].catch_up_refusal
            assert "DIGESTS_REQUIRED" in told and "The next full update takes the replica along" in told


def halves(worker_count: int) -> Callable[..., Box]:
    """Rows cut evenly over the workers."""

    def box(meta: object, worker: int) -> Box:
        shape = tuple(getattr(meta, "shape"))  # noqa: B009
        step = -(-shape[0] // worker_count)
        first = (worker * step, min(shape[0], (worker + 1) * step))
        return (first, *((0, d) for d in shape[1:]))

    return box


def cut(seed: int, workers: int, width: int = 64) -> TorchModuleEngine:
    """An engine of several workers, each with its rows of one layer."""
    rows = [-(-width // workers)] * workers
    modules = [nn.Sequential(nn.Linear(width, r)) for r in rows]
    for m in modules:
        fill(m, seed)
    return TorchModuleEngine(modules, boxes=halves(workers))


@pytest.mark.parametrize("source", ["peer", "trainer"])
def test_workers_with_shards_are_caught_up_from_equal_shards_or_whole_tensors(source: str) -> None:
    trained = nn.Sequential(nn.Linear(64, 64))
    fill(trained, 1)
    with fleet() as f:
        f.replica("a", cut(2, 2), retain=Retainer() if source == "peer" else None)
        options = {"heartbeat": "helper", "retain": "memory"} if source == "trainer" else {}
        f.publisher(trained, **options).publish(1)
        engine = cut(3, 2)
        f.replica("b", engine)
        eventually(lambda: ready(f, "b"), what="b is caught up")
        rows = torch.cat([m.state_dict()["0.weight"] for m in engine.modules])
        assert torch.equal(rows, trained.state_dict()["0.weight"])


def test_a_layout_that_was_not_in_the_update_waits_for_the_next_one() -> None:
    trained = nn.Sequential(nn.Linear(64, 64))
    fill(trained, 1)
    with fleet() as f:
        f.replica("a", cut(2, 1), retain=Retainer())
        publisher = f.publisher(trained)
        publisher.publish(1)
        f.replica("b", cut(3, 2))
        eventually(lambda: f.state().replicas["b"].catch_up_refusal, what="b is told why not")
        assert "'0.weight', box" in f.state().replicas["b"].catch_up_refusal
        publisher.publish(2)
        assert ready(f, "b") and committed(f).version == 2
