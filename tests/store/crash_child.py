"""Runs updates on an SQLite store until it is killed. Says what it tries and what was confirmed, line by line.

python crash_child.py PATH ROUNDS
"""

from __future__ import annotations

import os
import sys

from tests.store.helpers import GROUP, Desk, aborted, committed, proven, state, trainer, update
from weightplane.controlplane.core.group import restarted
from weightplane.controlplane.core.states import Admin
from weightplane.controlplane.store.sqlite import SqliteStore


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(path: str, rounds: int) -> None:
    store = SqliteStore(path)
    loaded = store.open()
    say("epoch", loaded.epoch, loaded.epoch)
    d = Desk(store, loaded.epoch)
    last = generation = 0
    if GROUP in loaded.groups:
        got = loaded.groups[GROUP]
        new, dead = restarted(got.state, got.frozen, loaded.epoch, 0.0)
        last, generation = new.last_version, new.last_generation
        if dead is not None:
            d.close(dead)
    for v in range(last + 1, last + 1 + rounds):
        generation += 1
        say("try", "group", generation)
        assert d.group(state(d.epoch, trainer=trainer(generation), last_generation=generation))
        say("done", "group", generation)
        assert d.roster(f"r{v}", Admin.DRAINING)
        say("done", "roster", f"r{v}")
        u, kept = proven(update(v, d.epoch, f"u{v}-{d.epoch}"), 3 + v % 2)
        say("try", "freeze", u.update_id)
        assert d.freeze(u)
        say("done", "freeze", u.update_id)
        if v % 3:
            say("try", "decide", u.update_id)
            assert d.decide(u, kept)
            say("done", "decide", u.update_id)
        assert d.close(committed(u) if v % 3 else aborted(u))
        say("done", "close", u.update_id)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
