"""What the adapter and its drivers never do, and never wait for: no vLLM here, one end or the other is pretended."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from tests.inference_agent.server import eventually, server
from tests.loop import Loop
from tests.vllm.orders import Orders
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.states import CachePolicy, Mode, PauseMode
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.base import EngineError, EngineUpdate
from weightplane.inference_agent.engines.vllm import adapter, attached
from weightplane.inference_agent.engines.vllm.adapter import VllmEngine
from weightplane.inference_agent.engines.vllm.async_llm import AsyncDriver
from weightplane.inference_agent.engines.vllm.drivers import Driver, DriverError, DriverTimeout, Label
from weightplane.inference_agent.engines.vllm.http import HttpDriver
from weightplane.inference_agent.engines.vllm.links import Listener, WorkerLink
from weightplane.inference_agent.engines.vllm.offline import OfflineDriver
from weightplane.inference_agent.threads import WorkThread
from weightplane.inference_agent.vllm_plugin import wire
from weightplane.inference_agent.vllm_plugin.session import WorkerSession
from weightplane.inference_agent.vllm_plugin.sleeping import sleep_refusal
from weightplane.transports import registry

MANIFEST = Manifest.of([TensorMeta("a", "float32", (4, 8))])
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm sets up .venv-vllm for it"
)


class Worker:
    """As much of a worker as its session needs: it answers whatever it is asked, on one data thread."""

    def __init__(self) -> None:
        self.landed = 0
        self.on_state: Callable[[wire.State], None] = lambda _: None
        self.asked: list[str] = []
        self.freed = threading.Event()
        self._data = WorkThread("data")

    def submit(self, work: Callable[[], None]) -> None:
        self._data.submit(work)

    def abort(self, update_id: str, reason: str) -> None:
        self.freed.set()

    def leave(self, update_id: str, reason: str) -> None: ...

    def agent_gone(self) -> None: ...

    def do(self, what: str, m: dict[str, Any]) -> Any:
        self.asked.append(what)
        if what == "asleep":
            self.on_state(wire.State(mixed=m["lost"], asleep=tuple(m["asleep"])))
        if what == "take":
            return {"freed": self.freed.wait(10)}
        return {"known": True, "offers": [], "why": {}}


def hello(token: str, **changes: Any) -> wire.Hello:
    kept: dict[str, Any] = {
        "rank": 0,
        "world": 1,
        "life": "life",
        "pid": 1,
        "device": "cpu",
        "uuid": "",
        "vllm": "0",
        "model": "m",
    }
    kept |= {"protocol": wire.PROTOCOL, "token": token, "staging_refusal": "", "sleep_refusal": ""}
    return wire.Hello(**{**kept, "state": wire.State(), **changes})


class Pretended(Driver):
    """One or more instances whose workers dial the agent. Notes every call, with what the workers were asked so far."""

    name = "pretended"
    pause_modes = (PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT)

    def __init__(self, instances: int = 1) -> None:
        self._n = instances
        self.workers: list[Worker] = []
        self.calls: list[str] = []
        self.paused = False

    @property
    def instances(self) -> int:
        return self._n

    def alive(self, timeout: float) -> bool:
        return True

    def initialise(self, infos: Sequence[Mapping[str, Any]], timeout: float) -> None:
        for info in infos:
            self.workers.append(Worker())
            WorkerSession(self.workers[-1], info["socket"], hello(info["token"])).start()  # type: ignore[arg-type]

    def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        self.paused = True
        self.calls.append(f"{mode}{' clear' if clear_cache else ''}")

    def resume(self, timeout: float) -> None:
        self.paused = False
        self.calls.append("resume")

    def is_paused(self, timeout: float) -> bool:
        return self.paused

    def is_sleeping(self, timeout: float) -> bool:
        return False

    def sleep(self, level: int, timeout: float) -> None:
        self.calls.append(f"sleep {level}")

    def wake(self, tags: Sequence[str], last: bool, timeout: float) -> None:
        self.calls.append(f"wake {' '.join(tags)}{' last' if last else ''}")

    def update(self, info: Mapping[str, Any], label: Label, timeout: float) -> None:
        self.calls.append(str(info["do"]))

    def clear_cache(self, timeout: float) -> None:
        self.calls.append("clear")


@contextmanager
def engine(driver: Pretended) -> Iterator[VllmEngine]:
    made = VllmEngine(driver, start_timeout_s=10)
    try:
        yield made
    finally:
        made.close()


def update(mode: Mode = Mode.STAGED, cache: CachePolicy = CachePolicy.CLEAR) -> EngineUpdate:
    return EngineUpdate("u", 3, 0, "", mode, cache, MANIFEST)


@pytest.mark.parametrize("why", ["nobody paused it", "its pauses do not last"])
@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
def test_nothing_is_loaded_while_a_pass_may_run(mode: Mode, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 4: vLLM does not check; a pass between start and finish kills its core."""
    driver = Pretended()
    with engine(driver) as e:
        e.begin(update(mode))
        if why != "nobody paused it":
            e.pause("update", PauseMode.KEEP)
            assert e.wait_paused("update", 5)
            monkeypatch.setattr(driver, "is_paused", lambda timeout: False)
        with pytest.raises(EngineError, match="not paused"):
            e.apply("u") if mode is Mode.STAGED else e.writing("u")
        assert not {"apply", "stream"} & set(driver.calls)


