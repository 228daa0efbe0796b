"""Cases of kind control that are not critical, by id: pauses, deadlines, who waits for whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests import warm
from tests.cases.base import MOVERS, Even, Small, bits, differing, holds, site, soon
from tests.cases.cases_control import Readers, _Fails, at, breaks, held_up, in_thread, read
from tests.cases.test_control import ask, fleet_of
from tests.faults.tcp import Link
from tests.inference_agent.process import CONFIG, demo_engine
from tests.loop import Loop
from tests.trainer_agent.fleet import fill, hook
from weightplane.cli.client import connect
from weightplane.controlplane.core.model import Config
from weightplane.demo.model import build_model
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.generate import GenerateServer
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.v1 import common_pb2, fleet_pb2

ROOT = Path(__file__).resolve().parents[2]


def pausing(mode: int = common_pb2.PAUSE_MODE_KEEP, **fields: Any) -> Any:
    return ask(fleet_pb2.PauseGenerationRequest, mode=mode, **fields)


def resuming(**fields: Any) -> Any:
    return ask(fleet_pb2.ResumeGenerationRequest, **fields)


@contextmanager
def in_a_pass(engine: TorchModuleEngine) -> Iterator[None]:
    """Somebody is in a pass until the block is left."""
    inside, go = threading.Event(), threading.Event()

    def run() -> None:
        with engine.request(), engine.forward():
            inside.set()
            go.wait(20)

    thread = in_thread(run)
    assert inside.wait(5)
    try:
        yield
    finally:
        go.set()
        thread.join(5)


# --- pauses


def test_C34_a_pause_is_answered_when_all_have_stopped_the_busy_as_the_idle() -> None:
    with site("busy", "idle", make=Even) as f:
        publisher = f.publisher(Even())
        publisher.publish(1)
        stub = fleet_of(publisher)
        with in_a_pass(f.engines["busy"]):
            call = stub.PauseGeneration.future(pausing(), timeout=20)
            soon("the idle one has stopped", lambda: f.state().replicas["idle"].pause_holders)
            assert not call.done(), "the busy one still steps"
        said = call.result()
        assert [list(r.pause_holders) for r in said.replicas] == [["operator"]] * 2
        passed = threading.Event()

        def step(name: str) -> None:
            with f.engines[name].forward():
                passed.set()

        for name in f.engines:
            in_thread(partial(step, name))
        assert not passed.wait(0.1), "one steps although all are paused"
        stub.ResumeGeneration(resuming(), timeout=10)
        assert passed.wait(5)


def test_C52_a_pause_that_aborts_is_answered_and_the_client_gets_what_there_is() -> None:
    served = demo_engine()
    with site() as f:
        engine: Any = served.engine
        f.replica("r0", engine)
        publisher = f.publisher(build_model(CONFIG, 1))
        publisher.publish(1)
        server = GenerateServer(engine, served.generator, stop_with=served.stop_with).start()  # type: ignore[arg-type]
        f.stack.callback(server.stop)
        seen, enter = threading.Event(), engine.gate.forward

        def slow(request: Any = None) -> Any:
            seen.set()
            time.sleep(0.02)  # what a pass takes
            return enter(request)

        engine.gate.forward = slow
        answers: list[Any] = []

        def client() -> None:
            body = json.dumps({"prompts": [[1]], "max_new_tokens": 62, "temperature": 1}).encode()
            with urllib.request.urlopen(f"http://{server.address}/generate", data=body, timeout=20) as answer:
                answers.append((answer.status, json.load(answer)))

        thread = in_thread(client)
        assert seen.wait(10)
        said = fleet_of(publisher).PauseGeneration(pausing(common_pb2.PAUSE_MODE_ABORT), timeout=10)
        assert list(said.replicas[0].pause_holders) == ["operator"]
        thread.join(10)
        ((code, answer),) = answers
        assert code == 200 and answer["aborted"], answer
        (completion,) = answer["completions"]
        assert len(completion["tokens"]) < 62 and not completion["finished"]


def test_C66_a_pause_that_waits_is_answered_only_after_the_drain() -> None:
    with site("r0", make=Even) as f:
        engine, publisher = f.engines["r0"], f.publisher(Even())
        publisher.publish(1)
        passes: list[int] = []
        begun, end, ended = threading.Event(), threading.Event(), threading.Event()

        def request() -> None:
            with engine.request():
                while not end.is_set():
                    with engine.forward():
                        passes.append(1)
                    begun.set()
                    time.sleep(0.002)
            ended.set()

        in_thread(request)
        assert begun.wait(5)
        stub = fleet_of(publisher)
        call = stub.PauseGeneration.future(pausing(common_pb2.PAUSE_MODE_WAIT), timeout=20)
        soon("the pause is under way", lambda: "operator" in engine.holders())
        n = len(passes)
        soon("the request goes on, as it does not under KEEP", lambda: len(passes) > n + 5)
        assert not call.done() and not ended.is_set()
        end.set()
        said = call.result()
        assert ended.wait(5) and list(said.replicas[0].pause_holders) == ["operator"]
        stub.ResumeGeneration(resuming(), timeout=10)


def test_C67_repeats_change_nothing_and_a_mode_that_is_none_is_refused() -> None:
    with site("r0", make=Even) as f:
        engine, publisher = f.engines["r0"], f.publisher(Even())
        publisher.publish(1)
        stub = fleet_of(publisher)

        def is_(*holders: str) -> None:
            assert engine.holders() == set(holders)
            assert f.check_replica("r0").routable is not bool(holders)

        for wrong in (pausing(77), pausing(holder="somebody"), pausing(replica_ids=["r9"])):
            with pytest.raises(grpc.RpcError) as caught:
                stub.PauseGeneration(wrong, timeout=10)
            want = grpc.StatusCode.NOT_FOUND if wrong.replica_ids else grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.code() is want, caught.value.details()
            is_()
        for _ in range(2):
            assert list(stub.PauseGeneration(pausing(), timeout=10).replicas[0].pause_holders) == ["operator"]
            is_("operator")
            with pytest.raises(grpc.RpcError):
                stub.PauseGeneration(pausing(77), timeout=10)
            is_("operator")
        for _ in range(2):
            assert not stub.ResumeGeneration(resuming(), timeout=10).replicas[0].pause_holders
            is_()


class _Lossy(Link):
    """Once told to ``lose``, answers come no more; before, one of its connections is reset as soon as it speaks."""

    def __init__(self, *args: Any) -> None:
        self.resets = 0
        self.loses = False
        super().__init__(*args)

    async def _serve(self, reader: Any, writer: Any) -> None:
        if self.resets:
            self.resets -= 1
            await reader.read(1)
            writer.transport.abort()
            return
        await super()._serve(reader, writer)

    async def _pump(self, source: Any, sink: Any) -> None:
        if sink not in self._to_member:
            await super()._pump(source, sink)
            return
        try:
            while data := await source.read(65536):
                if self.loses:
                    self.loses = False
                    sink.transport.abort()
                    return
                sink.write(data)
                await sink.drain()
        except OSError:
            sink.transport.abort()


@pytest.mark.parametrize("lost", ["on its way", "its answer"])
def test_C43_a_resume_that_is_lost_is_sent_again_and_until_then_the_pause_shows(lost: str) -> None:
    """What an operator's command calls; the repeat carries the same request, so that it counts once."""
    with site("r0", make=Even) as f, Loop() as loop:
        publisher = f.publisher(Even())
        publisher.publish(1)
        with closing(_Lossy(loop, f.address)) as link, connect(link.address) as c:
            if lost == "its answer":
                c.fleet.PauseGeneration(pausing(), timeout=c.timeout)
                link.loses = True
            else:
                fleet_of(publisher).PauseGeneration(pausing(), timeout=10)
                link.resets = 1
            shown = fleet_of(publisher).ListReplicas(fleet_pb2.ListReplicasRequest(group="g"), timeout=10)
            assert list(shown.replicas[0].pause_holders) == ["operator"] and not shown.replicas[0].routable
            began = time.monotonic()
            said = c.fleet.ResumeGeneration(resuming(), timeout=c.timeout)
            assert not said.replicas[0].pause_holders and time.monotonic() - began < c.timeout
        assert not f.engines["r0"].holders() and f.check_replica("r0").routable
        assert (link.resets, link.loses) == (0, False)


