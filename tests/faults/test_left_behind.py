"""A port that somebody else has taken, and what the dead left in shared memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.faults.fleet import FaultFleet
from tests.faults.resources import segments
from tests.process.harness import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFleet]:
    with FaultFleet(tmp_path_factory.mktemp("left-behind")) as f:
        f.launch()
        f.together()
        yield f


def test_a_control_plane_whose_port_is_taken_says_so_and_ends_and_the_fleet_waits_for_the_next(
    fleet: FaultFleet,
) -> None:
    before = fleet.lives("plane")
    fleet.children["plane"].kill()
    host, _, port = fleet.address.rpartition(":")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, int(port)))
        other.listen()
        child = fleet.start("plane-in-vain", ["controlplane", "--listen", fleet.address, "--store", "memory:"])
        assert child.died() != 0
        assert port in child.log() and "another process listens there" in child.log(), child.log()
    fleet.start_plane()
    fleet.together()
    assert fleet.lives("plane", "plane-in-vain") == before


def test_a_replica_whose_port_is_taken_says_so_and_ends(fleet: FaultFleet) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        argv = ["inference-agent", "--address", fleet.address, "--group", fleet.group, "--replica-id", "r9"]
        argv += ["--engine", "tests.process.coded:make", "--generate", taken]
        child = fleet.start("r9", argv)
        assert child.died() != 0
        assert taken in child.log() and "another process listens there" in child.log(), child.log()
    assert "r9" not in fleet.replicas() and fleet.together()["ok"]


@pytest.mark.parametrize("victim", ["trainer", "r1"])
def test_segments_and_sockets_of_the_dead_are_found_and_freed(fleet: FaultFleet, victim: str) -> None:
    """Killed with its segment linked and not yet open everywhere, a sender leaves its name; its successor sweeps it."""
    fleet.together()
    point = "trainer.update.armed" if victim == "trainer" else "replica.receive.inside"
    baseline = segments(fleet.shm)
    fleet.arm(victim, point, 1, "kill")
    fleet.begin_publish(fleet.next(), update_timeout=8.0)
    pid = fleet.children[victim].pid
    fleet.children[victim].died()
    fleet.answers()
    if victim == "trainer":
        assert any(f"-{pid}-" in name for name in segments(fleet.shm)), "its socket: nobody could close it"
    fleet.restart(victim)
    fleet.together()
    eventually(
        lambda: len(segments(fleet.shm)) <= len(baseline) and not any(f"-{pid}-" in n for n in segments(fleet.shm)),
        "nothing of the dead is left",
        10,
    )
