"""What the adapter is made of, without vLLM: frames, holders of the one pause, a worker's session."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.inference_agent.server import eventually
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.model import NONE_HELD, Channel, Held, Offer
from weightplane.controlplane.core.placement import full_placement
from weightplane.controlplane.core.planner import make_plan
from weightplane.controlplane.core.states import CachePolicy, Mode, PauseMode
from weightplane.inference_agent.engines.base import EngineError, EngineUpdate
from weightplane.inference_agent.engines.vllm.adapter import VllmEngine
from weightplane.inference_agent.engines.vllm.drivers import Driver, DriverError, Label
from weightplane.inference_agent.engines.vllm.http import HttpDriver
from weightplane.inference_agent.engines.vllm.leftovers import sweep
from weightplane.inference_agent.engines.vllm.links import Listener, WorkerLink
from weightplane.inference_agent.engines.vllm.pausing import PauseDesk
from weightplane.inference_agent.vllm_plugin import wire
from weightplane.inference_agent.vllm_plugin.session import WorkerSession, error_from, error_json
from weightplane.inference_agent.vllm_plugin.sleeping import listen
from weightplane.transports.base import ChannelAborted, ChannelTimeout, PeerLost

MANIFEST = Manifest.of([TensorMeta("a", "float32", (4, 8)), TensorMeta("b", "float32", (4, 8), "a")])


def test_manifest_plan_and_channel_survive_the_socket() -> None:
    placements = [full_placement(m, MANIFEST) for m in ("rank/0", "r/0")]
    plan = make_plan(MANIFEST, placements[:1], placements[1:], bucket_bytes=64)
    assert wire.manifest_from(wire.manifest_json(MANIFEST)) == MANIFEST
    assert wire.plan_from(wire.plan_json(plan)) == plan
    offers = {"rank/0": Offer("shm", b"\x00\xff")}
    channel = Channel("c", "shm", b"k" * 32, ("rank/0",), ("r/0",), (), (), 64, offers, 2)
    assert wire.channel_from(wire.channel_json(channel)) == channel
    changed = {**wire.manifest_json(MANIFEST), "id": "m-other"}
    with pytest.raises(ValueError, match="m-other"):
        wire.manifest_from(changed)


def test_errors_keep_their_kind() -> None:
    for e in (
        ChannelAborted("x", peers=["p"], bucket=3),
        ChannelTimeout("y"),
        PeerLost("z", peers=["t"]),
        EngineError("w", ["n"]),
        MemoryError("m"),
    ):
        back = error_from(error_json(e))
        assert type(back) is type(e) and str(back) == str(e)
        assert getattr(back, "peers", ()) == getattr(e, "peers", ())
        assert getattr(back, "tensors", ()) == getattr(e, "tensors", ())


class Recorded(Driver):
    """Notes what it is asked; ``wait`` blocks until it is drained."""

    name = "recorded"
    instances = 1
    pause_modes = (PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.drained = threading.Event()
        self.fail = self.runs = False

    def alive(self, timeout: float) -> bool:
        return True

    def initialise(self, infos: Sequence[Mapping[str, Any]], timeout: float) -> None:
        self.calls.append("init")

    def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        if self.fail:
            raise DriverError("no")
        self.calls.append(f"{mode}{' clear' if clear_cache else ''}")
        self.runs = False
        if mode is PauseMode.WAIT:
            self.drained.wait(10)

    def resume(self, timeout: float) -> None:
        if self.fail:
            raise DriverError("no")
        self.calls.append("resume")

    def is_paused(self, timeout: float) -> bool:
        return not self.runs

    def is_sleeping(self, timeout: float) -> bool:
        return False

    def sleep(self, level: int, timeout: float) -> None:
        self.calls.append(f"sleep {level}")

    def wake(self, tags: Sequence[str], last: bool, timeout: float) -> None:
        self.calls.append("wake")

    def update(self, info: Mapping[str, Any], label: Label, timeout: float) -> None:
        self.calls.append("update")

    def clear_cache(self, timeout: float) -> None:
        self.calls.append("clear")


def test_the_last_holder_lets_generation_go_on() -> None:
    driver = Recorded()
    notes: list[tuple[str, ...]] = []
    desk = PauseDesk(driver, notes.append)
    desk.pause("operator", PauseMode.KEEP)
    assert desk.wait("operator", 5)
    desk.pause("update", PauseMode.WAIT)
    assert desk.wait("update", 0), "requests that stand still cannot drain: the second pause is in force at once"
    desk.resume("operator")
    desk.resume("operator")
    assert driver.calls == ["KEEP"] and desk.holders == {"update"} and desk.in_force()
    desk.resume("update")
    assert driver.calls == ["KEEP", "resume"] and notes[-1] == ()


def test_a_release_is_noted_once_vllm_goes_on() -> None:
    """An agent killed in between leaves a pause: the next one must know that it was ours, and nobody's by hand."""
    driver = Recorded()
    notes: list[tuple[str, ...]] = []
    desk = PauseDesk(driver, notes.append)
    desk.pause("update", PauseMode.KEEP)
    assert desk.wait("update", 5)
    driver.fail = True
    desk.resume("update")
    assert notes == [("update",)] and not desk.holders
    driver.fail = False
    assert not desk.paused_by_hand(5), "it is our own, and is ended now"
    assert driver.calls == ["KEEP", "resume"] and notes[-1] == ()