def test_C61_after_every_update_generation_goes_on_or_says_why_not() -> None:
    with site(make=Even) as f:
        engine = _Fails(Even())
        f.replica("r0", engine)
        module = Even()
        publisher = f.publisher(module, update_timeout=5)
        module.become(1)
        publisher.publish(1)
        server = GenerateServer(engine, lambda *a, **k: [])
        f.stack.callback(server._http.server_close)
        with Readers(engine, passes=1) as readers:

            def goes_on(what: str) -> None:
                n = len(readers.outputs)
                soon(what, lambda: len(readers.outputs) > n + 4)
                assert not server.why_not() and not engine.holders()

            for step, (mode, pause) in enumerate(
                [(m, p) for m in ("staged", "in_place") for p in ("keep", "wait", "abort")], 2
            ):
                module.become(step)
                publisher.publish(step, mode=mode, pause=pause)
                goes_on(f"it goes on after an update {mode}, {pause}")
            with hook("replica.receive.inside", at(2, breaks)), pytest.raises(UpdateFailed):
                publisher.publish(20, mode="staged")
            goes_on("it goes on after an update that failed before the decision")
            engine.at = "apply"
            assert publisher.publish(21, mode="staged").ready == ()
            assert "device lost" in server.why_not() and "dirty" in engine.holders()
            engine.at = ""
            module.become(22)
            publisher.publish(22)
            goes_on("it goes on after the update that heals it")