@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
def test_who_resumed_it_by_hand_costs_no_update(mode: Mode) -> None:
    """It is paused again before a byte of the weights changes."""
    driver = Pretended()
    with engine(driver) as e:
        e.begin(update(mode))
        e.pause("update", PauseMode.KEEP)
        assert e.wait_paused("update", 5)
        driver.paused = False
        e.apply("u") if mode is Mode.STAGED else e.writing("u")
        load = driver.calls.index("apply" if mode is Mode.STAGED else "stream")
        assert driver.paused and driver.calls[:load] == ["KEEP clear", "KEEP"]


def test_a_pause_by_hand_is_told_from_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls both sleep; its workers would have told of a real one. What helps is another call."""
    driver = Pretended()
    with engine(driver) as e:
        e.begin(update())
        monkeypatch.setattr(driver, "is_sleeping", lambda timeout: True)
        driver.paused = True
        with pytest.raises(EngineError, match=r"paused by hand.*POST /resume"):
            e.prepare("u")
        driver.paused = False
        with pytest.raises(EngineError, match=r"asleep.*POST /wake_up"):
            e.prepare("u")


def test_who_is_paused_by_hand_is_not_routed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take requests and answer none. A pause by order, which its end lets go, is none by hand."""
    monkeypatch.setattr(attached, "_HAND_S", 0.1, raising=False)
    driver = Pretended()
    with engine(driver) as e, server() as plane:
        agent = InferenceAgent(plane.address, "g", "r", e, transports=["grpc"]).start()

        def told() -> tuple[str, ...]:
            r = plane.state().replicas.get("r")
            return r.pause_holders if r is not None and r.reported else ("?",)

        try:
            eventually(lambda: told() == (), 10, "it joins")
            driver.paused = True
            eventually(lambda: told() == ("hand",), 10, "it is noticed")
            with Orders(plane.address, "g", "r").paused():
                eventually(lambda: told() == ("operator",), 10, "one word for one pause")
            assert not driver.paused
            eventually(lambda: told() == (), 10, "it goes on")
            driver.paused = True
            eventually(lambda: told() == ("hand",), 10, "it is noticed again")
            driver.paused = False
            eventually(lambda: told() == (), 10, "it goes on by hand")
        finally:
            agent.stop()


def test_a_resume_that_vllm_refused_is_made_again_and_is_no_pause_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stand still for ever, and somebody's hand would be blamed."""
    monkeypatch.setattr(attached, "_HAND_S", 0.1)

    class Refuses(Pretended):
        left = 1

        def resume(self, timeout: float) -> None:
            if self.left:
                self.left -= 1
                raise DriverError("POST /resume: connection reset")
            super().resume(timeout)

    driver = Refuses()
    with engine(driver) as e:
        e.pause("update", PauseMode.KEEP)
        assert e.wait_paused("update", 5)
        e.resume("update")
        assert driver.paused
        eventually(lambda: not driver.paused, 10, "it goes on")
        assert not e.paused_by_hand