def test_a_drain_that_is_given_up_does_not_pause_later() -> None:
    driver = Recorded()
    desk = PauseDesk(driver, lambda _: None)
    desk.pause("update", PauseMode.WAIT)
    assert not desk.wait("update", 0.05)
    desk.resume("update")
    driver.drained.set()
    eventually(lambda: driver.calls == ["WAIT", "resume", "resume"], 5, "the late pause is undone")
    assert not desk.wait("update", 0)


def test_a_pause_that_fails_is_told_to_who_waits() -> None:
    driver = Recorded()
    driver.fail = True
    desk = PauseDesk(driver, lambda _: None)
    desk.pause("update", PauseMode.KEEP)
    with pytest.raises(DriverError, match="no"):
        desk.wait("update", 5)
    with pytest.raises(ValueError, match="DEFAULT"):
        desk.pause("update", PauseMode.DEFAULT)


def test_what_lets_vllm_run_is_refused_while_anybody_else_holds() -> None:
    """vLLM generates as soon as the last of it is awake: an operator's pause would be gone."""
    driver = Recorded()
    desk = PauseDesk(driver, lambda _: None)
    for holder in ("sleep", "operator"):
        desk.pause(holder, PauseMode.KEEP)
        assert desk.wait(holder, 5)
    with pytest.raises(EngineError, match="operator paused it"):
        desk.lift("sleep", lambda: driver.wake((), True, 1))
    desk.resume("operator")
    assert driver.calls == ["KEEP"] and desk.holders == {"sleep"}

    def fails() -> None:
        raise DriverError("no")

    with pytest.raises(DriverError):
        desk.lift("sleep", fails)
    assert desk.in_force(), "whether it runs is not known: it counts as standing still"
    desk.lift("sleep", lambda: driver.wake((), True, 1))
    assert driver.calls == ["KEEP", "wake"] and not desk.holders


def test_who_pauses_while_vllm_wakes_up_is_not_passed_over() -> None:
    driver = Recorded()
    desk = PauseDesk(driver, lambda _: None)
    desk.pause("sleep", PauseMode.KEEP)
    assert desk.wait("sleep", 5)

    def wakes() -> None:
        desk.pause("operator", PauseMode.KEEP)
        driver.wake((), True, 1)

    desk.lift("sleep", wakes)
    assert desk.wait("operator", 5)
    assert driver.calls[:2] == ["KEEP", "wake"] and set(driver.calls[2:]) == {"KEEP"} and desk.in_force()


def test_an_engine_that_started_anew_is_paused_again() -> None:
    driver = Recorded()
    desk = PauseDesk(driver, lambda _: None)
    desk.pause("operator", PauseMode.KEEP)
    assert desk.wait("operator", 5)
    desk.again()
    assert desk.wait("operator", 5) and driver.calls == ["KEEP", "KEEP"]