# --- who waits for whom, and for how long


@pytest.mark.parametrize("transport", MOVERS)
def test_C48_a_source_is_kept_until_the_slowest_has_read_it(transport: str) -> None:
    """A receiver whose loop is blocked; the trainer is at its next step as soon as it may be, and asks for the next."""
    with site("r0", "r1") as f:
        module, go, readers = Small(1), threading.Event(), [0]
        old = bits(Small(1))
        publisher = f.publisher(module, transport=transport)
        publisher.init()
        blocked = threading.Event()

        def block(n: int) -> None:
            readers[0] += 1
            if n == 2:
                blocked.set()
                go.wait(20)

        with hook("replica.receive.inside", block):
            handle = publisher.publish_async(1)
            assert blocked.wait(10)
            following = publisher.publish_async(2)
            assert not handle.source_free.wait(0.2) and not following.source_free.is_set()
            go.set()
            assert handle.source_free.wait(10)
            assert set(handle.result(10).ready) == {"r0", "r1"}
            assert set(following.result(10).ready) == {"r0", "r1"}
        assert all(not differing(bits(e.modules[0]), old) for e in f.engines.values())
        fill(module, 3)
        go.clear()
        blocked.clear()
        with hook("replica.receive.inside", block):
            with pytest.raises(UpdateFailed) as caught:
                publisher.publish(3, update_timeout=1.0)
            go.set()
        assert caught.value.failures.keys() <= {"r0", "r1"}, caught.value
        assert set(publisher.publish(4).ready) == {"r0", "r1"}, "after a typed error it may try again"
        assert all(holds(e, module) for e in f.engines.values())


_TIMES_OUT = """
import sys
from tests.cases.base import Small
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource

publisher = Publisher(sys.argv[1], "g", ModuleSource(Small(1)), transport=sys.argv[2], bucket_bytes=4096)
for line in sys.stdin:
    try:
        print("ready", publisher.publish(1, update_timeout=float(line)).ready, flush=True)
    except UpdateFailed as e:
        print("failed", str(e).replace("\\n", " "), flush=True)
"""  # it ends without closing anything


@pytest.mark.parametrize("transport", dict.fromkeys(("shm", MOVERS[-1])))
def test_C50_a_time_out_among_the_data_leaves_a_process_that_works_and_one_that_ends(transport: str) -> None:
    with site("r0") as f:
        go = threading.Event()
        f.stack.callback(go.set)

        def block(n: int) -> None:
            if n == 3:
                go.wait(30)

        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        trainer = warm.Popen(
            [sys.executable, "-c", _TIMES_OUT, f.address, transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        f.stack.callback(trainer.kill)
        orders, answers = trainer.stdin, trainer.stdout
        assert orders is not None and answers is not None

        def publish(seconds: float) -> str:
            print(seconds, file=orders, flush=True)
            return str(answers.readline())

        with hook("replica.receive.inside", block):
            said = publish(1.2)
            assert said.startswith("failed") and "[r0]" in said, said
            go.set()
        assert publish(20).startswith("ready ('r0',)")
        go.clear()
        with hook("replica.receive.inside", block):
            assert publish(1.2).startswith("failed")
            orders.close()
            assert trainer.wait(15) == 0, "something of it was stuck"
        answers.close()


def test_C50_no_time_out_but_the_callers_ends_a_long_transfer_that_goes_on() -> None:
    """Longer than the lease, bucket by bucket: it takes the time that it takes."""
    with site("r0", config=Config(beat_s=0.2, ttl_s=2.0, quiesce_s=1.0)) as f:
        f.agents["r0"].stop(leave=False)
        f.replica("r0", f.engines["r0"], heartbeat=True)
        module = Small(1)
        publisher = f.publisher(module)
        publisher.init()
        began = time.monotonic()
        with hook("replica.receive.inside", lambda n: time.sleep(0.3)):  # a slow wire
            assert publisher.publish(1).ready == ("r0",)
        assert time.monotonic() - began > 2.0 and holds(f.engines["r0"], module)


@pytest.mark.alone
@pytest.mark.parametrize("failure", ["raise", "retry"])
def test_C62_what_retries_there_are_end_with_the_callers_deadline(failure: str) -> None:
    with site("r0", "r1", make=Even) as f:
        publisher = f.publisher(Even(), update_timeout=1.5, failure=failure)
        publisher.init()
        go = threading.Event()
        f.stack.callback(go.set)
        with hook("replica.arm.before", partial(held_up, go)):  # both are down, as far as anybody can tell
            began = time.monotonic()
            with pytest.raises(UpdateFailed) as caught:
                publisher.publish(1)
            assert time.monotonic() - began < 1.5 + 2.0, caught.value
            go.set()
        f.idle("it is over")
        assert read(f.engines["r0"]) == {0.0}
