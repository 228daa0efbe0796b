"""Two tensor-parallel workers: one replica, whose workers load, fail and follow together."""

from __future__ import annotations

import os
import signal
import urllib.error
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


def refused(server: VllmServer, path: str, body: object = None) -> None:
    with pytest.raises(urllib.error.HTTPError) as answer:
        server.post(path, body)
    assert answer.value.code in (400, 500)


def test_a_call_that_is_refused_is_answered_once(two: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """vLLM leaves replies behind the first failure unread, and would take them for the next call's: here one worker
    says no for both. Ours and vLLM's own refusals, by hand; each publish afterwards is exact."""
    server = two.servers["a"]
    junk = {"update_info": {"do": "patch"}}
    stranger = {"init_info": {"socket": "/nowhere/agent.sock", "token": "t"}}

    def wrong_update() -> None:
        server.post("/start_weight_update")
        refused(server, "/update_weights", junk)
        refused(server, "/finish_weight_update", {"weight_version": None})  # vLLM's own: the one above ended it

    def begun_twice() -> None:
        server.post("/start_weight_update")
        refused(server, "/start_weight_update")

    def second_agent() -> None:
        for _ in range(2):
            refused(server, "/init_weight_transfer_engine", stranger)

    calls = {"another client's update": (wrong_update, 2), "begun twice": (begun_twice, 1), "agent": (second_agent, 2)}
    for n, (what, (call, times)) in enumerate(calls.items()):
        target = "BA"[n % 2]
        before = len(server.log.read_text())
        call()
        receipt = two.publish(folders[target], mode=("staged", "in_place")[n % 2])
        assert {r.state for r in receipt.replicas} == {"READY"}, what
        assert two.tokens("a") == golden[target] and server.label() == str(receipt.version), what
        said = server.log.read_text()[before:]
        counted = [said.count(t) for t in ("WorkerProc hit an exception", "leaves it to worker 1 to tell vLLM")]
        assert counted[0] >= times and counted[0] == counted[1], what  # with those of our own publish


def test_a_wake_up_that_is_refused_is_answered_once(two: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """Of weights that a sleep by hand dropped: see ``test_failures.py``."""
    two.publish(folders["A"])
    server = two.servers["a"]
    server.post("/sleep?level=2")
    eventually(lambda: two.weights("a") == ("DIRTY", 0), 5, "it is noticed")
    refused(server, "/wake_up")
    server.post("/wake_up?tags=weights")
    eventually(lambda: two.replica("a").asleep == ("kv_cache",), 5, "it is noticed")
    assert {r.state for r in two.publish(folders["B"]).replicas} == {"READY"}
    server.post("/wake_up")
    eventually(lambda: two.routable("a"), 5, "it is noticed")
    assert two.tokens("a") == golden["B"]
