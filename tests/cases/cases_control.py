"""Control: what a failure, a race or a departure leaves behind, and who may serve meanwhile."""

from __future__ import annotations

import copy
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import grpc
import torch
from torch import nn

from tests.cases.base import Even, Site, Small, bits, case, check, differing, must, refused, site, soon
from tests.inference_agent.models import Awkward, manifest_of
from tests.inference_agent.trainer import Trainer
from tests.process.harness import http
from tests.trainer_agent.fleet import fill, hook, same
from weightplane.controlplane import failpoints
from weightplane.controlplane.core.model import NONE_HELD, SLEEP_TAGS, Config, Held
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.states import PauseMode, Verify, Weights
from weightplane.controlplane.failpoints import FailpointError
from weightplane.inference_agent.engines.base import EngineError
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.generate import GenerateServer
from weightplane.inference_agent.session import SessionStatus
from weightplane.trainer_agent.errors import PublishError, UpdateFailed
from weightplane.trainer_agent.sources import StateDictSource
from weightplane.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc
from weightplane.v1 import weight_transfer_pb2 as wt


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def at(n: int, action: Callable[[], None]) -> Callable[[int], None]:
    """At the n-th hit of a failpoint do this."""

    def on(hit: int) -> None:
        if hit == n:
            action()

    return on


def breaks() -> None:
    raise FailpointError("the receiver broke in the middle of the update")


def held_up(go: threading.Event, _: int) -> None:
    go.wait(5)


@contextmanager
def small_trainer(f: Site, module: nn.Module, **options: Any) -> Iterator[Trainer]:
    """A trainer that speaks the contract by hand."""
    with Trainer(f.address, manifest_of(module), "shm", bucket_bytes=4096, **options) as trainer:
        yield trainer


def values_of(trainer: Trainer, module: nn.Module) -> dict[int, torch.Tensor]:
    state = module.state_dict(keep_vars=True)
    return {i: state[t.name].detach().clone() for i, t in enumerate(trainer.manifest)}


class _Fails(TorchModuleEngine):
    """A receiver that says no at a chosen step."""

    at = ""
    wait_s = 0.0

    def prepare(self, update_id: str) -> None:
        if self.at == "prepare":
            time.sleep(self.wait_s)
            raise EngineError("the receiver cannot prepare: no room for layers.2", ["layers.2.weight"])
        super().prepare(update_id)

    def apply(self, update_id: str) -> None:
        if self.at == "apply":
            raise EngineError("the receiver cannot apply: device lost")
        super().apply(update_id)


@case
def C01_after_a_dead_trainers_update_the_next_start_succeeds() -> None:
    with site("r0", "r1") as f:
        lives = f.lives
        with small_trainer(f, Small()) as dead:
            dead.init()
            dead.start(1)
        check("its update is still open", f.state().open is not None)
        module = Small(7)
        restarted = f.publisher(module, takeover=True, on_busy="refuse")
        with must("the restarted trainer's start succeeds"):
            receipt = restarted.publish(2)
        check("the full update is on every replica", set(receipt.ready) == {"r0", "r1"}, receipt)
        check("the bytes are exact", all(same(e, module) for e in f.engines.values()))
        check("no engine was restarted", f.lives == lives)


@case
def C02_a_replacement_engine_is_not_ready_before_its_first_update() -> None:
    with site("r0", "r1") as f:
        module = Small(1)
        publisher = f.publisher(module)
        version = publisher.publish(1).version
        check("both are routable", all(f.check_replica(n, version).routable for n in ("r0", "r1")))
        f.agents["r1"].stop(leave=False)
        engine = TorchModuleEngine(Small(9))
        f.replica("r1", engine)
        fleet = fleet_pb2_grpc.FleetServiceStub(publisher._hold.client._channel)
        for _ in range(2):
            for least in (0, 1, version):
                said = f.check_replica("r1", least)
                check("the replacement is neither ready nor routable", not said.ready and not said.routable, said)
                check("it holds no version", said.replica.held.version == 0, said)
            server = GenerateServer(engine, lambda *a, **k: [])
            check("it generates nothing", "no update" in server.why_not(), server.why_not())
            server._http.server_close()
            fleet.ResumeGeneration(fleet_pb2.ResumeGenerationRequest(request_id="resume", group="g"), timeout=10)
        check("the other one is routable all the while", f.check_replica("r0", version).routable)
        fill(module, 2)
        publisher.publish(2)
        check("after a full update it is routable", f.check_replica("r1", version + 1).routable)
        check("and exact", same(engine, module))


