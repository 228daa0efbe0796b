"""Two stock vLLM servers under load of real updates, over HTTP; greedy tokens are compared with fresh engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.inference_agent.server import eventually
from weightplane.trainer_agent import PublishError, UpdateFailed

from .fleet import Fleet, tensors_of
from .orders import Orders
from .servers import AgentProcess, VllmServer

Golden = dict[str, list[list[int]]]
LONG, LONGER = 700, 1900
Q = "model.layers.1.self_attn.q_proj.weight"


def test_weights_go_there_and_back(pair: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """A -> B -> A -> B on both at once: tokens are a fresh engine's, the label is our version, its evidence is told."""
    for target in ("B", "A", "B"):
        receipt = pair.publish(folders[target])
        assert receipt.committed and {r.state for r in receipt.replicas} == {"READY"}
        for name, server in pair.servers.items():
            assert pair.tokens(name) == golden[target], f"{name} does not generate as a fresh engine of {target}"
            assert server.label() == str(receipt.version)
            assert pair.weights(name) == ("READY", receipt.version)
    assert {pair.replica(n).serving_address for n in pair.servers} == {
        s.url.removeprefix("http://") for s in pair.servers.values()
    }


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a part of a fused set is missing": (lambda t: t.pop(Q), Q),
    "extra": (lambda t: t.update({"model.layers.0.who.weight": t[Q]}), "model.layers.0.who.weight"),
    "mis-shaped": (lambda t: t.update({Q: t[Q][:, :64].contiguous()}), Q),
    "mis-typed": (lambda t: t.update({Q: t[Q].int()}), Q),
    "missing": (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
}


def test_what_does_not_fit_is_refused_before_the_first_byte(
    pair: Fleet, folders: dict[str, Path], golden: Golden
) -> None:
    """Trap 3. By name; nothing is written; the engines go on, and the next publish is exact."""
    before = pair.publish(folders["A"])
    for what, (spoil, named) in SPOILT.items():
        tensors = tensors_of(folders["B"])
        spoil(tensors)
        with pytest.raises(UpdateFailed) as failed:
            pair.publish(tensors)
        failures = failed.value.failures
        assert set(failures) & {"a", "b"} and all(f.reason == "MANIFEST_MISMATCH" for f in failures.values()), what
        assert all(named in f.tensors and named in f.message for f in failures.values()), failures
        for name in pair.servers:
            assert pair.weights(name) == ("READY", before.version) and pair.tokens(name) == golden["A"], what
    pair.publish(folders["B"])
    assert pair.tokens("a") == golden["B"]


