"""A fleet with probes, whose replicas keep their ports; clients that ask through a proxy; a watcher of the probes."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.process.harness import GROUP, ROOT, TTL_S, Fleet, eventually
from tests.process.harness import http as ask
from tests.process.load import Got, Ledger
from tests.routing.haproxy import free_port

__all__ = ["FLOOR", "TEXTS", "Routed", "Watcher", "clients", "example_router", "post"]

FLOOR, SESSION = "Weightplane-Min-Version", "X-Session"
SESSIONS = 8

#: (title, text) shown at the end of the run (``conftest.py``).
TEXTS: list[tuple[str, str]] = []


class Routed(Fleet):
    """``probes``: the control plane's; ``serving`` is known before a replica starts, and stays."""

    def __init__(self, folder: Path, names: tuple[str, ...], spares: int = 1, ttl_s: float = TTL_S) -> None:
        super().__init__(folder, spares=spares, ttl_s=ttl_s)
        self.names, self.probes = names, f"127.0.0.1:{free_port()}"
        self.serving = {name: f"127.0.0.1:{free_port()}" for name in names}

    def __enter__(self) -> Routed:
        return self

    def _launched(self, name: str) -> list[str]:
        mine = {"plane": ["--probes", self.probes]}.get(name, [])
        return [*mine, *super()._launched(name)]

    def begin_replica(self, name: str, **_: Any) -> None:
        child = self._take()
        argv = ["inference-agent", "--address", self.address, "--group", GROUP, "--replica-id", name]
        argv += ["--engine", self.engine, "--transport", self.transport, "--generate", self.serving[name]]
        child.become(name, [*argv, *self._launched(name)])
        self.children[name] = child

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.children[name].pid, number)


@contextmanager
def example_router(probes: str, patience_s: float, command: tuple[str, ...] = ("examples/router.py",)) -> Iterator[str]:
    """``examples/router.py`` as a process; its address."""
    words = [sys.executable, *command, "127.0.0.1:0", probes, GROUP, str(patience_s)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def post(address: str, floor: int, session: str, timeout: float) -> tuple[int, Any, http.client.HTTPMessage]:
    """A request for twelve tokens."""
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        body = json.dumps({"prompts": [[1]], "max_new_tokens": 12, "temperature": 0.0, "seed": 0})
        connection.request("POST", "/generate", body, {FLOOR: str(floor), SESSION: session})
        answer = connection.getresponse()
        said = answer.read()
        return answer.status, json.loads(said) if said[:1] == b"{" else said, answer.headers
    finally:
        connection.close()


@contextmanager
def clients(
    kind: str, address: str, ledger: Ledger, count: int = 2, during: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Keep ``count`` clients asking through ``address``, each time with the newest floor; answers go to ``ledger``.
    ``during`` says what goes on, of requests that are not answered."""
    stop, lock = threading.Event(), threading.Lock()
    homes: dict[str, str] = {}
    seen = ledger.seen

    def once(n: int) -> None:
        session, floor = f"s{n % SESSIONS}", ledger.floor
        try:
            status, said, headers = post(address, floor, session, 60)
        except (OSError, http.client.HTTPException) as e:  # HAProxy closes where its last try was cut off
            with lock:
                seen["requests"] += 1
                seen[f"not answered: {type(e).__name__}{during()}"] += 1
            stop.wait(0.05)
            return
        with lock:
            seen["requests"] += 1
            for who, why in json.loads(headers.get("X-Tried", "{}")).items():
                seen["passed over: " + _short(why) if who else "no control plane"] += 1
            if status == 200:
                replica = headers["X-Replica"]
                seen["answered"] += 1
                seen["sessions that moved"] += homes.setdefault(session, replica) != replica
                homes[session] = replica
                ledger.got += [Got(replica, floor, ledger.floor, c) for c in said["completions"]]
            elif status in (502, 503, 504):
                seen[f"not answered: {status}{during()}"] += 1
            else:
                ledger.errors.append(f"{kind}: {status}: {said}")
        if status != 200:
            stop.wait(0.05)

    def work(first: int) -> None:
        try:
            for n in itertools.count(first, count):
                if stop.is_set():
                    return
                once(n)
        except Exception as e:
            ledger.errors.append(f"a client of {kind} died: {type(e).__name__}: {e}")

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(count)]
    for t in threads:
        t.start()
    try:
        yield
    finally:
        stop.set()
        for t in threads:
            t.join(70)


def _short(why: str) -> str:
    kinds = ("below", "no update has reached", "timed out", "DIRTY")
    return next((k for k in kinds if k in why), "no answer" if "no answer" in why else why[:60])


class Watcher:
    """A health checker: every 50 ms, of each replica, alive, ready and routable at a version that all hold.

    A change of an answer is a flip. It may have a reason: ``excused`` names the replicas that a fault has struck and
    that have not come back.
    """

    def __init__(self, f: Routed) -> None:
        self._f, self._stop = f, threading.Event()
        self._last: dict[tuple[str, str], bool] = {}
        self._rounds = 0
        self.excused: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.flips: list[str] = []

    def _look(self, name: str, question: str) -> None:
        before = name in self.excused
        status, said = ask(self._f.probes, f"/groups/{GROUP}/replicas/{name}/{question}", timeout=10)
        yes, key = status == 200, (name, question)
        self.counts["probes"] += 1
        last = self._last.get(key, yes)
        self._last[key] = yes
        if yes == last:
            return
        if before or name in self.excused:
            self.counts["flips by a fault"] += 1
        else:
            self.flips.append(f"{name}/{question}: {last} -> {yes}: {said.get('reason')}")

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            for name in self._f.names:
                for question in ("livez", "readyz", "routable?min_version=1"):
                    try:
                        self._look(name, question)
                    except (OSError, ValueError):
                        if not self.excused:
                            self.flips.append("the control plane does not answer")
            self._rounds += 1

    def __enter__(self) -> Watcher:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(20)

    @contextmanager
    def fault(self, *names: str, back: Callable[[], object]) -> Iterator[None]:
        """``back`` returns when they are as before."""
        self.excused |= set(names)
        yield
        back()
        seen = self._rounds  # the one under way may have asked before
        eventually(lambda: self._rounds > seen + 1, "the watcher has seen it")
        self.excused -= set(names)