@case
def C03_a_fleet_switches_together_or_not_at_all() -> None:
    with site("r0", "r1") as f:
        broken = _Fails(Small())
        f.replica("r2", broken)
        module = Small(1)
        publisher = f.publisher(module)
        first = publisher.publish(1)
        old = copy.deepcopy(module)
        fill(module, 2)
        broken.at, broken.wait_s = "prepare", 0.3
        e = refused("the update fails", lambda: publisher.publish(2), UpdateFailed)
        f.idle("the update is over")
        moved = [n for n, engine in f.engines.items() if not same(engine, old)]
        check("nobody switched", not moved, moved)
        check("the failed receiver is named", "r2" in e.failures, e, e.failures)
        outcomes = {o.replica_id: o for o in e.update.outcomes}
        check("each receiver's status is listed", set(outcomes) == {"r0", "r1", "r2"}, outcomes)
        held = {n: engine.held()[0].version for n, engine in f.engines.items()}
        check("all hold the version before", set(held.values()) == {first.version}, held)
        check("and serve it", all(f.check_replica(n, first.version).routable for n in f.engines))

        broken.at = "apply"
        receipt = publisher.publish(3)
        states = {r.replica_id: r.state for r in receipt.replicas}
        check(
            "after the decision the one that failed is named", states == {"r0": "READY", "r1": "READY", "r2": "DIRTY"}
        )
        check("it is fenced and not routable", "dirty" in broken.holders() and not f.check_replica("r2").routable)
        broken.at = ""
        fill(module, 4)
        check("the next update heals it", set(publisher.publish(4).ready) == {"r0", "r1", "r2"})
        check("all hold the same bytes", all(same(engine, module) for engine in f.engines.values()))


@case
def C04_a_chunk_that_fails_in_place_leaves_a_fenced_engine_that_heals() -> None:
    with site("r0", staged=False) as f:
        engine, module = f.engines["r0"], Small(1)
        publisher = f.publisher(module, mode="in_place")
        publisher.publish(1)
        fill(module, 2)
        with hook("replica.receive.inside", at(3, breaks)):
            refused("the update fails", lambda: publisher.publish(2), UpdateFailed)
        f.idle("the update is over")
        check("generation is blocked", engine.mixed() and "dirty" in engine.holders(), engine.mixed(), engine.holders())
        entered = threading.Event()

        def generate() -> None:
            with engine.forward():
                entered.set()

        in_thread(generate)
        check("no pass runs on mixed weights", not entered.wait(0.2))
        said = f.check_replica("r0")
        check("it is flagged DIRTY and not routable", f.state().replicas["r0"].weights is Weights.DIRTY, said)
        check("its agent is alive", f.agents["r0"].status().session is SessionStatus.LIVE and said.live)
        with must("a full update heals it"):
            publisher.publish(3)
        check("the values are exact", same(engine, module))
        check("generation goes on", entered.wait(5) and not engine.holders())


@case
def C06_an_update_to_the_same_weights_changes_no_bit() -> None:
    with site("r0", make=Awkward) as f:
        engine = f.engines["r0"]
        module = copy.deepcopy(engine.modules[0])
        before, where = bits(engine.modules[0]), [p.data_ptr() for p in engine.modules[0].parameters()]
        publisher = f.publisher(module)
        for step, options in enumerate(({"verify": "off"}, {"mode": "in_place"}, {"verify": "full"}, {}), 1):
            with must("the update to the same weights commits"):
                publisher.publish(step, **options)
            changed = differing(before, bits(engine.modules[0]))
            check("the engine's state is bit-identical", not changed, changed)
        check("its tensors lie where they lay", [p.data_ptr() for p in engine.modules[0].parameters()] == where)


@case
def C07_metadata_larger_than_a_message_travels() -> None:
    names = ["n" * 210 + f"_{i}" for i in range(20_000)]

    def make() -> nn.Module:
        module = nn.Module()
        for name in names:
            module.register_buffer(name, torch.zeros(()))
        return module

    values = torch.arange(len(names), dtype=torch.float32)
    with site("r0", make=make) as f:
        publisher = f.publisher(StateDictSource(dict(zip(names, values.unbind(), strict=True))))
        check("the names alone exceed a message", sum(map(len, names)) > 4 << 20)
        with must("an update of 20,000 long names commits"):
            publisher.publish(1, update_timeout=60)
        held = torch.stack([b for _, b in f.engines["r0"].modules[0].named_buffers()])
        check("every value is exact", torch.equal(held, values))