def test_requests_in_flight_keep_their_prefix(pair: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """Traps 8, 9: what was made stays, the rest is what the new weights make of it; nothing is dropped or stale."""
    prompt, total = [1, 10, 20, 30], 200
    pair.publish(folders["A"])
    old = pair.servers["a"].generate(prompt, total)
    kept: dict[str, int] = {}
    for _ in range(5):  # a pause may fall between two requests, and then shows nothing
        for name, requests in while_published(pair, folders, prompt, total).items():
            assert all(len(tokens) == total for tokens in requests)
            tokens = next(t for t in requests if t != old)
            kept[name] = next(i for i, (x, y) in enumerate(zip(tokens, old, strict=True)) if x != y)
            continued = pair.servers[name].generate(prompt + tokens[: kept[name]], total - kept[name])
            assert tokens[kept[name] :] == continued, f"{name}: its tokens after the update are not the new model's"
            assert pair.tokens(name) == golden["B"]
        if all(kept.values()):
            break
    assert all(0 < same < total for same in kept.values()), f"of {total} tokens are the old model's: {kept}"


def while_published(pair: Fleet, folders: dict[str, Path], prompt: list[int], total: int) -> dict[str, list[list[int]]]:
    """Each server's requests, one after the other, from before B is published over A until after it."""
    pair.publish(folders["A"])
    made: dict[str, list[list[int]]] = {n: [] for n in pair.servers}
    enough = threading.Event()

    def run(name: str) -> None:
        while not enough.is_set():
            made[name].append([])
            for token in pair.servers[name].stream(prompt, total):
                made[name][-1].append(token)

    threads = [threading.Thread(target=run, args=(n,)) for n in pair.servers]
    for t in threads:
        t.start()
    try:
        eventually(lambda: all(m and (len(m) > 1 or len(m[0]) > 20) for m in made.values()), 30, "tokens come")
        pair.publish(folders["B"])
    finally:
        enough.set()
        for t in threads:
            t.join(120)
    return made


def test_bytes_arrive_while_a_request_generates(pair: Fleet, folders: dict[str, Path]) -> None:
    """One long request from before the publish until after it; the bytes do not wait for it to end."""
    # On a busy machine a publish may take longer than a request: that shows nothing, and a longer one follows.
    for length in (LONG, LONG, LONGER, LONGER, LONGER):
        pair.publish(folders["A"])
        made: list[int] = []
        request = partial(pair.servers["a"].stream, [1, 7], length)
        thread = threading.Thread(target=lambda made=made, request=request: made.extend(request()))
        thread.start()
        try:
            eventually(lambda made=made: made, 60, "tokens come")  # type: ignore[misc]
            receipt = pair.publish(folders["B"])
            going_on = thread.is_alive()
        finally:
            thread.join(120)
        assert len(made) == length
        if going_on:
            break
    assert going_on, "the publish ended only after the request"
    assert max(r.wire_s for r in receipt.replicas) < 1


@contextmanager
def stuck(pair: Fleet, checkpoint: Path, mode: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer in the middle of sending, which never goes on; bytes have landed on every replica."""
    command = [sys.executable, "-m", "tests.vllm.stuck_trainer", pair.plane.address, pair.group, str(checkpoint), mode]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None and trainer.stdout.readline().strip() == "sending"
        eventually(lambda: landed(pair), 30, "bytes land on every replica")  # what nothing was written to is not DIRTY
        yield trainer
    finally:
        trainer.kill()
        trainer.wait(10)


def landed(pair: Fleet) -> bool:
    update = pair.plane.state(pair.group).open
    return update is not None and all(p.bytes_received for p in update.parts.values())


def aborted(pair: Fleet) -> float:
    """When the update was seen to be over."""
    eventually(lambda: ended(pair), 10, "the update ends")
    return time.monotonic()


def test_a_trainer_killed_in_the_middle_costs_nothing(pair: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """SIGKILL while bytes land: requests are answered all along, by the old weights; the next publish is exact."""
    before = pair.publish(folders["A"])
    with stuck(pair, folders["B"], "staged") as trainer:
        assert pair.servers["a"].generate([1, 7], 4) == golden["A"][1][:4], "generation stood still while bytes came"
        os.kill(trainer.pid, signal.SIGKILL)
        at = aborted(pair)
    for name, server in pair.servers.items():
        assert server.generate([1, 7], 4, timeout=5) == golden["A"][1][:4]
        assert time.monotonic() - at < 5
        eventually(lambda n=name: pair.weights(n) == ("READY", before.version), 10, f"{name} is READY")  # type: ignore[misc]
    pair.publish(folders["B"])
    assert all(pair.tokens(n) == golden["B"] for n in pair.servers)


def break_off(pair: Fleet, checkpoint: Path) -> None:
    """An update in place whose trainer is killed while bytes are loaded: both are DIRTY."""
    with stuck(pair, checkpoint, "in_place") as trainer:
        os.kill(trainer.pid, signal.SIGKILL)
        aborted(pair)
    for name in pair.servers:
        eventually(lambda n=name: pair.weights(n) == ("DIRTY", 0), 5, f"{name} is DIRTY")  # type: ignore[misc]


def test_in_place_a_killed_trainer_leaves_a_fence(pair: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """SIGKILL while bytes are loaded: both are DIRTY and answer nobody; vLLM lives, and the next publish is exact."""
    pair.publish(folders["A"])
    pids = [s.process for s in pair.servers.values()]
    break_off(pair, folders["B"])
    for server in pair.servers.values():
        server.get("/health")
        assert server.unanswered()
    for target, mode in (("B", "in_place"), ("A", "staged")):
        assert {r.state for r in pair.publish(folders[target], mode=mode).replicas} == {"READY"}
        assert all(pair.tokens(n) == golden[target] for n in pair.servers)
    assert pids == [s.process for s in pair.servers.values()]


def test_who_lets_a_fenced_vllm_go_on_by_hand_frees_nothing(
    pair: Fleet, folders: dict[str, Path], golden: Golden
) -> None:
    """``/resume`` by hand on DIRTY weights: it stands still again, and the next publish heals, also just after it."""
    pair.publish(folders["A"])
    for mode, target in (("in_place", "B"), ("staged", "A")):
        break_off(pair, folders["B"])
        for server in pair.servers.values():
            let_go_on(server)
            assert server.unanswered()
            server.post("/resume")  # and no time for anybody to notice
        assert {r.state for r in pair.publish(folders[target], mode=mode).replicas} == {"READY"}
        assert all(pair.tokens(n) == golden[target] for n in pair.servers)


def let_go_on(server: VllmServer) -> None:
    """Resume it by hand; back once it is paused again."""
    server.post("/resume")
    eventually(lambda: server.get("/is_paused")["is_paused"] is True, 5, "it is paused again")


def test_an_operators_pause_lasts_through_a_resume_by_hand(
    pair: Fleet, folders: dict[str, Path], golden: Golden
) -> None:
    """And through updates, in both modes, which find it running: no healthy replica becomes DIRTY of it."""
    pair.publish(folders["A"])
    with Orders(pair.plane.address, pair.group).paused():
        let_go_on(pair.servers["a"])
        for mode, target in (("staged", "B"), ("in_place", "A")):
            for server in pair.servers.values():
                server.post("/resume")
            assert {r.state for r in pair.publish(folders[target], mode=mode).replicas} == {"READY"}
            assert all(server.unanswered() for server in pair.servers.values())
    assert all(pair.tokens(n) == golden["A"] for n in pair.servers)


def test_a_second_agent_of_a_vllm_is_refused_by_name(
    pair: Fleet, folders: dict[str, Path], golden: Golden, tmp_path: Path
) -> None:
    """They would take its workers from each other for ever, and no publish would pass."""
    before = pair.replica("a").incarnation
    second = AgentProcess(pair.plane.address, pair.group, "thief", pair.servers["a"].url, tmp_path / "thief.log")
    try:
        assert second.process.wait(60) != 0
    finally:
        second.stop()
    assert "another agent speaks for this vLLM already" in (tmp_path / "thief.log").read_text()
    assert {r.replica_id: r.state for r in pair.publish(folders["B"]).replicas} == {"a": "READY", "b": "READY"}
    assert pair.replica("a").incarnation == before and all(pair.tokens(n) == golden["B"] for n in pair.servers)


def test_a_stopped_worker_stops_nobody_else(pair: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """Traps 10, 11: SIGSTOP of one vLLM worker. The update ends by its deadline, the other serves; then it heals."""
    before = pair.publish(folders["A"])
    pid = pair.servers["b"].worker_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with pytest.raises(PublishError):
            pair.publish(folders["B"], update_timeout=5)
        assert time.monotonic() - begin < 7
        assert pair.tokens("a") == golden["A"]
        eventually(lambda: pair.weights("a") == ("READY", before.version), 5, "a is READY")
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: pair.there("b") and any(o for w in pair.replica("b").workers for o in w.offers), 60, "b is back")
    receipt = pair.publish(folders["B"])
    assert {r.replica_id: r.state for r in receipt.replicas} == {"a": "READY", "b": "READY"}
    assert all(pair.tokens(n) == golden["B"] for n in pair.servers)


def ended(pair: Fleet) -> bool:
    update = pair.plane.state(pair.group).open
    return update is None or str(update.phase) in ("ABORTED", "COMMITTED")


def test_a_new_agent_finds_what_the_workers_hold(pair: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """The agent's memory is nobody's truth: one that is killed comes back READY, since the workers say so."""
    receipt = pair.publish(folders["A"])
    pair.agents["a"].process.kill()
    pair.agents["a"].process.wait(10)
    first = pair.replica("a").incarnation
    pair.agent("a")
    eventually(lambda: pair.there("a") and pair.replica("a").incarnation != first, 30, pair.log("a"))
    eventually(lambda: pair.weights("a") == ("READY", receipt.version), 10, "READY again")
    pair.publish(folders["B"])
    assert all(pair.tokens(n) == golden["B"] for n in pair.servers)


def test_a_new_agent_keeps_the_operators_pause(pair: Fleet, folders: dict[str, Path], golden: Golden) -> None:
    """From the death of the old one to the control plane's word to the new one, and after it: it never runs."""
    pair.publish(folders["A"])
    seen: list[bool] = []
    with Orders(pair.plane.address, pair.group).paused():
        pair.agents["a"].process.kill()
        pair.agents["a"].process.wait(10)
        first = pair.replica("a").incarnation
        pair.agent("a")

        def there() -> bool:
            seen.append(pair.servers["a"].get("/is_paused")["is_paused"])
            return pair.there("a") and pair.replica("a").incarnation != first

        eventually(there, 30, pair.log("a"))
        assert all(seen) and pair.servers["a"].unanswered()
        assert "vLLM stands still for operator" in pair.log("a") and "it goes on" not in pair.log("a")
    assert pair.tokens("a") == golden["A"]


def test_an_engine_that_restarts_behind_its_agent_is_joining(
    pair: Fleet, folders: dict[str, Path], golden: Golden
) -> None:
    """It came up with the checkpoint that it was started with: nobody may take that for the trainer's version."""
    pair.publish(folders["B"])
    pair.servers["b"].kill()
    eventually(lambda: pair.replica("b").weights == "JOINING", 10, f"b is JOINING: {pair.log('b')}")
    pair.servers["b"].start()
    eventually(lambda: pair.there("b") and any(o for w in pair.replica("b").workers for o in w.offers), 30, "attached")
    assert pair.weights("b") == ("JOINING", 0)
    assert pair.tokens("b") == golden["A"]
    receipt = pair.publish(folders["B"])
    assert {r.replica_id: r.state for r in receipt.replicas} == {"a": "READY", "b": "READY"}
    assert all(pair.tokens(n) == golden["B"] for n in pair.servers)


def test_an_engine_that_restarts_is_caught_up_from_the_trainers_snapshot(
    pair: Fleet, folders: dict[str, Path], golden: Golden
) -> None:
    """No publish: the trainer is in its next step, and what it retained brings the engine back."""
    with pair.publisher(folders["B"], retain="memory") as publisher:
        receipt = publisher.publish(step=pair.step)
        pair.servers["a"].kill()
        eventually(lambda: pair.replica("a").weights == "JOINING", 10, f"a is JOINING: {pair.log('a')}")
        pair.servers["a"].start()
        eventually(lambda: pair.weights("a") == ("READY", receipt.version), 60, f"caught up: {pair.log('a')}")
        assert all(pair.tokens(n) == golden["B"] for n in pair.servers)
        again = publisher.publish(step=pair.step + 1)
        assert {r.replica_id: r.state for r in again.replicas} == {"a": "READY", "b": "READY"}


def test_requests_that_a_pause_waits_for_are_said_to_be_why(pair: Fleet, folders: dict[str, Path]) -> None:
    """Two requests longer than the update may take: it fails by them, with their number; they and the next go on."""
    pair.publish(folders["A"])
    server = pair.servers["a"]
    made: list[list[int]] = [[], []]
    threads = [threading.Thread(target=lambda m=m: m.extend(server.stream([1, 7], LONGER))) for m in made]
    for t in threads:
        t.start()
    try:
        eventually(lambda: server.running() == 2, 60, "both are generated")
        with pytest.raises(UpdateFailed, match=r"a: generation does not .* \(pause=wait\), 2 request\(s\) still"):
            pair.publish(folders["B"], pause="wait", update_timeout=2.0)
    finally:
        for t in threads:
            t.join(120)
    assert [len(m) for m in made] == [LONGER, LONGER]
    pair.publish(folders["B"], pause="wait")
