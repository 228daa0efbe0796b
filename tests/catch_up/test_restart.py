"""The control plane is killed and comes back: what was committed can still be proven, so joiners need no publish."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.catch_up.test_catch_up import eventually, model, ready
from tests.cli.checkpoints import tiny
from tests.cli.fleet import ROOT, Launched, weightplane
from tests.cli.site import GROUP, Site, engine_of
from tests.trainer_agent.fleet import fill, fleet, same
from weightplane.controlplane.core.states import Verify, Weights
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.transports.dtypes import as_bytes
from weightplane.transports.retained import MEMORY, Retainer

pytestmark = pytest.mark.chaos


class Plane:
    """A control plane on one port over one SQLite file, killed and started as often as you like."""

    def __init__(self, folder: Path) -> None:
        self.launched = Launched(folder)
        self.store = folder / "store.db"
        self.address = "127.0.0.1:0"
        self.start()
        self.site = Site(self.launched, self.address, tiny(folder / "one.safetensors", 1.0))

    def start(self, failpoints: str = "") -> None:
        words = ["controlplane", "--listen", self.address, "--store", f"sqlite:{self.store}"]
        (self.launched.folder / "plane.json").unlink(missing_ok=True)
        env = {"WEIGHTPLANE_FAILPOINTS": failpoints}
        facts = self.launched.start("plane", *words, "--beat", "0.5", "--ttl", "3", env=env)
        self.address = facts["address"]

    def died(self) -> None:
        assert self.launched.processes["plane"].wait(60) == -9

    def kill(self) -> None:
        self.launched.processes["plane"].kill()
        self.died()

    def replica(self, name: str, *options: str) -> None:
        (self.launched.folder / f"{name}.json").unlink(missing_ok=True)
        (self.launched.folder / name).mkdir(exist_ok=True)
        words = ["inference-agent", "-a", self.address, "-g", GROUP, "--replica-id", name, *options]
        dump = f'--engine-option=dump="{self.launched.folder / name}"'
        self.launched.start(name, *words, *engine_of(self.site.checkpoint), dump)

    def told(self, name: str) -> dict[str, Any]:
        replicas = self.site.json("status", "-g", GROUP)["replicas"]
        return next((r for r in replicas if r["replica_id"] == name), {})

    def wait(self, name: str, version: int) -> None:
        """Until ``name`` is READY at ``version``."""

        def there() -> bool:
            r = self.told(name)
            return bool(r.get("weights", "").endswith("READY") and r.get("held", {}).get("version") == str(version))

        self.until(there, name)

    def until(self, look: Any, name: str) -> None:
        end = time.monotonic() + 60
        while not look():
            logs = f"{self.launched.log('plane')[-6000:]}\n{self.launched.log(name)[-3000:]}"
            assert time.monotonic() < end, f"{self.told(name)}\n{logs}"
            time.sleep(0.05)

    def holds(self, name: str, value: float) -> None:
        """The live bytes of ``name`` are those of a checkpoint filled with ``value``."""
        found = {p.name: p.read_bytes() for p in (self.launched.folder / name).iterdir()}
        weight = bytes(as_bytes(torch.full((8, 8), value)).tolist())
        bias = bytes(as_bytes(torch.full((8,), value, dtype=torch.bfloat16)).tolist())
        assert found == {"layers.0.weight": weight, "layers.1.weight": weight, "head.bias": bias}

    def publish(self, checkpoint: Path | None = None, step: str = "1", *more: str) -> None:
        self.site.run("publish", str(checkpoint or self.site.checkpoint), "-g", GROUP, "--step", step, *more)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    yield made
    made.launched.stop()


def test_only_a_peer_holds_a_copy_and_the_trainer_is_gone(plane: Plane) -> None:
    plane.replica("a", "--retain", "memory")
    plane.publish()
    plane.kill()
    plane.start()
    plane.replica("late")
    plane.wait("late", 1)
    plane.holds("late", 1.0)
    plane.kill()  # again, with nothing published in between
    plane.start()
    plane.replica("later")
    plane.wait("later", 1)


def test_only_the_trainer_holds_a_copy(plane: Plane) -> None:
    plane.replica("a")
    command = [sys.executable, "-m", "tests.catch_up.retaining_trainer", plane.address, GROUP]
    with warm.Popen(
        [*command, str(plane.site.checkpoint)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdin is not None
        assert trainer.stdout.readline() == "published 1\n"
        plane.kill()
        plane.start()
        plane.replica("late")
        plane.wait("late", 1)
        plane.holds("late", 1.0)
        trainer.stdin.close()
        assert trainer.wait(30) == 0


@pytest.mark.parametrize(
    ("point", "committed"),
    [
        ("store.decide.during", 1),
        ("store.decide.after", 2),
        ("server.decide.after_write", 2),
        ("server.close.before_write", 2),
    ],
)
def test_killed_around_the_decision(point: str, committed: int, plane: Plane, tmp_path: Path) -> None:
    """What proves the version is there exactly if the version is decided."""
    plane.replica("a", "--retain", "memory")
    plane.publish()
    plane.kill()
    plane.start(f"{point}=kill")
    two = tiny(tmp_path / "two.safetensors", 2.0)
    words = ["publish", str(two), "-g", GROUP, "--step", "2", "-a", plane.address]
    publishing = threading.Thread(target=weightplane, args=words)
    publishing.start()
    plane.died()
    plane.start()
    publishing.join(60)
    plane.wait("a", committed)
    plane.replica("late")
    plane.wait("late", committed)
    plane.holds("late", float(committed))
    # Whoever published 2 gave the group up, or could not: with --takeover its lease does not matter.
    plane.publish(tiny(tmp_path / "three.safetensors", 3.0), "3", "--takeover")
    for name in ("a", "late"):
        plane.holds(name, 3.0)


def test_damaged_digests_are_named_never_used_and_healed_by_the_next_publish(plane: Plane, tmp_path: Path) -> None:
    plane.replica("a", "--retain", "memory")
    plane.publish()
    plane.kill()
    with sqlite3.connect(plane.store) as db:
        (digests,) = db.execute("SELECT digests FROM kept").fetchone()
        db.execute("UPDATE kept SET digests = ?", (bytes([digests[0] ^ 1]) + digests[1:],))
    db.close()
    plane.start()
    plane.replica("late")
    plane.until(lambda: plane.told("late").get("catch_up"), "late")
    told = plane.told("late")
    assert "the stored digests of version 1 (update u-" in told["catch_up"]
    assert "are damaged: they do not match their seal" in told["catch_up"]
    assert told["weights"].endswith("JOINING") and not os.listdir(tmp_path / "late")
    assert "are damaged: they do not match their seal" in plane.launched.log("plane")
    plane.publish(tiny(tmp_path / "two.safetensors", 2.0), "2")
    plane.holds("late", 2.0)
    assert not plane.told("late").get("catch_up")
    plane.kill()
    plane.start()
    plane.replica("later")
    plane.wait("later", 2)
    plane.holds("later", 2.0)


# --- in one process: every kind of holder, and what was hashed


@pytest.mark.parametrize("holder", ["peer", "trainer"])
@pytest.mark.parametrize("verify", [Verify.FULL, Verify.SAMPLED])
def test_a_copy_that_outlives_the_coordinator_is_compared_with_what_was_stored(holder: str, verify: Verify) -> None:
    trained = model(1)
    with fleet() as f:
        retainer = Retainer()
        f.replica("a", TorchModuleEngine(model(2)), retain=retainer if holder == "peer" else None)
        options = {"heartbeat": "helper", "retain": MEMORY} if holder == "trainer" else {}
        publisher = f.publisher(trained, **options)
        publisher.publish(1, verify=verify.lower())
        f.plane.stop()
        copy = retainer.get() if holder == "peer" else publisher._keeping._retainer.get()  # type: ignore[union-attr]
        assert copy is not None
        [(weight, _)] = copy.locals("a/0" if holder == "peer" else "rank/0")[0]
        weight[0, 0] += 1  # while nobody looks, the copy becomes another
        f.plane.start()
        engine = TorchModuleEngine(model(3))
        f.replica("b", engine)
        eventually(lambda: f.state().replicas["b"].catch_ups_failed > 0, what="b is not caught up")
        assert "DIGEST_MISMATCH" in f.state().replicas["b"].catch_up_refusal
        assert f.state().replicas["b"].weights is Weights.JOINING
        weight[0, 0] -= 1
        eventually(lambda: ready(f, "b"), what="b is caught up at the next try")
        assert same(engine, trained)
        fill(trained, 5)
        publisher.publish(2)
        assert same(engine, trained) and f.state().replicas["b"].held.version == 2


def test_the_next_life_of_a_holder_says_where_its_copy_is() -> None:
    with fleet() as f:
        f.replica("a", TorchModuleEngine(model(2)), retain=Retainer())
        f.publisher(model(1)).publish(1)
        f.agents["a"].engine_restarted("its process died, and came back")
        eventually(lambda: ready(f, "a") or f.state().replicas["a"].placements, what="a is back")
        f.replica("b", TorchModuleEngine(model(3)))
        eventually(lambda: ready(f, "b"), what="b is caught up")


def test_a_publish_is_three_writes_as_it_was_before_anything_was_kept() -> None:
    with fleet() as f:
        f.replica("a", TorchModuleEngine(model(2)), retain=Retainer())
        publisher = f.publisher(model(1))
        publisher.init()
        seen: list[str] = []
        store = f.plane.running.coordinator.store
        store.delay = lambda kind, when: seen.append(kind) if when == "after" else None  # type: ignore[attr-defined]
        for step in (1, 2, 3):
            publisher.publish(step)
            eventually(partial(seen.__contains__, "close"), what="the end is written down")
            assert seen == ["freeze", "decide", "close"]
            seen.clear()
