"""SIGKILL and SIGSTOP of trainer or receiver in the middle of an update, over every wire, real cards among them.

Trainer and replicas are processes; the deadline is 120 s away. The other side is out within a second of the detection
(at once for a death, a TTL and a beat for a stop), usable, with its memory at the baseline, and the next update exact.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cases.card_models import Even, values_of
from tests.cases.cards import TWINS, Twin
from tests.cases.wires import WIRES, Wire, param
from tests.inference_agent.server import FAST
from tests.trainer_agent.fleet import Fleet, eventually, fleet

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

DETECTED_S = {"KILL": 0.5, "STOP": FAST.ttl_s + FAST.beat_s}
#: A second, and what saying so takes; more on the host, where many processes run on few cores.
MARGIN_S = {False: 1.5, True: 8.0}
PLACES = {"trainer": ("trainer.send.bucket", 4), "receiver": ("replica.receive.inside", 3)}  # of six buckets


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    TWINS.warm(3)
    yield
    TWINS.close()


class Wired:
    """A control plane, a trainer and a replica of ``Even`` over one wire."""

    def __init__(self, f: Fleet, wire: Wire) -> None:
        self.f, self.wire = f, wire
        self.lives = 0
        self.trainer = self.taken(sends=True)
        self.replica = self.taken(sends=False)

    def taken(self, sends: bool) -> Twin:
        """A process as one end of the wire."""
        twin = TWINS.take()
        self.f.stack.callback(TWINS.give, twin)
        twin.do("use", wire=self.wire.id, sends=sends)
        self.lives += 1
        if sends:
            twin.do("train", address=self.f.address, name=f"trainer-{self.lives}")
        else:
            before = self.life
            twin.do("join", address=self.f.address, name="r0", model="even", staged=True, heartbeat=True)
            eventually(lambda: self.life not in ("", before), 20)
        return twin

    @property
    def life(self) -> str:
        """The replica's incarnation, once it has reported."""
        known = self.f.state().replicas.get("r0")
        return known.incarnation if known is not None and known.reported else ""

    def holds(self, k: float) -> bool:
        module = Even()
        module.become(k)
        return bool(self.replica.do("values", name="r0") == values_of(module))

    def publish(self, step: int, mode: str) -> dict[str, Any]:
        said: dict[str, Any] = self.trainer.do("publish", step=step, mode=mode)
        return said


@contextmanager
def wired(wire: Wire) -> Iterator[Wired]:
    with wire.here(), fleet(FAST) as f:
        yield Wired(f, wire)


def _where() -> list[Any]:
    """Both modes on cards; elsewhere, where no card takes part, one for each fault is enough."""
    wires = [w for w in WIRES.values() if w.id not in ("nccl-same", "grpc-host")]
    modes = {"KILL": ("staged", "in_place"), "STOP": ("in_place", "staged")}
    return [
        param(w, victim, action, mode, id=f"{w.id}-{victim}-{action}-{mode}")
        for w in wires
        for victim in ("trainer", "receiver")
        for action in ("KILL", "STOP")
        for mode in modes[action][: 1 if w.on_host else 2]
    ]


@pytest.mark.parametrize(("wire", "victim", "action", "mode"), _where())
def test_the_other_side_is_out_in_time_and_as_before(wire: Wire, victim: str, action: str, mode: str) -> None:
    with wired(wire) as w:
        for step in (1, 2, 3):
            assert w.publish(step, mode) == {"version": step}
        one, other = (w.trainer, w.replica) if victim == "trainer" else (w.replica, w.trainer)
        baseline = other.do("kept")
        point, nth = PLACES[victim]
        one.do("fault", point=point, nth=nth, action=action)
        w.trainer.tell(do="publish", arguments={"step": 4, "mode": mode, "update_timeout": 120})
        eventually(lambda: _ended(one) or _stopped(one), 20)
        began = time.monotonic()
        eventually(lambda: w.f.state().open is None, 30)
        took = time.monotonic() - began
        assert took < DETECTED_S[action] + MARGIN_S[wire.on_host], f"the update was over after {took:.1f} s"
        if victim == "receiver":
            said = w.trainer.heard(10)
            assert "r0" in said["value"]["raised"], said
        else:
            eventually(lambda: "update" not in w.replica.do("holders", name="r0"), 5)
            assert mode == "in_place" or w.holds(3), "what was staged never touched the live weights"
        one.close()
        if victim == "trainer":
            w.trainer = w.taken(sends=True)
        else:
            w.replica = w.taken(sends=False)
        version = w.publish(5, mode)["version"]
        assert version > 4 and w.holds(5)
        w.publish(6, mode)
        assert w.holds(6)
        eventually(
            lambda: not _grown(other.do("kept"), baseline), 5, f"memory is at the baseline {baseline}"
        )  # what was aborted is closed by a thread


def _grown(now: dict[str, int], before: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {k: (before[k], n) for k, n in now.items() if n > before[k]}


def _ended(twin: Twin) -> bool:
    return twin.process.poll() is not None


def _stopped(twin: Twin) -> bool:
    with open(f"/proc/{twin.process.pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"