def test_who_holds_holds_though_somebody_let_vllm_go_on_by_hand() -> None:
    """Nobody holding, nothing is paused; a pause that stands is not begun anew; DIRTY weights are not waited for."""
    driver = Recorded()
    asleep = False
    desk = PauseDesk(driver, lambda _: None, lambda: asleep)
    driver.runs = True
    assert not desk.restore(1)
    desk.pause("update", PauseMode.KEEP, True)
    assert desk.wait("update", 5) and not driver.runs
    assert desk.restore(1) and driver.calls == ["KEEP clear"]
    driver.runs = True
    assert desk.restore(1)
    assert driver.calls == ["KEEP clear", "KEEP"] and not driver.runs and not desk.cleared("update")
    desk.pause("dirty", PauseMode.ABORT)
    assert desk.restore(1)  # behind it
    desk.resume("update")
    driver.runs = True
    asleep = True
    assert not desk.restore(1), "vLLM's own word counts, asleep too"
    assert driver.runs, "who sleeps is not disturbed"
    asleep = False
    assert desk.restore(1)
    assert driver.calls[2:] == ["ABORT", "ABORT"] and desk.in_force()


class Pretend:
    """As much of a worker as its session needs."""

    def __init__(self) -> None:
        self.landed = 0
        self.on_state: Callable[[wire.State], None] = lambda _: None
        self.aborted: list[str] = []
        self.gone = threading.Event()
        self.held_up = threading.Event()
        self._work: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def abort(self, update_id: str, reason: str) -> None:
        self.aborted.append(reason)

    def leave(self, update_id: str, reason: str) -> None:
        """Nothing is received ahead of an order here."""

    def agent_gone(self) -> None:
        self.gone.set()

    def do(self, what: str, m: dict[str, Any]) -> Any:
        if what == "block":
            self.held_up.wait(10)
        if what == "fail":
            raise PeerLost("the trainer died", peers=["rank/0"])
        return {"said": what, "known": True}


def hello(token: str, protocol: int = wire.PROTOCOL) -> wire.Hello:
    return wire.Hello(protocol, token, 0, 1, "life", 1, "cpu", "", "0", "m", "", "", wire.State())


def met(token: str) -> tuple[Listener, list[WorkerLink], list[WorkerLink]]:
    links: list[WorkerLink] = []
    lost: list[WorkerLink] = []
    listener = Listener(None, lambda _, link, h: links.append(WorkerLink(link, h, lost.append)))
    listener.expect({token})
    return listener, links, lost