def test_a_pause_of_ours_that_ends_as_vllm_is_asked_is_none_by_hand() -> None:
    """vLLM's word is older than our resume, which waits behind the question."""

    class Slow(Pretended):
        asked, answer = threading.Event(), threading.Event()

        def is_paused(self, timeout: float) -> bool:
            self.asked.set()
            assert self.answer.wait(10)
            return True

    driver = Slow()
    with engine(driver) as e:
        assert driver.asked.wait(5)
        e.pause("update", PauseMode.KEEP)
        e.resume("update")
        driver.answer.set()
        time.sleep(0.5)
        assert not e.paused_by_hand


class LeftBehind(Pretended):
    """Paused, and its worker says who of an agent before held it."""

    def __init__(self, *paused_by: str, mixed: str = "") -> None:
        super().__init__()
        self.paused = True
        self._state = wire.State(paused_by=paused_by, mixed=mixed)

    def initialise(self, infos: Sequence[Mapping[str, Any]], timeout: float) -> None:
        for info in infos:
            self.workers.append(Worker())
            said = hello(info["token"], state=self._state)
            WorkerSession(self.workers[-1], info["socket"], said).start()  # type: ignore[arg-type]


@pytest.mark.parametrize("holder", ["operator", "trainer"])
def test_a_pause_by_order_outlives_the_agent_that_carried_it_out(holder: str) -> None:
    """Who comes after a killed agent keeps it, without a moment of generation, and ends it like one of its own."""
    driver = LeftBehind(holder, "update")
    with engine(driver) as e:
        assert e.holders() == {holder} and e.wait_paused(holder, 5)
        assert driver.paused and "resume" not in driver.calls
        e.resume(holder)
        assert not driver.paused and driver.calls[-1] == "resume"


def test_an_updates_pause_ends_with_the_agent_that_took_it() -> None:
    driver = LeftBehind("update")
    with engine(driver) as e:
        assert not e.holders() and not driver.paused and driver.calls == ["resume"]


def test_a_pause_by_order_waits_for_the_control_plane_though_the_weights_are_a_mix() -> None:
    """Before its first word the agent finds out that the weights are DIRTY: that fence is beside the pause."""
    driver = LeftBehind("operator", mixed="it was being applied")
    with engine(driver) as e, server() as plane:
        agent = InferenceAgent("127.0.0.1:1", "g", "r", e, transports=["grpc"], heartbeat=False)
        try:
            agent.start()
            eventually(lambda: "dirty" in agent.status().pause_holders, 5, "it is fenced")
            assert agent.status().pause_holders == {"dirty", "operator"}
        finally:
            agent.stop()
        assert "resume" not in driver.calls

        def told() -> tuple[str, ...]:
            r = plane.state().replicas.get("r")
            return r.pause_holders if r is not None else ()

        agent = InferenceAgent(plane.address, "g", "r", e, transports=["grpc"])
        try:
            agent.start()
            eventually(lambda: told() == ("dirty", "operator"), 10, "it is told of")
            with Orders(plane.address, "g", "r").paused():
                pass
            eventually(lambda: agent.status().pause_holders == {"dirty"}, 10, "its end is heeded")
        finally:
            agent.stop()


def test_a_vllm_that_does_not_answer_is_named_with_what_it_said() -> None:
    with pytest.raises(EngineError, match=r"GET http://127\.0\.0\.1:1/health: ConnectionRefusedError"):
        VllmEngine(HttpDriver(["http://127.0.0.1:1"]), start_timeout_s=0)


