"""The words for how each worker is reached."""

from __future__ import annotations

from typing import Any

import pytest

from weightplane.cli import doctor, output, reach
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import weight_transfer_pb2 as wt


def choice(transport: str, *workers: int, why: str = "the first", **refusals: str) -> wt.TransportChoice:
    passed = [ag.TransportRefusal(transport=n, reason=w) for n, w in refusals.items()]
    channel = f"c-{transport}" if transport else ""
    return wt.TransportChoice(
        replica_id="r0", workers=workers, transport=transport, reason=why, refusals=passed, channel_id=channel
    )


def replica(*choices: wt.TransportChoice) -> fl.ReplicaInfo:
    return fl.ReplicaInfo(replica_id="r0", workers=3, transports=choices)


LOST = replica(choice("", 0, why="shm would do, but worker 1"), choice("", 1, why="none", shm="no /dev/shm"))


@pytest.mark.parametrize(
    ("info", "cell"),
    [
        (replica(), "-"),
        (replica(choice("shm", 0, 1, 2)), "shm"),
        (replica(choice("shm", 0, 1), choice("shm", 2, cuda_ipc="MIG")), "shm"),
        (replica(choice("nccl", 0), choice("shm", 1), choice("nccl", 2)), "nccl (0, 2), shm (1)"),
        (LOST, "out of reach"),
    ],
)
def test_one_cell_says_it_all(info: fl.ReplicaInfo, cell: str) -> None:
    assert reach.reached_by(info) == cell


def test_the_table_names_each_workers_transport_and_every_refusal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.console, "width", 160)
    reach.transports_table([replica(choice("nccl", 0, 2), choice("shm", 1, nccl="GPU g1 is taken")), replica()])
    text = capsys.readouterr().out
    assert "0, 2" in text and "nccl: GPU g1 is taken" in text and reach.NOT_BOUND in text


def test_the_doctor_counts_a_worker_out_of_reach_as_a_problem_and_says_what_stands_against_it() -> None:
    said: list[tuple[Any, ...]] = []
    doctor._reach(lambda *row: said.append(row), LOST)
    doctor._reach(lambda *row: said.append(row), replica())
    doctor._reach(lambda *row: said.append(row), replica(choice("grpc", 0, 1, shm="another host")))
    assert [(name, ok) for name, ok, *_ in said] == [
        ("reaching r0, worker 0", False),
        ("reaching r0, worker 1", False),
        ("reaching r0", True),
        ("reaching r0, workers 0, 1", True),
    ]
    assert said[1][2] == "no transport: none. Passed over: shm: no /dev/shm"
    assert said[3][2] == "grpc: the first. Passed over: shm: another host"
