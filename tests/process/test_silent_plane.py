"""A control plane that is stopped in mid-update, in real processes: the trainer is told in time, by whom, and of what.

Nobody else can be asked and no abort can be told, so everything here rests on the trainer's own clock.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.process.harness import Fleet, eventually

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(120)]

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("silent"), spares=0) as f:
        f.start_plane()
        for name in ("r0", "r1"):
            f.begin_replica(name)
        for name in ("r0", "r1"):
            f.await_replica(name)
        f.start_trainer().ask(do="wait", count=2)
        yield f


@pytest.mark.parametrize("point", ["server.start.received", "server.update.received", "server.update.armed"])
def test_a_publish_whose_control_plane_stops_ends_in_time_and_says_so(fleet: Fleet, point: str) -> None:
    steps = iter(range(fleet.trainers, 1 << 20))
    before = fleet.trainer.publish(next(steps))
    assert before is not None and before["ok"], before
    fleet.arm("plane", point, action="stop")
    start = time.monotonic()
    fleet.trainer.begin(next(steps), update_timeout=TIMEOUT_S)
    said = fleet.trainer.heard(60)
    took = time.monotonic() - start
    fleet.children["plane"].process.send_signal(signal.SIGCONT)
    assert fleet.fired("plane") and said is not None and not said["ok"], said
    # StartUpdate's own call may take the update's time-out before the update exists; everything else shares it.
    assert took < TIMEOUT_S + 1.0, said
    assert "the control plane did not answer" in said["text"], said
    assert said["failure"]["reason"] == "DEADLINE" and said["failure"]["member"] == "", said
    if point != "server.start.received":
        assert said["update_id"].startswith("u-") and said["update_id"] in said["text"], said

    def healed() -> bool:
        again = fleet.trainer.publish(next(steps))
        return again is not None and bool(again["ok"]) and again["ready"] == ["r0", "r1"]

    eventually(healed, "a publish succeeds once the control plane runs on")