@pytest.mark.parametrize("at_first", [True, False])
def test_what_an_agent_waits_for_is_said_again_and_again(
    at_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before vLLM answered there is no replica to show; one that died in the evening is still said at night."""
    monkeypatch.setattr(attached, "_SAY_S", 0.05, raising=False)
    monkeypatch.setattr(attached, "_LOOK_S", 0.02)
    caplog.set_level("INFO", "weightplane.inference_agent")
    driver = Pretended()
    driver.trouble, up = "GET http://h:8000/health: refused", threading.Event()
    monkeypatch.setattr(driver, "alive", lambda timeout: up.is_set())

    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.getMessage().startswith("waiting for vLLM (pretended)")]

    if not at_first:
        up.set()
    thread = threading.Thread(target=lambda: made.append(VllmEngine(driver, start_timeout_s=60)))
    made: list[VllmEngine] = []
    thread.start()
    try:
        if not at_first:
            thread.join(10)
            up.clear()
            for k in made[0]._attached:
                k.close()
        eventually(lambda: len(said()) >= 3, 10, "it is said more than once")
        assert re.search(r"since \d\d:\d\d:\d\d \(\d+ s, ", said()[-1]) and said()[-1].endswith("health: refused")
        assert not at_first or "not in `weightplane status`" in said()[-1]
        up.set()
        eventually(
            lambda: bool(made) and not any(k.lost for k in made[0]._attached), 10, "it attaches once vLLM answers"
        )
    finally:
        up.set()
        thread.join(10)
        made[0].close()


def test_a_vllm_without_weight_transfer_is_told_which_flag_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the endpoint (dev mode), and answers 500."""
    driver = HttpDriver(["http://127.0.0.1:1"])

    def refuses(*_: object) -> dict[str, Any]:
        raise DriverError("POST …: HTTP 500: Weight transfer not configured.")

    monkeypatch.setattr(driver, "_call", refuses)
    with pytest.raises(DriverError, match="--weight-transfer-config"):
        driver.initialise([{}], 1)
    driver.close()


def test_a_vllm_that_is_gone_is_why_no_transport_reaches_it() -> None:
    """Also why those do not that this host lacks: their absence is not what keeps the replica out."""
    driver = Pretended()
    with engine(driver) as e:
        for k in e._attached:
            k.close()
        made = e.offers(0, "r/0", ("shm",))
        assert made is not None and made[0] == [] and set(made[1]) == set(registry.names())
        assert all("worker 0 is gone" in why and "Is vLLM up?" in why for why in made[1].values())


@pytest.mark.parametrize("policy", [CachePolicy.CLEAR, CachePolicy.KEEP, CachePolicy.SALT])
def test_the_old_cache_is_gone_before_generation_goes_on(policy: CachePolicy) -> None:
    """Traps 8, 9: vLLM clears nothing by itself; also where an operator's pause, which keeps it, came first."""
    driver = Pretended()
    with engine(driver) as e:
        e.pause("operator", PauseMode.KEEP)
        assert e.wait_paused("operator", 5)
        e.begin(update(cache=policy))
        e.pause("update", PauseMode.KEEP)
        assert e.wait_paused("update", 5)
        e.apply("u")
        e.commit("u")
        e.resume("update")
        e.resume("operator")
        clear = ["clear"] if policy is CachePolicy.CLEAR else []
        assert driver.calls == ["KEEP", "apply", *clear, "resume"]


class Held(Pretended):
    """Its call that streams ends when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[str | None] = []
        self.ends = threading.Event()

    def update(self, info: Mapping[str, Any], label: Label, timeout: float) -> None:
        assert self.ends.wait(timeout)
        self.labels.append(label())


def test_what_is_dropped_in_place_is_not_called_by_its_version() -> None:
    """vLLM's call ends either way, and with it comes the label of what it generates from then on."""
    for dropped in (False, True):
        driver = Held()
        with engine(driver) as e:
            e.begin(update(Mode.IN_PLACE))
            e.pause("update", PauseMode.KEEP)
            assert e.wait_paused("update", 5)
            e.writing("u")
            under_way = e._streaming
            assert under_way is not None
            if dropped:
                e.abort("u", wrote=False, reason="enough")
            driver.ends.set()
            under_way.result(5)
            assert driver.labels == [None if dropped else "3"]


class Clearing(Pretended):
    clears_as_it_pauses = True


def test_a_cache_that_the_pause_cleared_is_not_cleared_again() -> None:
    """Nothing is cached while it stands still: only where it may have gone on since is it cleared once more."""
    for mode, woken, clear in (
        (PauseMode.KEEP, False, []),
        (PauseMode.WAIT, False, ["clear"]),
        (PauseMode.KEEP, True, ["clear"]),
    ):
        driver = Clearing()
        with engine(driver) as e:
            e.begin(update())
            e.pause("update", mode)
            assert e.wait_paused("update", 5)
            if woken:  # a wake-up by hand lets it run: the pauses are begun again
                e._desk.again()
                assert e.wait_paused("update", 5)
            e.apply("u")
            e.commit("u")
            assert driver.calls[driver.calls.index("apply") :] == ["apply", *clear]
            e.resume("update")
            e.begin(update())
            e.pause("update", PauseMode.KEEP)
            assert e.wait_paused("update", 5)
            assert e._desk.cleared("update"), "each pause counts for itself"


def test_the_pause_of_an_update_recomputes_what_is_in_flight() -> None:
    """Trap 9: with `clear`, requests that are kept start their keys anew; with `keep` they do not."""
    for policy, asked in ((CachePolicy.CLEAR, "KEEP clear"), (CachePolicy.KEEP, "KEEP")):
        driver = Pretended()
        with engine(driver) as e:
            e.begin(update(cache=policy))
            e.pause("update", PauseMode.KEEP)
            assert e.wait_paused("update", 5) and driver.calls == [asked]


def test_an_abort_passes_a_data_thread_that_is_stuck() -> None:
    """Trap 11: vLLM's core and our data thread hang in a receive; the session's own thread frees them."""
    links: list[WorkerLink] = []
    listener = Listener(None, lambda _, link, h: links.append(WorkerLink(link, h, lambda _: None)))
    listener.expect({"t"})
    worker = Worker()
    session = WorkerSession(worker, listener.path, hello("t")).start()  # type: ignore[arg-type]
    eventually(lambda: links, 5, "hello")
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(links[0].call("take", 20)))
    waiting.start()
    eventually(lambda: worker.asked == ["take"], 5, "the data thread is in it")
    links[0].post("abort", update_id="u", reason="enough")
    waiting.join(5)
    assert answers == [{"freed": True}], "the abort waits behind what it is to free"
    session.stop()
    listener.close()