def test_a_session_asks_aborts_and_ends() -> None:
    listener, links, lost = met("secret")
    worker = Pretend()
    session = WorkerSession(worker, listener.path, hello("secret")).start()  # type: ignore[arg-type]
    eventually(lambda: links, 5, "hello")
    link = links[0]
    assert link.call("greet", 5)["said"] == "greet"
    with pytest.raises(PeerLost, match="died"):
        link.call("fail", 5)
    with pytest.raises(EngineError, match="did not answer 'block' within"):
        link.call("block", 0.1)
    begin = time.monotonic()
    with pytest.raises(ChannelAborted, match="enough"):
        link.call("block", 10, lambda: "enough")
    assert time.monotonic() - begin < 1
    link.post("abort", update_id="u", reason="stop")
    eventually(lambda: worker.aborted == ["stop"], 5, "abort passes what blocks")
    worker.on_state(wire.State(3, "u"))
    eventually(lambda: link.state.held.version == 3, 5, "state")
    session.stop()
    eventually(lambda: lost == [link], 5, "its end is noticed")
    with pytest.raises(EngineError, match="gone"):
        link.call("greet", 5)
    assert worker.gone.wait(5)
    listener.close()


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name: a socket's may have 107 bytes, and pytest's are long where it runs in parts."""
    with tempfile.TemporaryDirectory(prefix="wp-") as made:
        yield Path(made)


def test_what_killed_agents_left_is_removed_and_nothing_else(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    """By the next agent that starts. A bound socket counts as in use before it listens, and nobody is disturbed."""
    monkeypatch.setattr(tempfile, "tempdir", str(short))

    def left(name: str, *, bound: bool = False, more: str = "") -> socket.socket:
        (short / name).mkdir(0o700)
        s = socket.socket(socket.AF_UNIX)
        s.bind(str(short / name / "agent.sock"))
        if not bound:
            s.close()
        if more:
            (short / name / more).touch()
        return s

    keep = {"weightplane-starting", "weightplane-demo-abcdefgh", "weightplane-keepnote", "weightplane-nosocket"}
    keep |= {"weightplane-plainfil", "weightplane-linkedto", "other-abcdefgh", "elsewhere"}
    starting = left("weightplane-starting", bound=True)
    left("weightplane-keepnote", more="note")
    for name in ("weightplane-demo-abcdefgh", "other-abcdefgh", "elsewhere"):
        left(name)
    (short / "weightplane-nosocket").mkdir()
    (short / "weightplane-plainfil").mkdir()
    (short / "weightplane-plainfil" / "agent.sock").touch()
    (short / "weightplane-linkedto").symlink_to("elsewhere")
    dead = {"weightplane-ab_cd123", "weightplane-zzzzzzzz"}
    for name in dead:
        left(name)
    first, links, _ = met("secret")
    assert {p.name for p in short.iterdir()} == keep | {first.folder.name}
    assert (short / "elsewhere" / "agent.sock").exists()
    named = Listener(str(short / "elsewhere"), lambda *_: None)
    left("elsewhere/weightplane-zzzzzzzz")
    again = Listener(str(short / "elsewhere"), lambda *_: None)
    assert (short / "elsewhere" / "weightplane-zzzzzzzz").exists(), "another machine's, perhaps"
    second, _, _ = met("other")
    session = WorkerSession(Pretend(), first.path, hello("secret")).start()  # type: ignore[arg-type]
    eventually(lambda: links, 5, "the first one is reached all the same")
    session.stop()
    starting.close()
    for listener in (first, second, named, again):
        listener.close()


def test_another_users_leftovers_stay(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    for name in ("weightplane-living00", "weightplane-zzzzzzzz"):
        (short / name).mkdir()
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as dead:
        living.bind(str(short / "weightplane-living00" / "agent.sock"))
        dead.bind(str(short / "weightplane-zzzzzzzz" / "agent.sock"))
        dead.close()
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        assert sweep(short, short / "weightplane-living00") == []
        monkeypatch.undo()
        assert sweep(short, short / "weightplane-zzzzzzzz") == [], "a system that does not tell them apart"
        assert sweep(short, short / "weightplane-living00") == ["weightplane-zzzzzzzz"]


class Answered(Future[Any]):
    """Its answer comes at the very moment at which a wait for it gives up."""

    def result(self, timeout: float | None = None) -> Any:
        answer = super().result()
        if timeout is not None:
            raise TimeoutError
        return answer


def test_an_answer_that_comes_as_the_wait_ends_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, links, _ = met("secret")
    session = WorkerSession(Pretend(), listener.path, hello("secret")).start()  # type: ignore[arg-type]
    eventually(lambda: links, 5, "hello")
    monkeypatch.setattr("weightplane.inference_agent.engines.vllm.links.Future", Answered)
    assert links[0].call("greet", 5)["said"] == "greet"
    session.stop()
    listener.close()


class Two(Recorded):
    """A vLLM of two pretended workers that dial as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = (Pretend(), Pretend())

    def initialise(self, infos: Sequence[Mapping[str, Any]], timeout: float) -> None:
        for rank, worker in enumerate(self.workers):
            said = replace(hello(infos[0]["token"]), rank=rank, world=2, state=wire.State(3, "u-3"))
            WorkerSession(worker, infos[0]["socket"], said).start()  # type: ignore[arg-type]


