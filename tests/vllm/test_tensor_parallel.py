"""Two tensor-parallel workers: one replica, whose workers load, fail and follow together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference_agent.server import Server, eventually
from weightplane.trainer_agent import UpdateFailed

from .fleet import Fleet, tensors_of
from .servers import VllmServer

Golden = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def two(
    golden: object, folders: dict[str, Path], plane: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("two")
    options = {"--tensor-parallel-size": "2"}
    server = VllmServer(folders["A"], logs / "a.log", "0|1", options=options).start()
    with Fleet("two", plane, {"a": server}, logs) as fleet:
        yield fleet


def test_both_workers_follow(two: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """A -> B -> A -> B, staged and in place; tokens are a fresh engine's, of one worker even."""
    assert len(two.replica("a").workers) == 2
    assert two.tokens("a") == golden["A"]
    for target, mode in (("B", "staged"), ("A", "in_place"), ("B", "in_place")):
        receipt = two.publish(folders[target], mode=mode)
        assert {(r.state, r.mode) for r in receipt.replicas} == {("READY", mode.upper())}
        assert two.tokens("a") == golden[target] and two.servers["a"].label() == str(receipt.version)


def test_what_a_worker_lacks_is_named_with_the_worker(two: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    before = two.publish(folders["A"])
    tensors = tensors_of(folders["B"])
    del tensors["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(UpdateFailed, match=r"up_proj.*worker 0"):
        two.publish(tensors)
    assert two.weights("a") == ("READY", before.version) and two.tokens("a") == golden["A"]


def test_one_stopped_worker_ends_the_update_of_both(two: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """SIGSTOP of one of the two: the publish ends by its deadline; once it goes on the next publish is exact."""
    two.publish(folders["A"])
    pid = two.servers["a"].worker_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(UpdateFailed):
            two.publish(folders["B"], update_timeout=4)
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: two.there("a") and two.weights("a")[0] != "UPDATING", 60, "it is back")
    assert {r.state for r in two.publish(folders["B"]).replicas} == {"READY"}
    assert two.tokens("a") == golden["B"]