# --- sleep


def test_it_falls_asleep_paused_and_wakes_up_in_two_steps() -> None:
    """Trap 13. What the workers lack is noted with them before it is so; the cache comes last, and lets it run."""
    driver = Pretended()
    with engine(driver) as e:
        assert e.sleep_levels == (1, 2)
        e.sleep(1)
        assert driver.calls == ["KEEP clear", "sleep 1"]
        assert e.asleep() == {"weights", "kv_cache"} and e.holders() == {"sleep"} and not e.mixed()
        with pytest.raises(EngineError, match="asleep"):
            e.begin(update())
        with pytest.raises(EngineError, match="asleep"):
            e.sleep(1)
        with pytest.raises(EngineError, match="weights come first"):
            e.wake(frozenset({"kv_cache"}))
        e.wake(frozenset({"weights"}))
        assert e.asleep() == {"kv_cache"} and e.holders() == {"sleep"}
        e.begin(update())
        e.pause("update", PauseMode.KEEP)
        assert e.wait_paused("update", 5)
        e.apply("u")
        e.commit("u")
        e.resume("update")
        e.wake(frozenset({"kv_cache"}))
        assert driver.calls[2:] == ["wake weights", "apply", "clear", "wake kv_cache last"] and not e.holders()


def test_weights_that_a_sleep_dropped_are_never_served() -> None:
    """Trap 13: the fence stands until an update committed; until then the last of it does not wake up."""
    driver = Pretended()
    with engine(driver) as e:
        e.sleep(2)
        assert "dropped" in e.mixed() and e.holders() == {"sleep", "dirty"}
        e.wake(frozenset({"weights"}))
        with pytest.raises(EngineError, match=r"lost: .*Publish first"):
            e.wake(frozenset({"kv_cache"}))
        assert not any("last" in c for c in driver.calls)