def test_a_worker_that_is_ahead_of_the_next_is_no_mix() -> None:
    """In place the first tensor makes a worker's memory mixed; a report between two workers' firsts must not say that
    they hold different versions: the control plane would fail the update by it."""
    driver = Two()
    engine = VllmEngine(driver, start_timeout_s=5)
    try:
        assert engine.held() == (Held(3, "u-3"),) * 2
        engine.begin(EngineUpdate("u-4", 4, 4, "", Mode.IN_PLACE, CachePolicy.CLEAR, MANIFEST))
        first, second = driver.workers
        first.on_state(wire.State(0, "", "update u-4 comes in place"))
        eventually(engine.mixed, 5, "the first worker's word")
        assert engine.held() == (NONE_HELD,) * 2
        second.on_state(wire.State(0, "", "update u-4 comes in place"))
        for worker in driver.workers:  # committed, one after the other
            worker.on_state(wire.State(4, "u-4"))
            eventually(lambda: set(engine.held()) in ({NONE_HELD}, {Held(4, "u-4")}), 5, "one word for both")
        eventually(lambda: engine.held() == (Held(4, "u-4"),) * 2, 5, "both have it")
        engine.abort("", False, "the test's update ends")
        first.on_state(wire.State(5, "u-5"))
        eventually(lambda: engine.held() == (Held(5, "u-5"), Held(4, "u-4")), 5, "no update is open: told as it is")
    finally:
        engine.close()


def test_who_does_not_know_the_token_or_the_protocol_is_not_let_in() -> None:
    listener, links, _ = met("secret")
    assert not any(c.st_mode & 0o077 for c in [listener.folder.stat()]), "others can reach the socket"
    for wrong in (hello("guess"), hello("secret", protocol=99)):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(listener.path)
        link = wire.Link(sock)
        link.send({"tell": "hello", **wrong.json()})
        with pytest.raises(wire.LinkLost):
            link.receive()
    assert not links
    listener.close()
    assert not listener.folder.exists()


def test_an_unreachable_server_is_named() -> None:
    driver = HttpDriver(["127.0.0.1:9"])
    assert not driver.alive(1)
    with pytest.raises(DriverError, match=r"POST http://127.0.0.1:9/pause: ConnectionRefusedError"):
        driver.pause(PauseMode.KEEP, True, 1)
    with pytest.raises(ValueError, match="expected http"):
        HttpDriver(["ftp://x"])


class Told:
    """A witness of orders to sleep; ``no``: what it refuses."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.no = ""

    def may_sleep(self, level: int) -> None:
        self._hear("may_sleep", level)

    def falls_asleep(self, level: int) -> None:
        self._hear("falls_asleep", level)

    def wakes_up(self, tags: Any) -> None:
        self._hear("wakes_up", tags)

    def woke_up(self, tags: Any) -> None:
        self._hear("woke_up", tags)

    def discards(self, tags: Any) -> None:
        self._hear("discards", tags)

    def _hear(self, what: str, of: Any) -> None:
        if what == self.no:
            raise RuntimeError("no")
        self.said.append((what, of))


def test_orders_of_others_to_a_worker_are_heard() -> None:
    """Each once, whoever listens twice; what is refused does not happen; a worker of nobody sleeps as ever."""

    class Base:
        parallel_config = SimpleNamespace(rank=0, world_size=1)

        def __init__(self, told: Told | None) -> None:
            self.told, self.did = told, list[Any]()

        def wake_up(self, tags: Any = None) -> None:
            self.did.append(("wake_up", tags))

        def discard(self, tags: Any) -> None:
            self.did.append(("discard", tags))

    class Worker(Base):
        def sleep(self, level: int = 1) -> None:
            self.did.append(("sleep", level))

    for _ in range(2):
        assert listen(Worker, lambda w: w.told)
    mine, nobodys = Worker(Told()), Worker(None)
    for w in (mine, nobodys):
        w.sleep()
        w.sleep(level=2)
        w.wake_up(["weights"])
        w.wake_up(tags=None)
        w.discard(("kv_cache",))
        assert [what for what, _ in w.did] == ["sleep", "sleep", "wake_up", "wake_up", "discard"]
    assert mine.told is not None and mine.told.said == [
        *(("may_sleep", 1), ("falls_asleep", 1)),
        *(("may_sleep", 2), ("falls_asleep", 2)),
        *(("wakes_up", ["weights"]), ("woke_up", ["weights"])),
        *(("wakes_up", None), ("woke_up", None)),
        ("discards", ("kv_cache",)),
    ]
    for no, call in (("may_sleep", mine.sleep), ("wakes_up", mine.wake_up)):
        mine.told.no, before = no, list(mine.did)
        with pytest.raises(RuntimeError, match="no"):
            call()
        assert mine.did == before
    assert not hasattr(Base, "sleep"), "the class above is as it was"
    assert not listen(Base, lambda w: w.told)