class _Sleeper(TorchModuleEngine):
    """A receiver whose memory is somebody else's while it sleeps: level 1 keeps a copy, level 2 does not."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._asleep: frozenset[str] = frozenset()
        self._kept: dict[str, torch.Tensor] | None = None

    @property
    def sleep_levels(self) -> tuple[int, ...]:
        return (1, 2)

    def asleep(self) -> frozenset[str]:
        return self._asleep

    def sleep(self, level: int) -> None:
        self.pause("sleep", PauseMode.KEEP)
        if not self.wait_paused("sleep", 5):
            raise EngineError("it does not stand still")
        (module,) = self.modules
        if level == 1:
            self._kept = {n: t.clone() for n, t in module.state_dict().items()}
        else:
            self._held = NONE_HELD
            self.soil("its weights were dropped")
        self._asleep = frozenset(SLEEP_TAGS)
        with torch.no_grad():
            for t in module.state_dict().values():
                t.fill_(-1)

    def wake(self, tags: frozenset[str]) -> None:
        if "weights" in tags and self._kept is not None:
            self.modules[0].load_state_dict(self._kept)
            self._kept = None
        self._asleep -= tags
        if not self._asleep:
            self.resume("sleep")


@case
def C08_what_is_ready_after_a_sleep_is_what_is_in_memory() -> None:
    with site() as f:
        engine = _Sleeper(Even())
        f.replica("r0", engine)
        module = Even()
        publisher = f.publisher(module)
        fleet = fleet_pb2_grpc.FleetServiceStub(publisher._hold.client._channel)

        def order(kind: Any, **fields: Any) -> fleet_pb2.ReplicaInfo:
            call = fleet.SleepReplica if kind is fleet_pb2.SleepReplicaRequest else fleet.WakeReplica
            answer = call(kind(request_id=uuid.uuid4().hex, group="g", replica_id="r0", **fields), timeout=10)
            replica: fleet_pb2.ReplicaInfo = answer.replica
            return replica

        def sleep(level: int) -> None:
            order(fleet_pb2.SleepReplicaRequest, level=level)

        def wake(*tags: str) -> fleet_pb2.ReplicaInfo:
            return order(fleet_pb2.WakeReplicaRequest, tags=tags)

        module.become(1)
        publisher.publish(1)
        sleep(1)
        refused("who sleeps is in no update", lambda: publisher.publish(2), PublishError)
        check("it wakes up as it fell asleep", wake().routable and read(engine) == {1.0}, read(engine))
        sleep(1)
        wake("weights")
        module.become(3)
        publisher.publish(3)
        check("an update before the rest wakes up is what is served", wake().routable and read(engine) == {3.0})
        sleep(2)
        said = f.check_replica("r0")
        check("lost weights are not ready", not said.ready and said.replica.held.version == 0, said)
        wake("weights")
        refused("lost weights are not served", lambda: wake("kv_cache"), grpc.RpcError)
        module.become(4)
        publisher.publish(4)
        check("a full update makes it ready", wake().routable and read(engine) == {4.0}, read(engine))


@case
def C11_a_failed_update_leaves_no_flag_behind() -> None:
    with site("r0", "r1") as f:
        module = Small(1)
        publisher = f.publisher(module, on_busy="refuse")
        for step in (1, 3):
            with hook("replica.receive.inside", at(2, breaks)):
                refused("the update fails", partial(publisher.publish, step), UpdateFailed)
            f.idle("the failed update is over", 2.5)
            fill(module, step)
            with must("the next start succeeds"):
                receipt = publisher.publish(step + 1)
            check("it is a full update", set(receipt.ready) == {"r0", "r1"}, receipt)
            check("the bytes are exact", all(same(e, module) for e in f.engines.values()))


@case
def C13_an_update_completes_while_a_paused_request_stands_still() -> None:
    with site("r0", make=Even) as f:
        engine, module = f.engines["r0"], Even()
        publisher = f.publisher(module)
        fleet = fleet_pb2_grpc.FleetServiceStub(publisher._hold.client._channel)
        publisher.publish(1)
        seen: list[int] = []

        def generate() -> None:
            with engine.request():
                while not seen or seen[-1] < 3:
                    with engine.forward() as tag:
                        seen.append(tag.trainer_step)
                    time.sleep(0.005)

        thread = in_thread(generate)
        soon("a request runs", lambda: seen)
        pause = fleet_pb2.PauseGenerationRequest(request_id="p", group="g", mode=common_pb2.PAUSE_MODE_KEEP)
        fleet.PauseGeneration(pause, timeout=10)
        soon("the operator's pause is in force", lambda: "operator" in engine.holders())
        for step, mode in ((2, "staged"), (3, "in_place")):
            with must("the update completes although a paused request is in flight"):
                publisher.publish(step, mode=mode, pause="wait", update_timeout=3)
        check("the operator's pause is all that is left", engine.holders() == {"operator"})
        fleet.ResumeGeneration(fleet_pb2.ResumeGenerationRequest(request_id="r", group="g"), timeout=10)
        thread.join(5)
        check("the request goes on where it was", not thread.is_alive() and seen[-1] == 3)


def read(engine: TorchModuleEngine) -> set[float]:
    """What stands in a model of ``Even``."""
    model = engine.modules[0]
    assert isinstance(model, Even)
    return model.read()


class Readers:
    """Requests without end: every one is some passes, every pass reads the whole model with a break in the middle."""

    def __init__(self, engine: TorchModuleEngine, threads: int = 2, passes: int = 3) -> None:
        self.engine, self.passes = engine, passes
        self.torn: list[Any] = []
        self.outputs: list[set[float]] = []
        self._stop = threading.Event()
        self._threads = [in_thread(self._run) for _ in range(threads)]

    def _run(self) -> None:
        model: Any = self.engine.modules[0]
        while not self._stop.is_set():
            output: set[float] = set()
            with self.engine.request():
                for _ in range(self.passes):
                    with self.engine.forward() as tag:
                        read = model.read(0.002)
                    if read != {float(max(tag.trainer_step, 0))}:
                        self.torn.append((tag.trainer_step, read))
                    output |= read
            self.outputs.append(output)

    def __enter__(self) -> Readers:
        soon("requests run", lambda: self.outputs)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for t in self._threads:
            t.join(5)


def slowly(_: int) -> None:
    time.sleep(0.003)


@case
def C15_no_output_mixes_two_versions_under_a_constant_stream() -> None:
    with site("r0", make=Even) as f:
        module = Even()
        publisher = f.publisher(module, pause="wait")
        with Readers(f.engines["r0"]) as readers, hook("replica.receive.inside", slowly):

            def more(n: int) -> bool:
                return len(readers.outputs) > n

            for step in range(1, 7):
                module.become(step)
                publisher.publish(step, mode="in_place" if step % 2 else "staged")
                n = len(readers.outputs)
                soon("new requests run after it", partial(more, n))
        mixed = [o for o in readers.outputs if len(o) != 1]
        check("every output is of one version", not mixed, mixed[:3], readers.torn[:3])
        check("all versions were seen", {6.0} in readers.outputs and len({min(o) for o in readers.outputs}) >= 6)


@case
def C16_a_receivers_failure_is_raised_on_every_source_rank() -> None:
    with site("r0", "r1") as f:
        module = Small(1)
        ranks = [
            f.publisher(module, rank=r, world_size=2, incarnation="job", trainer_id="t", update_timeout=8)
            for r in range(2)
        ]

        def one(rank: int, step: int) -> tuple[Any, float]:
            try:
                return ranks[rank].publish(step), time.monotonic()
            except Exception as e:
                return e, time.monotonic()

        def everyone(step: int) -> list[tuple[Any, float]]:
            with ThreadPoolExecutor(2) as pool:
                return list(pool.map(lambda r: one(r, step), range(2)))

        broke: list[float] = []

        def break_one() -> None:
            broke.append(time.monotonic())
            breaks()

        with hook("replica.receive.inside", at(2, break_one)):
            ended = everyone(1)
        errors = [e for e, _ in ended]
        check("every rank raises", all(isinstance(e, UpdateFailed) for e in errors), errors)
        named = all("the receiver broke" in str(e) for e in errors)
        check("every rank raises the receiver's own error", named, errors)
        late = max(when for _, when in ended) - broke[0]
        check("every rank raises at once", late < 4, late)
        fill(module, 2)
        receipts = [r for r, _ in everyone(2)]
        check("the next publish of all ranks commits", all(getattr(r, "committed", False) for r in receipts), receipts)
        check("the bytes are exact", all(same(e, module) for e in f.engines.values()))


@case
def C17_an_init_that_nobody_joins_fails_and_leaves_nothing() -> None:
    with site("r0", config=Config(beat_s=0.2, ttl_s=1.0, quiesce_s=1.0)) as f:
        f.agents["r0"].stop(leave=False)
        f.replica("r0", f.engines["r0"], heartbeat=True)
        with small_trainer(f, Small(), ranks=2) as alone:
            request = wt.InitTransferRequest(
                request_id="i", group="g", trainer_id="t", incarnation="i", rank=0, world_size=2, host_id="h"
            )
            e = refused("it fails", lambda: alone.stub.InitTransfer(request, timeout=0.6), grpc.RpcError)
            check("it says who did not come", "ranks [1] of 2" in str(e.details()), e.details())
        said = f.check_replica("r0")
        check("nothing is ready or routable", not said.ready and not said.routable, said)
        module = Small(3)
        other = f.publisher(module, trainer_id="other")

        def init() -> bool:
            try:
                other.init()
            except PublishError as e:
                return e.reason is not Reason.TRAINER_HELD
            return True

        soon("a new init succeeds once the lease is over", init, 5)
        with must("and its update commits"):
            other.publish(1)
        check("the bytes are exact", same(f.engines["r0"], module))
        check("only now it is routable", f.check_replica("r0", 1).routable)


@case
def C18_a_receivers_failure_status_makes_the_sender_raise() -> None:
    """Of the case the part about full updates; deltas, whose base must then stay, are not built."""
    with site() as f:
        engine = _Fails(Small())
        f.replica("r0", engine)
        module = Small(1)
        publisher = f.publisher(module)
        first = publisher.publish(1)
        fill(module, 2)
        engine.at = "prepare"
        e = refused("the sender raises", lambda: publisher.publish(2), UpdateFailed)
        check("it raises the receiver's words", "no room for layers.2" in str(e) and "r0" in e.failures, e)
        check("the tensor is named", "layers.2.weight" in e.failures["r0"].tensors, e.failures["r0"])
        check("no version was counted as delivered", f.state().committed == Held(first.version, first.update_id))
        engine.at = ""
        receipt = publisher.publish(3)
        check("the next update brings everything", receipt.ready == ("r0",) and same(engine, module))


@case
def C20_no_pass_reads_while_weights_are_written() -> None:
    with site("r0", make=Even) as f:
        module = Even()
        publisher = f.publisher(module)

        def on(hit: str, n: int) -> None:
            if hit in ("replica.apply.inside", "replica.receive.inside"):
                time.sleep(0.002)

        with Readers(f.engines["r0"], passes=40) as readers:
            failpoints.set_hook(on)
            try:
                for step in range(1, 9):
                    module.become(step)
                    publisher.publish(step, mode="in_place" if step % 2 else "staged", pause="keep")
            finally:
                failpoints.set_hook(None)
        check("no pass is torn", not readers.torn, readers.torn[:3])


@case
def C21_a_client_that_goes_away_hurts_nobody_else() -> None:
    with site("r0", make=Even) as f, ExitStack() as stack:
        engine, module = f.engines["r0"], Even()
        module.become(1)
        with small_trainer(f, module) as trainer:
            trainer.init()
            trainer.publish(values_of(trainer, module), 1)
            trainer.start(2)
            go = threading.Event()
            stack.callback(go.set)
            with hook("replica.arm.before", partial(held_up, go)) as reached:
                request = wt.UpdateWeightsRequest(
                    request_id="u",
                    group="g",
                    generation=trainer.generation,
                    update_id=trainer.update_id,
                    epoch=trainer.epoch,
                    seq=1,
                )
                call = trainer.stub.UpdateWeights.future(request, timeout=20)
                check("the call is under way", reached.wait(5))
                call.cancel()
                time.sleep(0.1)
                go.set()
            with must("the server answers after a cancelled call"):
                trainer.abort("its caller went away")
            f.idle("the update is aborted")
            check("the engine serves on", read(engine) == {1.0} and not engine.holders())

        def tokens(prompts: Any, *, max_new_tokens: int, gate: Any, **rest: Any) -> list[Any]:
            for _token in range(max_new_tokens):
                with gate():
                    time.sleep(0.01)
            return []

        server = GenerateServer(engine, tokens).start()
        stack.callback(server.stop)
        host, _, port = server.address.partition(":")
        body = b'{"prompts": [[1]], "max_new_tokens": 30}'
        with socket.create_connection((host, int(port))) as gone:
            gone.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            soon("its request runs", lambda: engine.running_requests)
        code, _ = http(server.address, "/generate", {"prompts": [[1]], "max_new_tokens": 1})
        check("others generate", code == 200, code)
        module.become(3)
        publisher = f.publisher(module, takeover=True)
        with must("a full update commits"):
            publisher.publish(3, pause="wait")
        check("the bytes are exact", read(engine) == {3.0})


@case
def C22_a_cancelled_finish_leaves_version_and_content_in_agreement() -> None:
    with site("r0", make=Even) as f, ExitStack() as stack:
        engine, module = f.engines["r0"], Even()
        trainer = stack.enter_context(small_trainer(f, module))
        trainer.init()
        trainer.publish(values_of(trainer, module), 1)
        module.become(2)
        started = trainer.start(2)
        trainer.send(started, values_of(trainer, module))
        go = threading.Event()
        stack.callback(go.set)
        with hook("replica.apply.before", partial(held_up, go)) as reached:
            request = wt.FinishUpdateRequest(
                request_id="f",
                group="g",
                generation=trainer.generation,
                update_id=trainer.update_id,
                epoch=trainer.epoch,
            )
            call = trainer.stub.FinishUpdate.future(request, timeout=20)
            check("the update is decided and being applied", reached.wait(5))
            call.cancel()
            time.sleep(0.2)
            go.set()
        soon("the engine holds the new version", lambda: engine.held()[0].version == started.version)
        check("its content is that version's", read(engine) == {2.0})
        held = engine.held()[0]
        soon(
            "the control plane says what the engine holds",
            lambda: f.state().committed == held and f.state().replicas["r0"].held == held,
            2,
        )
        soon("it is ready at it", lambda: f.check_replica("r0", held.version).routable, 2)
        info = _outcome(trainer)
        check("whoever asks is told", info.phase == 5 and info.version == held.version, info)


def _outcome(trainer: Trainer) -> Any:
    return trainer.stub.GetUpdate(wt.GetUpdateRequest(group="g", update_id=trainer.update_id), timeout=10).update


@case
def C24_of_two_concurrent_updates_one_is_refused_and_the_newer_stays() -> None:
    with site("r0", make=Even) as f, ExitStack() as stack:
        engine, module = f.engines["r0"], Even()
        slow = stack.enter_context(small_trainer(f, module))
        slow.init()

        def start(step: int) -> Any:
            try:
                return slow.call(
                    "StartUpdate",
                    timeout=4,
                    generation=slow.generation,
                    manifest_id=slow.manifest.id,
                    trainer_step=step,
                    on_busy=common_pb2.ON_BUSY_REFUSE,
                    update_timeout_ms=30_000,
                )
            except grpc.RpcError as e:
                return e

        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(start, (5, 6)))
        busy = [e for e in said if isinstance(e, grpc.RpcError) and "is open" in str(e.details())]
        check("of two concurrent starts one is refused", len(busy) == 1, said)
        (started,) = (s for s in said if not isinstance(s, grpc.RpcError))
        slow.update_id, slow.epoch, slow.verify = started.update_id, started.epoch, Verify.FULL
        module.become(6)
        late, go = values_of(slow, module), threading.Event()
        stack.callback(go.set)
        waiting = threading.Event()

        def delayed(bucket: Any, spans: Any) -> None:
            if bucket.index == 2:
                waiting.set()
                go.wait(10)

        outcome: list[Any] = []

        def send() -> None:
            try:
                slow.send(started, late, delayed)
                outcome.append(slow.finish())
            except Exception as e:
                outcome.append(e)

        thread = in_thread(send)
        check("the older update's data is under way", waiting.wait(5))
        module.become(7)
        receipt = f.publisher(module, takeover=True).publish(7)
        check("the newer one has the higher version", receipt.version > started.version)
        go.set()
        thread.join(10)
        check("the older one is refused", len(outcome) == 1 and isinstance(outcome[0], Exception), outcome)
        check("content and version are the newer one's", read(engine) == {7.0}, read(engine))
        check("so says everyone", engine.held()[0].version == receipt.version == f.state().committed.version)
