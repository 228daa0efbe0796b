"""Clients that never stop asking, and the examination of every token that they got.

A **router** asks the control plane whether a replica is routable at its floor (the newest version that it knows to be
committed) and sends a request there if so. A **stray** asks no one and sends to every replica. Everything that comes
back is kept and examined by ``Ledger.examine``.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from tests.process.coded import step_of
from tests.process.harness import Fleet, http

__all__ = ["Ledger", "load"]

TOKENS = 12


@dataclass
class Got:
    replica: str
    floor: int  # what the control plane said that the replica holds at least; 0: nobody was asked
    newest: int  # the newest version known to be committed once the answer was here
    completion: dict[str, Any]


@dataclass
class Ledger:
    """``committed``: version -> the step that its weights encode, written down as soon as it is known."""

    committed: dict[int, int] = field(default_factory=dict)
    got: list[Got] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    @property
    def floor(self) -> int:
        return max(self.committed, default=0)

    def examine(self) -> dict[str, int]:
        """Check every token of every output; what there was, counted."""
        count: Counter[str] = Counter(self.seen)
        assert not self.errors, self.errors[:3]
        for g in self.got:
            tokens, spans, spreads = g.completion["tokens"], g.completion["spans"], g.completion["logprobs"]
            assert len(tokens) == len(spreads) and spreads == [0.0] * len(tokens), f"a pass read a mix: {g}"
            covered = 0
            before = g.floor
            for span in spans:
                assert span["state"] == "KNOWN" and span["start"] == covered and span["stop"] > covered, g
                version = span["version"]
                assert version in self.committed, f"version {version} was never committed: {g}"
                assert version >= before, f"version {version} after {before}, or below the floor: {g}"
                step = self.committed[version]
                assert span["trainer_step"] == step, g
                for token in tokens[span["start"] : span["stop"]]:
                    assert step_of(token) == step, f"{step_of(token)} is not {step} of version {version}: {g}"
                covered, before = span["stop"], version
            assert covered == len(tokens), f"spans cover {covered} of {len(tokens)} tokens: {g}"
            count["outputs"] += 1
            count["tokens"] += len(tokens)
            count["outputs over several versions"] += len(spans) > 1
            count["outputs cut short by a pause"] += not g.completion["finished"]
            count[f"outputs of {g.replica}"] += 1
        return dict(count)


@contextmanager
def load(f: Fleet, ledger: Ledger, routers: int = 3, strays: int = 1) -> Iterator[None]:
    """Keep all of them running."""
    stop = threading.Event()
    lock = threading.Lock()

    def ask(replica: str, floor: int) -> None:
        body = {"prompts": [[1]], "max_new_tokens": TOKENS, "temperature": 0.0, "seed": 0}
        kind = "routed" if floor else "stray"
        try:
            status, answer = http(f.serving[replica], "/generate", body, timeout=60)
        except (OSError, HTTPException):  # the process is dead, or died with the request or in its answer
            with lock:
                ledger.seen[f"{kind}: connection lost"] += 1
            stop.wait(0.02)
            return
        with lock:
            if status == 200:
                ledger.got += [Got(replica, floor, ledger.floor, c) for c in answer["completions"]]
            elif status == 503:
                ledger.seen[f"{kind}: refused by the replica"] += 1
            else:
                ledger.errors.append(f"{replica}: {status}: {answer}")
        if status != 200:
            stop.wait(0.02)

    def route(n: int) -> None:
        for i in itertools.count(n):
            if stop.is_set():
                return
            replica, floor = list(f.serving)[i % len(f.serving)], ledger.floor
            said = f.check(replica, floor)
            if said is None or not said.routable:
                with lock:
                    ledger.seen["routed: not routable" if said else "routed: no control plane"] += 1
                stop.wait(0.01)
                continue
            ask(replica, floor)

    def stray(n: int) -> None:
        for i in itertools.count(n):
            if stop.is_set():
                return
            ask(list(f.serving)[i % len(f.serving)], 0)

    def guarded(work: Any, n: int) -> None:
        try:
            work(n)
        except Exception as e:
            ledger.errors.append(f"a client died: {type(e).__name__}: {e}")

    jobs = [(route, i) for i in range(routers)] + [(stray, i) for i in range(strays)]
    threads = [threading.Thread(target=guarded, args=job, daemon=True) for job in jobs]
    for t in threads:
        t.start()
    try:
        yield
    finally:
        stop.set()
        for t in threads:
            t.join(70)