def test_a_sleep_that_fails_leaves_it_awake() -> None:
    class Fails(Pretended):
        def sleep(self, level: int, timeout: float) -> None:
            raise DriverError("no")

    driver = Fails()
    with engine(driver) as e:
        with pytest.raises(DriverError):
            e.sleep(1)
        assert not e.asleep() and not e.holders() and driver.calls[-1] == "resume"


def test_an_engine_without_a_pool_says_why_it_cannot_sleep() -> None:
    class Unpooled(Pretended):
        def initialise(self, infos: Sequence[Mapping[str, Any]], timeout: float) -> None:
            for info in infos:
                said = hello(info["token"], device="cuda", sleep_refusal=sleep_refusal(vllm, "cuda"))
                WorkerSession(Worker(), info["socket"], said).start()  # type: ignore[arg-type]

    vllm = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))
    with engine(Unpooled()) as e:
        assert e.sleep_levels == () and "--enable-sleep-mode" in e.sleep_refusal
        with pytest.raises(EngineError, match="enable-sleep-mode"):
            e.sleep(1)
    vllm.model_config.enable_sleep_mode = True
    assert not sleep_refusal(vllm, "cuda") and not sleep_refusal(vllm, "cpu")


# --- two data-parallel instances, and servers that do not answer


class Instance:
    """An HTTP server as vLLM's dev endpoints are, with vLLM's own flag of an update that is under way."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.active = self.paused = self.stuck = False
        self.let_go = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.partition("?")[0]
                status, answer = outer.answer(path, json.loads(body) if body else None)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append(path)
        self.bodies[path] = body
        if self.stuck:
            self.let_go.wait(20)
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == "/start_weight_update":
            if self.active:
                return 500, {"error": "already active"}
            self.active = True
        if path == "/finish_weight_update":
            self.active = False
        return 200, {"is_paused": self.paused, "is_sleeping": False, "success": True}

    def close(self) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def two() -> Iterator[list[Instance]]:
    made = [Instance(), Instance()]
    yield made
    for i in made:
        i.close()


def test_every_data_parallel_instance_is_called(two: list[Instance]) -> None:
    """Trap 14: behind an external load balancer each instance pauses, loads and clears for itself."""
    driver = HttpDriver([i.url for i in two])
    assert driver.instances == 2 and driver.alive(5)
    driver.initialise([{"token": "t0"}, {"token": "t1"}], 5)
    driver.pause(PauseMode.KEEP, True, 5)
    assert driver.is_paused(5)
    driver.update({"do": "apply"}, lambda: "7", 5)
    driver.clear_cache(5)
    driver.resume(5)
    for n, instance in enumerate(two):
        assert instance.asked == [
            "/health",
            "/init_weight_transfer_engine",
            "/pause",
            "/is_paused",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/resume",
        ]
        assert instance.bodies["/init_weight_transfer_engine"] == {"init_info": {"token": f"t{n}"}}, "a token each"
        assert instance.bodies["/finish_weight_update"] == {"weight_version": "7"}
    two[1].paused, two[0].paused = False, True
    assert not driver.is_paused(5), "one that runs is enough"
    driver.close()


def test_requests_in_flight_are_those_of_every_instance(two: list[Instance], monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's metrics name them; those that are queued wait for nobody's end, and no metric is no request."""
    driver = HttpDriver([i.url for i in two])
    line = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="%d",model_name="m"} %s\n'
    text = line % (0, "2.0") + line % (1, "3.0") + 'vllm:num_requests_waiting{engine="0",model_name="m"} 9.0\n'
    monkeypatch.setattr(driver, "_ask", lambda i, *_: text)
    assert driver.in_flight(1) == 10
    monkeypatch.setattr(driver, "_ask", lambda i, *_: "")
    assert driver.in_flight(1) == 0
    driver.close()


