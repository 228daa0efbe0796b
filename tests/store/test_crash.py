"""kill -9 at every boundary of every write: no decision is lost, none invented, no version or generation reused."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.store.helpers import GROUP
from weightplane.controlplane.core import kept as core
from weightplane.controlplane.core.states import Phase
from weightplane.controlplane.store.sqlite import SqliteStore

REPO = Path(__file__).resolve().parents[2]
KINDS = ("open", "group", "roster", "freeze", "decide", "close")
POINTS = [f"store.{kind}.{when}" for kind, when in itertools.product(KINDS, ("before", "during", "after"))]


class Ledger:
    """Everything that the children of one store ever said."""

    def __init__(self) -> None:
        self.tried: dict[str, set[str]] = {"freeze": set(), "decide": set(), "group": set()}
        self.done: dict[str, list[str]] = {k: [] for k in KINDS}
        self.epochs: list[int] = []

    def read(self, text: str) -> None:
        for line in text.splitlines():
            word, kind, what = line.split()
            if word == "epoch":
                self.epochs.append(int(what))
            elif word == "try":
                self.tried[kind].add(what)
            else:
                self.done[kind].append(what)

    def check(self, path: Path) -> None:
        """Open as the successor, compare, and count that epoch in."""
        store = SqliteStore(path)
        loaded = store.open()
        self.epochs.append(loaded.epoch)
        assert self.epochs == sorted(set(self.epochs)), "an epoch was given twice"
        if GROUP not in loaded.groups:
            assert not any(self.done.values())
            store.close()
            return
        s, frozen = loaded.groups[GROUP].state, loaded.groups[GROUP].frozen
        stored = {u.update_id for u in s.history.values() if u.phase is Phase.COMMITTED}
        assert stored == {u for u in s.history if store.read_decision(GROUP, u)}
        assert set(self.done["decide"]) <= stored, "a decision was lost"
        assert stored <= self.tried["decide"], "a decision was invented"
        known = [*s.history.values(), *([frozen] if frozen is not None else [])]
        assert set(self.done["freeze"]) <= {u.update_id for u in known} <= self.tried["freeze"]
        versions = [u.version for u in known]
        assert len(set(versions)) == len(versions), "a version was minted twice"
        assert s.last_version == max(versions, default=0)
        newest = max((u for u in known if u.update_id in stored), key=lambda u: u.version, default=None)
        assert s.committed.update_id == (newest.update_id if newest else "")
        why = core.problem(loaded.groups[GROUP].kept, s.committed, s.committed_manifest)
        assert not why, f"what proves a decision was lost: {why}"
        if (kept := loaded.groups[GROUP].kept) is not None:
            assert len(core.known(kept)) == len(core.manifest_of(kept)) and set(kept.bodies) == set(kept.needs)
        assert s.last_generation >= max(map(int, self.done["group"]), default=0)
        assert len(self.done["group"]) == len(set(self.done["group"])), "a generation was granted twice"
        assert set(self.done["roster"]) <= s.roster
        store.close()


def command(path: Path, rounds: int) -> list[str]:
    return [sys.executable, "-m", "tests.store.crash_child", str(path), str(rounds)]


@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_killed_at_every_boundary(tmp_path: Path) -> None:
    path, ledger = tmp_path / "store.db", Ledger()
    order = [(p, n) for p in POINTS for n in ((1,) if ".open." in p else (1, 3))]
    random.Random(7).shuffle(order)
    for point, nth in order:
        environment = {**os.environ, "WEIGHTPLANE_FAILPOINTS": f"{point}=kill@{nth}"}
        child = subprocess.run(command(path, 4), cwd=REPO, env=environment, stdout=subprocess.PIPE, timeout=60)
        assert child.returncode == -signal.SIGKILL, (point, child)
        ledger.read(child.stdout.decode())
        ledger.check(path)
    assert len(ledger.done["decide"]) > 20


@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_killed_at_any_time(tmp_path: Path) -> None:
    path, ledger, rng = tmp_path / "store.db", Ledger(), random.Random(11)
    for _ in range(12):
        child = subprocess.Popen(command(path, 100_000), cwd=REPO, stdout=subprocess.PIPE)
        assert child.stdout is not None
        text = b"".join(child.stdout.readline() for _ in range(rng.randrange(1, 60)))
        time.sleep(rng.uniform(0.0, 0.01))
        child.kill()
        text += child.stdout.read()
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        ledger.read(text.decode())
        ledger.check(path)
    assert len(ledger.done["decide"]) > 20


@pytest.mark.chaos
def test_killed_while_the_file_is_made(tmp_path: Path) -> None:
    """At ``open.before`` the file is there and whole; what was built beside it is gone."""
    path = tmp_path / "store.db"
    environment = {**os.environ, "WEIGHTPLANE_FAILPOINTS": "store.open.before=kill"}
    child = subprocess.run(command(path, 1), cwd=REPO, env=environment, timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir() if ".new-" in p.name] == []
    store = SqliteStore(path)
    assert store.open().epoch == 1
    store.close()