def test_requests_are_counted_while_a_pause_waits_for_them_and_not_after(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drains(Pretended):
        done, dead = threading.Event(), False

        def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
            assert self.done.wait(10)

        def in_flight(self, timeout: float) -> int:
            if self.dead:
                raise AttributeError("another release's")
            return 3

    monkeypatch.setattr(adapter, "COUNT_EVERY_S", 0.0)
    driver = Drains()
    with engine(driver) as e:
        e.pause("operator", PauseMode.WAIT)
        assert not e.wait_paused("operator", 0.01) and e.running_requests == 0, "no update waits"
        e.resume("operator")
        e.pause("update", PauseMode.WAIT)
        assert not e.wait_paused("update", 0.01) and e.running_requests == 3
        driver.dead = True
        assert not e.wait_paused("update", 0.01) and e.running_requests == 0, "it does not fail the pause"
        driver.dead = False
        assert not e.wait_paused("update", 0.01) and e.running_requests == 3
        driver.done.set()
        assert e.wait_paused("update", 5) and e.running_requests == 0


def test_a_replica_of_two_instances_waits_for_the_workers_of_both() -> None:
    """Trap 14: nothing is asked of an instance alone."""
    driver = Pretended(instances=2)
    with engine(driver) as e:
        assert len(e.workers) == 2
        e.begin(update())
        e.pause("update", PauseMode.KEEP)
        assert e.wait_paused("update", 5)
        e.apply("u")
        e.commit("u")
        for worker in driver.workers:
            assert [a for a in worker.asked if a in ("begin", "applied", "commit")] == ["begin", "applied", "commit"]


class Llm:
    """An ``LLM`` as the drivers use it, with vLLM's flag of an update under way; ``stuck``: calls never return."""

    def __init__(self) -> None:
        self.active = self.stuck = False
        self.labels: list[str | None] = []
        core = SimpleNamespace(call_utility=None, _send_input=lambda *_: None)
        self.llm_engine = SimpleNamespace(engine_core=core)

    def start_weight_update(self) -> None:
        if self.active:
            raise RuntimeError("already active")
        self.active = True

    def update_weights(self, request: Any) -> None:
        if self.stuck:
            time.sleep(5)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.active = False
        self.labels.append(weight_version)


class AsyncLlm(Llm):
    """The same as coroutines."""

    async def start_weight_update(self) -> None:  # type: ignore[override]
        super().start_weight_update()

    async def update_weights(self, request: Any) -> None:  # type: ignore[override]
        if self.stuck:
            await asyncio.sleep(60)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:  # type: ignore[override]
        super().finish_weight_update(weight_version)


@pytest.fixture(params=["HTTP", "LLM", pytest.param("AsyncLLM", marks=NEEDS_VLLM)])
def driven(request: pytest.FixtureRequest, two: list[Instance]) -> Iterator[tuple[Driver, Any]]:
    """A driver, and the vLLM behind it."""
    if request.param == "HTTP":
        yield HttpDriver([two[0].url]), two[0]
    elif request.param == "LLM":
        llm = Llm()
        yield OfflineDriver(llm), llm
    else:
        importlib.import_module("vllm.distributed.weight_transfer.base")  # slow, and not what is measured
        async_llm = AsyncLlm()
        with Loop() as made:
            yield AsyncDriver(async_llm, made.loop), async_llm


def test_an_update_that_somebody_left_open_does_not_wedge_vllm(driven: tuple[Driver, Any]) -> None:
    """Trap 7: while vLLM counts an update as active it refuses the next start."""
    driver, llm = driven
    llm.active = True
    driver.update({"do": "apply"}, lambda: "7", 5)
    assert not llm.active


def test_a_call_that_never_returns_ends_by_our_deadline(driven: tuple[Driver, Any]) -> None:
    """Traps 10, 11: vLLM's own calls have no time limit."""
    driver, llm = driven
    llm.stuck = True
    begin = time.monotonic()
    with pytest.raises(DriverTimeout) as late:
        driver.update({"do": "apply"}, lambda: "7", 0.3)
    assert isinstance(late.value, DriverError) and time.monotonic() - begin < 2
