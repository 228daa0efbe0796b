"""An agent against the real control plane: updates over shm and grpc, staged and in place, failures, restarts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tests.inference_agent.models import Awkward, Constant, manifest_of
from tests.inference_agent.server import Server, eventually, server
from tests.inference_agent.trainer import Trainer, state_of
from tests.server.certificates import HAS_OPENSSL, authority, certificate
from weightplane.controlplane import failpoints
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.model import NONE_HELD, Held
from weightplane.controlplane.core.shards import chunk_placement
from weightplane.controlplane.core.states import Admin, Mode, PauseMode, Verify, Weights
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.heartbeat import HelperStatus
from weightplane.controlplane.server.security import Security, Tls, parse_tokens
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.base import RequestAborted
from weightplane.inference_agent.engines.conformance import values_for
from weightplane.inference_agent.engines.sharding import cut, shard_module
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.operations import Operations
from weightplane.inference_agent.receipts import Sink
from weightplane.inference_agent.session import SessionStatus
from weightplane.transports.base import ChannelTimeout, PeerLost, TransportError
from weightplane.transports.dtypes import as_bytes
from weightplane.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc
from weightplane.v1 import weight_transfer_pb2 as wt


@pytest.fixture
def plane() -> Iterator[Server]:
    with server() as s:
        yield s


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def replica(stack: ExitStack, plane: Server, name: str, engine: TorchModuleEngine, **options: object) -> InferenceAgent:
    agent = InferenceAgent(plane.address, "g", name, engine, **options)  # type: ignore[arg-type]
    stack.callback(agent.stop)
    agent.start()
    eventually(lambda: name in plane.state().replicas and plane.state().replicas[name].reported, what=f"{name} is here")
    return agent


def holds(engine: TorchModuleEngine, values: dict[int, torch.Tensor]) -> bool:
    manifest = manifest_of(engine.modules[0])
    names = dict(engine.modules[0].state_dict(keep_vars=True))
    return all(as_bytes(names[t.name]).equal(as_bytes(values[manifest.root(i)])) for i, t in enumerate(manifest))


@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("verify", [Verify.FULL, Verify.SAMPLED, Verify.OFF])
def test_two_replicas_commit_together(
    plane: Server, stack: ExitStack, transport: str, mode: Mode, verify: Verify
) -> None:
    engines = [TorchModuleEngine(Awkward()) for _ in range(2)]
    agents = [replica(stack, plane, f"r{i}", e) for i, e in enumerate(engines)]
    manifest = manifest_of(Awkward())
    trainer = stack.enter_context(Trainer(plane.address, manifest, transport, bucket_bytes=4096))
    trainer.init()
    for step in (1, 2, 3):
        values = values_for(manifest, step)
        done = trainer.publish(values, step, mode=mode, verify=verify)
        assert [state_of(o) for o in done.outcomes] == ["READY", "READY"], done
        for engine, agent in zip(engines, agents, strict=True):
            assert holds(engine, values)
            assert engine.held() == (Held(done.version, done.update_id),)
            assert not engine.holders() and agent.status().updates_since_start == step
            with engine.forward() as tag:
                assert (tag.version, tag.trainer_step, tag.incarnation) == (done.version, step, agent.incarnation)
    assert plane.state().committed == Held(done.version, done.update_id)


@pytest.fixture
def fail_at() -> Iterator[Callable[..., None]]:
    """``fail_at(name, action=None, nth=1)``: at the nth hit run ``action`` (default: raise)."""

    def install(name: str, action: Callable[[], None] | None = None, nth: int = 1) -> None:
        def hook(hit: str, n: int) -> None:
            if hit == name and n == nth:
                if action is None:
                    raise failpoints.FailpointError(f"{hit} (hit {n})")
                action()

        failpoints.set_hook(hook)

    yield install
    failpoints.set_hook(None)


class Pair:
    """A replica of ``Constant`` and a trainer whose version k is k everywhere."""

    def __init__(self, stack: ExitStack, plane: Server, transport: str = "shm", **engine: Any) -> None:
        self.plane = plane
        self.module = Constant()
        self.engine = TorchModuleEngine(self.module, **engine)
        self.agent = replica(stack, plane, "r", self.engine)
        self.manifest = manifest_of(self.module)
        self.trainer = stack.enter_context(Trainer(plane.address, self.manifest, transport, bucket_bytes=16384))
        self.trainer.init()

    def values(self, k: float) -> dict[int, torch.Tensor]:
        return {i: torch.full(t.shape, float(k)) for i, t in enumerate(self.manifest)}

    def publish(self, k: int, **options: Any) -> Any:
        return self.trainer.publish(self.values(k), k, **options)

    def content(self) -> set[float]:
        return set(self.module())

    @property
    def known(self) -> Any:
        return self.plane.state().replicas["r"]


def test_quarters_of_four_ranks_land_in_halves_of_two_workers(plane: Server, stack: ExitStack) -> None:
    whole = Awkward(rows=8)
    manifest = manifest_of(whole)
    engine = TorchModuleEngine(shard_module(whole, 2), boxes=cut(2))
    replica(stack, plane, "r", engine)
    trainer = stack.enter_context(Trainer(plane.address, manifest, "shm", ranks=4, bucket_bytes=4096))
    trainer.placements = [chunk_placement(f"rank/{r}", manifest, r, 4) for r in range(4)]
    trainer.init()
    for step in (1, 2):
        values = values_for(manifest, step)
        done = trainer.publish(values, step)
        assert state_of(done.outcomes[0]) == "READY"
        halves = [dict(m.named_parameters(remove_duplicate=False)) for m in engine.modules]
        for i, t in enumerate(manifest):
            parts: list[torch.Tensor] = [h[t.name] for h in halves]
            joined = torch.cat(parts) if t.shape else parts[0]
            assert as_bytes(joined).equal(as_bytes(values[manifest.root(i)])), t.name


def test_T23_a_manifest_that_does_not_fit_is_refused_by_name_before_the_first_byte(
    plane: Server, stack: ExitStack
) -> None:
    pair = Pair(stack, plane)
    pair.publish(1)
    wrong = Manifest.of([*pair.manifest, TensorMeta("layers.8", "float32", (4,))])
    other = stack.enter_context(Trainer(plane.address, wrong, "shm"))
    other.init(takeover=True)
    with pytest.raises(grpc.RpcError) as e:
        other.start(2)
    assert "MANIFEST_MISMATCH" in str(e.value.details()) or "'layers.8'" in str(e.value.details())
    assert "'layers.8'" in str(e.value.details()) and pair.content() == {1.0}
    assert pair.engine.held()[0].version == 1 and not pair.engine.holders()
    back = stack.enter_context(Trainer(plane.address, pair.manifest, "shm"))
    back.init(takeover=True)
    assert state_of(back.publish(pair.values(3), 3).outcomes[0]) == "READY"


def blocked_in_transfer(pair: Pair, mode: Mode, buckets: int) -> None:
    """Start an update, send ``buckets`` of it, see them reported as landed, and leave the receiver waiting."""
    trainer = pair.trainer
    started = trainer.start(9, mode=mode)
    sent: list[int] = []

    def spoil(bucket: Any, spans: Any) -> None:
        if len(sent) >= buckets:
            raise RuntimeError("the trainer stops sending")
        sent.append(bucket.index)

    with pytest.raises(RuntimeError, match="stops sending"):
        trainer.send(started, pair.values(9), spoil)

    def reported() -> int:
        update = pair.plane.state().open
        return 0 if update is None else int(update.parts["r"].bytes_received)

    eventually(lambda: reported() >= 16384 * buckets, what=f"{buckets} buckets are reported as landed")


@pytest.mark.alone
@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_C04_an_abort_reaches_a_blocked_receive_and_staged_serves_on(
    plane: Server, stack: ExitStack, transport: str
) -> None:
    pair = Pair(stack, plane, transport)
    pair.publish(1)
    blocked_in_transfer(pair, Mode.STAGED, 2)
    start = time.monotonic()
    info = pair.trainer.abort()
    assert time.monotonic() - start < 1.0, "the drain took too long"
    assert not info.outcomes[0].unquiesced and info.outcomes[0].bytes_received >= 16384
    assert pair.content() == {1.0} and not pair.engine.mixed() and not pair.engine.holders()
    eventually(lambda: pair.known.weights is Weights.READY)
    pair.trainer.init()
    assert state_of(pair.publish(2).outcomes[0]) == "READY" and pair.content() == {2.0}


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_in_place_after_the_first_byte_is_dirty_fenced_and_healed(
    plane: Server, stack: ExitStack, transport: str
) -> None:
    pair = Pair(stack, plane, transport, staged=False)
    pair.publish(1)
    blocked_in_transfer(pair, Mode.IN_PLACE, 2)
    eventually(lambda: len(pair.content()) > 1, what="some bytes are in place")
    pair.trainer.abort()
    eventually(lambda: pair.known.weights is Weights.DIRTY)
    assert pair.engine.mixed() and pair.engine.held() == (NONE_HELD,)
    assert {"dirty"} <= set(pair.known.pause_holders)
    entered = threading.Event()

    def generate() -> None:
        with pair.engine.forward():
            entered.set()

    threading.Thread(target=generate, daemon=True).start()
    assert not entered.wait(0.3), "a DIRTY replica generated"
    pair.trainer.init()
    assert state_of(pair.publish(2, mode=Mode.IN_PLACE).outcomes[0]) == "READY"
    assert entered.wait(5) and pair.content() == {2.0} and not pair.engine.holders()


def test_in_place_before_the_first_byte_is_not_dirty(plane: Server, stack: ExitStack) -> None:
    pair = Pair(stack, plane, staged=False)
    pair.publish(1)
    blocked_in_transfer(pair, Mode.IN_PLACE, 0)
    eventually(lambda: pair.engine.holders())
    pair.trainer.abort()
    eventually(lambda: pair.known.weights is Weights.READY and not pair.engine.holders())
    assert not pair.engine.mixed() and pair.engine.held()[0].version == 1


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_in_place_channels_are_opened_while_the_pause_begins(
    plane: Server, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """The pause is in force only after they were: else this waits for ever. What fails there counts where it arms."""
    pair = Pair(stack, plane, staged=False)
    pair.publish(1)
    opened: list[str] = []
    inner, wait = Operations._open, TorchModuleEngine.wait_paused

    def opens(self: Operations, t: Any) -> None:
        opened.append(t.update_id)
        inner(self, t)
        if len(opened) <= fails:
            raise TransportError("it does not open")

    def waits(self: TorchModuleEngine, holder: str, timeout: float) -> bool:
        return bool(opened or holder != "update") and wait(self, holder, timeout)

    monkeypatch.setattr(Operations, "_open", opens)
    monkeypatch.setattr(TorchModuleEngine, "wait_paused", waits)
    if fails < 2:
        assert state_of(pair.publish(2, mode=Mode.IN_PLACE).outcomes[0]) == "READY"
        assert pair.content() == {2.0} and len(opened) == fails + 1
    else:
        assert "does not open" in outcome_of(pair, 2, mode=Mode.IN_PLACE)
        eventually(lambda: pair.known.weights is Weights.READY and not pair.engine.holders())
        assert pair.content() == {1.0} and not pair.engine.mixed() and len(opened) == 2


def test_a_failing_apply_after_the_decision_leaves_it_committed_and_this_one_dirty(
    plane: Server, stack: ExitStack, fail_at: Callable[..., None]
) -> None:
    pair = Pair(stack, plane)
    pair.publish(1)
    fail_at("replica.apply.inside", nth=4)
    done = pair.publish(2)
    assert done.phase == 5  # COMMITTED
    (outcome,) = done.outcomes
    assert state_of(outcome) == "DIRTY" and "replica.apply.inside" in outcome.failure.message
    assert pair.engine.mixed() and pair.engine.held() == (NONE_HELD,)
    failpoints.set_hook(None)
    assert state_of(pair.publish(3).outcomes[0]) == "READY" and pair.content() == {3.0}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PeerLost("'rank/0' is gone", peers=["rank/0"]), True),
        (ChannelTimeout("bucket 3 did not come", peers=["rank/0"]), True),
        (TransportError("no room for bucket 3", peers=["rank/0"]), True),
        (KeyError("rank/0"), False),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_trainers_death_is_one_line_in_the_log_and_a_fault_of_ours_a_traceback(
    plane: Server,
    stack: ExitStack,
    fail_at: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    expected: bool,
) -> None:
    def fail() -> None:
        raise error

    pair = Pair(stack, plane)
    fail_at("replica.prepare.before", fail)
    with pytest.raises(grpc.RpcError):
        pair.publish(1)
    (record,) = [r for r in caplog.records if r.levelname == "ERROR" and r.name == "weightplane.inference_agent"]
    text = logging.Formatter().format(record)
    assert ("Traceback" not in text and "\n" not in text) is expected, text
    assert type(error).__name__ in text and "rank/0" in text and "update " in text


def test_a_transport_that_ignores_its_abort_is_left_behind_with_its_memory(
    plane: Server, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged: it drains within the bound, takes the next update into other memory, and late bytes do no harm."""
    from weightplane.transports.shm import ShmReceiveChannel

    monkeypatch.setattr("weightplane.inference_agent.operations._DRAIN_S", 0.5)
    pair = Pair(stack, plane)
    pair.publish(1)
    stuck, let_go, left = threading.Event(), threading.Event(), threading.Event()
    receive = ShmReceiveChannel.receive

    def deaf(self: Any, bucket: Any, spans: Any) -> None:
        if not stuck.is_set():
            stuck.set()
            let_go.wait(20)
            for s in spans:
                s.fill_(77)
            left.set()
        receive(self, bucket, spans)

    monkeypatch.setattr(ShmReceiveChannel, "receive", deaf)
    started = pair.trainer.start(2)

    def send() -> None:
        with pytest.raises((TransportError, grpc.RpcError)):
            pair.trainer.send(started, pair.values(2))

    t = threading.Thread(target=send, daemon=True)
    t.start()
    assert stuck.wait(5)
    info = pair.trainer.abort()
    assert not info.outcomes[0].unquiesced
    t.join(5)
    pair.trainer.init()
    assert state_of(pair.publish(3).outcomes[0]) == "READY"
    let_go.set()
    assert left.wait(5)
    assert pair.content() == {3.0}
    assert state_of(pair.publish(4).outcomes[0]) == "READY" and pair.content() == {4.0}


def test_a_stop_in_the_middle_of_a_transfer_is_bounded_and_leaves_the_engine_whole(
    plane: Server, stack: ExitStack
) -> None:
    pair = Pair(stack, plane)
    done = pair.publish(1)
    blocked_in_transfer(pair, Mode.STAGED, 2)
    start = time.monotonic()
    pair.agent.stop(drain_s=0.2)
    assert time.monotonic() - start < 4
    assert pair.engine.held() == (Held(done.version, done.update_id),) and not pair.engine.holders()
    assert pair.content() == {1.0} and not pair.engine.mixed()
    eventually(lambda: plane.state().open is None, what="the update ended without it")


def test_an_agent_that_goes_in_the_middle_of_an_in_place_write_leaves_a_dirty_engine(
    plane: Server, stack: ExitStack
) -> None:
    """The next agent of that engine reports it as DIRTY, whatever the first one knew; a full update heals."""
    pair = Pair(stack, plane, staged=False)
    pair.publish(1)
    blocked_in_transfer(pair, Mode.IN_PLACE, 2)
    eventually(lambda: len(pair.content()) > 1)
    pair.agent.stop(leave=False)
    assert pair.engine.mixed() and pair.engine.holders() == {"dirty"}
    replica(stack, plane, "r", pair.engine)
    eventually(lambda: pair.known.weights is Weights.DIRTY)
    eventually(lambda: plane.state().open is None)
    pair.trainer.init()
    assert state_of(pair.publish(2, mode=Mode.IN_PLACE).outcomes[0]) == "READY"
    assert pair.content() == {2.0} and not pair.engine.holders()


def test_nothing_grows_over_many_updates(plane: Server, stack: ExitStack) -> None:
    pair = Pair(stack, plane)
    for k in range(1, 4):
        pair.publish(k)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for k in range(4, 34):
        pair.publish(k, mode=Mode.IN_PLACE if k % 2 else Mode.STAGED)
    eventually(lambda: threading.active_count() <= threads + 1)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= files + 2)


def test_C13_an_update_goes_through_while_the_operator_holds_generation(plane: Server, stack: ExitStack) -> None:
    """A request stands still in the operator's pause; WAIT does not wait for it; afterwards it goes on."""
    pair = Pair(stack, plane)
    pair.publish(1)
    fleet = fleet_pb2_grpc.FleetServiceStub(pair.trainer.channel)
    seen: list[int] = []

    def generate() -> None:
        with pair.engine.request():
            while len(seen) < 400 and (not seen or seen[-1] < 2):
                with pair.engine.forward() as tag:
                    seen.append(tag.version)
                time.sleep(0.01)

    t = threading.Thread(target=generate, daemon=True)
    t.start()
    eventually(lambda: seen)
    pause = fleet_pb2.PauseGenerationRequest(request_id="p1", group="g", mode=common_pb2.PAUSE_MODE_KEEP)
    fleet.PauseGeneration(pause, timeout=10)
    eventually(lambda: "operator" in pair.engine.holders())
    assert state_of(pair.publish(2, pause=PauseMode.WAIT).outcomes[0]) == "READY"
    n = len(seen)
    assert pair.engine.holders() == {"operator"}
    time.sleep(0.1)
    assert len(seen) == n, "generation ran although the operator holds it"
    for i in range(2):
        fleet.ResumeGeneration(fleet_pb2.ResumeGenerationRequest(request_id=f"r{i}", group="g"), timeout=10)
    t.join(5)
    assert not t.is_alive() and seen[-1] == 2


def test_placements_and_receipts_travel_in_pages(
    plane: Server, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightplane.inference_agent.codec._PAGE_PIECES", 3)
    monkeypatch.setattr("weightplane.inference_agent.receipts._PAGE_DIGESTS", 2)
    test_quarters_of_four_ranks_land_in_halves_of_two_workers(plane, stack)


def test_C07_manifests_and_plans_larger_than_a_message_travel_in_pages(plane: Server, stack: ExitStack) -> None:
    """9,000 tensors with names of 300 characters: about 3 MB of names alone."""
    module = torch.nn.Module()
    for i in range(9000):
        module.register_buffer("x" * 290 + f"_{i}", torch.tensor(float(i)))
    engine = TorchModuleEngine(module)
    replica(stack, plane, "r", engine)
    manifest = manifest_of(module)
    trainer = stack.enter_context(Trainer(plane.address, manifest, "shm"))
    trainer.init()
    values = {i: torch.tensor(float(i + 1)) for i in range(len(manifest))}
    assert state_of(trainer.publish(values, 1).outcomes[0]) == "READY"
    assert [float(b) for b in module.buffers()] == [float(i + 1) for i in range(9000)]


# --- planted defects: each makes finish fail by name ---


def outcome_of(pair: Pair, k: int, **options: Any) -> str:
    """What finishing (or starting) said, as text."""
    try:
        done = pair.publish(k, **options)
    except grpc.RpcError as e:
        return str(e.details())
    except TransportError:
        request = wt.GetUpdateRequest(group="g", update_id=pair.trainer.update_id)
        return str(eventually(lambda: pair.trainer.stub.GetUpdate(request, timeout=5).update.failure.message))
    return f"{state_of(done.outcomes[0])} {done.outcomes[0].failure.message}"


def test_X08_a_transport_that_says_ok_and_moves_nothing(
    plane: Server, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightplane.transports.shm import ShmReceiveChannel

    pair = Pair(stack, plane)
    pair.publish(1)
    monkeypatch.setattr(ShmReceiveChannel, "receive", lambda self, bucket, spans: None)
    said = outcome_of(pair, 2, timeout=6)
    assert "expected" in said and "payload bytes" in said, said
    assert pair.content() == {1.0}


def test_X04_a_transport_that_delivers_zeros(plane: Server, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightplane.transports.shm import ShmReceiveChannel

    pair = Pair(stack, plane)
    pair.publish(1)
    receive = ShmReceiveChannel.receive

    def zeros(self: Any, bucket: Any, spans: Any) -> None:
        receive(self, bucket, spans)
        if bucket.index == 3:
            for s in spans:
                s.zero_()

    monkeypatch.setattr(ShmReceiveChannel, "receive", zeros)
    said = outcome_of(pair, 2)
    assert "layers." in said and "differ" in said and pair.content() == {1.0}


def test_a_loader_that_writes_half_of_one_tensor(
    plane: Server, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, so that the loader is the sink: the last tensor's second half never reaches live memory."""
    pair = Pair(stack, plane, staged=False)
    pair.publish(1)
    complete = Sink.complete

    def half(self: Any, bucket: Any) -> None:
        complete(self, bucket)
        if bucket.index == 7:
            with torch.no_grad():
                pair.module.layers[7][2048:] = 1.0

    monkeypatch.setattr(Sink, "complete", half)
    said = outcome_of(pair, 2, mode=Mode.IN_PLACE)
    assert "'layers.7'" in said, said
    eventually(lambda: pair.engine.mixed())


@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
def test_T21_one_bit_of_a_live_tensor_flipped_after_apply(plane: Server, stack: ExitStack, mode: Mode) -> None:
    """A post-update hook is the last to touch memory; the read-back sees it."""
    flips: list[int] = []

    def hook(module: Any) -> None:
        if flips:
            as_bytes(module.layers[5])[9] ^= 1

    pair = Pair(stack, plane, hooks=[hook])
    pair.publish(1, mode=mode)
    flips.append(1)
    said = outcome_of(pair, 2, mode=mode)
    assert "'layers.5'" in said, said
    eventually(lambda: pair.known.weights is Weights.DIRTY)
    flips.clear()
    pair.trainer.init()
    assert outcome_of(pair, 3, mode=mode).startswith("READY")


def test_one_source_byte_changed_after_hashing(plane: Server, stack: ExitStack) -> None:
    pair = Pair(stack, plane)
    pair.publish(1)
    started = pair.trainer.start(2)

    def change(bucket: Any, spans: Any) -> None:
        if bucket.index == 0:
            spans[0][3] ^= 1

    pair.trainer.send(started, pair.values(2), change, hashed=pair.values(2))
    with pytest.raises(grpc.RpcError) as e:
        pair.trainer.finish()
    assert "'layers.0'" in str(e.value.details())


# --- lives ---


def test_the_version_is_the_engines_through_a_new_agent_and_a_new_coordinator(plane: Server, stack: ExitStack) -> None:
    pair = Pair(stack, plane)
    done = pair.publish(1)
    first = pair.agent.incarnation
    pair.agent.stop(leave=False)
    plane.stop()
    plane.start()
    agent = replica(stack, plane, "r", pair.engine)
    assert agent.incarnation != first
    eventually(lambda: pair.known.held == Held(done.version, done.update_id))
    assert pair.known.weights is Weights.READY
    with pair.engine.forward() as tag:
        assert tag.version == done.version and tag.incarnation == agent.incarnation


def test_a_coordinator_that_restarts_keeps_the_incarnation(plane: Server, stack: ExitStack) -> None:
    pair = Pair(stack, plane)
    done = pair.publish(1)
    life = pair.agent.incarnation
    plane.stop()
    eventually(lambda: pair.agent.status().session is SessionStatus.CONNECTING)
    plane.start()
    eventually(lambda: "r" in plane.state().replicas and pair.known.reported, 15)
    assert pair.agent.incarnation == life and pair.known.held == Held(done.version, done.update_id)


def test_an_undecided_update_is_dropped_when_the_coordinator_restarts(plane: Server, stack: ExitStack) -> None:
    pair = Pair(stack, plane)
    pair.publish(1)
    blocked_in_transfer(pair, Mode.STAGED, 2)
    plane.stop()
    plane.start()
    eventually(lambda: pair.agent.status().stage in ("ABORTED", "FAILED"), 15)
    assert pair.content() == {1.0} and not pair.engine.holders() and not pair.engine.mixed()


def test_an_engine_that_restarts_behind_its_agent_is_joining(plane: Server, stack: ExitStack) -> None:
    pair = Pair(stack, plane)
    pair.publish(1)
    life = pair.agent.incarnation
    pair.engine._held = NONE_HELD  # as a fresh process would say
    pair.engine._life = "another"
    eventually(lambda: pair.agent.incarnation != life, what="the agent noticed")
    eventually(lambda: pair.known.incarnation == pair.agent.incarnation and pair.known.reported)
    assert pair.known.weights is Weights.JOINING and pair.known.held == NONE_HELD
    pair.trainer.init()
    assert state_of(pair.publish(2).outcomes[0]) == "READY"


def test_a_second_agent_of_the_same_name_supersedes_and_the_first_does_not_redial(
    plane: Server, stack: ExitStack
) -> None:
    first = replica(stack, plane, "r", TorchModuleEngine(Constant()))
    second = replica(stack, plane, "r", TorchModuleEngine(Constant()))
    eventually(lambda: first.status().session is SessionStatus.SUPERSEDED)
    time.sleep(0.5)
    assert second.status().session is SessionStatus.LIVE
    assert plane.state().replicas["r"].incarnation == second.incarnation


def test_a_goodbye_is_leaving_not_lost(plane: Server, stack: ExitStack) -> None:
    pair = Pair(stack, plane)
    pair.publish(1)
    pair.agent.stop("scaled down")
    eventually(lambda: pair.known.admin is Admin.LEAVING, 2)
    pair.agent.stop()


# --- pauses ---


@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
def test_requests_that_do_not_end_in_time_are_said_to_be_why(plane: Server, stack: ExitStack, mode: Mode) -> None:
    pair = Pair(stack, plane)
    pair.publish(1)
    enough, running = threading.Event(), threading.Semaphore(0)

    def generate() -> None:
        with pair.engine.request():
            running.release()
            while not enough.wait(0.01):
                with pair.engine.forward():
                    pass

    threads = [threading.Thread(target=generate, daemon=True) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        assert all(running.acquire(timeout=5) for _ in threads)
        text = outcome_of(pair, 2, mode=mode, pause=PauseMode.WAIT, timeout=3)
        assert "generation does not stand still yet (pause=wait), 2 request(s) still in flight" in text, text
    finally:
        enough.set()
        for t in threads:
            t.join(5)


@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
def test_WAIT_drains_and_ABORT_returns_what_there_is(plane: Server, stack: ExitStack, mode: Mode) -> None:
    pair = Pair(stack, plane)
    pair.publish(1)
    outputs: list[list[int]] = []
    running = threading.Event()

    def generate(tokens: int) -> None:
        with pair.engine.request():
            out: list[int] = []
            try:
                while len(out) < tokens:
                    with pair.engine.forward() as tag:
                        out.append(tag.version)
                    running.set()
                    time.sleep(0.01)
            except RequestAborted:
                out.append(-1)
            outputs.append(out)

    t = threading.Thread(target=generate, args=(40,), daemon=True)
    t.start()
    assert running.wait(5)
    done = pair.publish(2, mode=mode, pause=PauseMode.WAIT)
    assert state_of(done.outcomes[0]) == "READY"
    t.join(5)
    assert outputs == [[1] * 40], "WAIT: a request mixed versions, or was cut"
    running.clear()
    t = threading.Thread(target=generate, args=(10**6,), daemon=True)
    t.start()
    assert running.wait(5)
    assert state_of(pair.publish(3, mode=mode, pause=PauseMode.ABORT).outcomes[0]) == "READY"
    t.join(5)
    assert not t.is_alive() and outputs[1][-1] == -1 and set(outputs[1][:-1]) == {2}


def test_C20_under_load_no_pass_mixes_versions_across_many_publishes(plane: Server, stack: ExitStack) -> None:
    pair = Pair(stack, plane)
    stop, faults, seen = threading.Event(), [], set()

    def hammer() -> None:
        while not stop.is_set():
            with pair.engine.request():
                for _ in range(4):
                    with pair.engine.forward() as tag:
                        got = pair.content()
                    if len(got) != 1 or got != {float(max(tag.trainer_step, 0))}:
                        faults.append((tag, got))
                    seen.add(tag.version)

    threads = [threading.Thread(target=hammer, daemon=True) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        for k in range(1, 21):
            mode = Mode.IN_PLACE if k % 3 == 0 else Mode.STAGED
            assert state_of(pair.publish(k, mode=mode).outcomes[0]) == "READY"
    finally:
        stop.set()
        for t in threads:
            t.join(5)
    assert not faults and len(seen) > 10


# --- security ---


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")
@pytest.mark.parametrize("by", ["token", "certificate"])
def test_agent_and_heartbeats_speak_tls_with_a_token_or_a_certificate(tmp_path: Path, by: str) -> None:
    ca = authority(tmp_path)
    cert, key = certificate(tmp_path, "server", "weightplane")
    security = Security(tls=Tls(cert, key), tokens=parse_tokens("inference right-token-0123456789"))
    good: dict[str, Any] = {"token": "right-token-0123456789"}
    if by == "certificate":
        security = Security(tls=Tls(cert, key, client_ca=ca))
        mine = certificate(tmp_path, "replica", "inference/r")
        good = {"cert_pem": mine[0].read_bytes(), "key_pem": mine[1].read_bytes()}
    with server(security=security) as s:
        engine = TorchModuleEngine(Constant())
        agent = InferenceAgent(Dial(s.address, tls=True, ca_pem=ca.read_bytes(), **good), "g", "r", engine)
        agent.start()
        try:
            assert agent.wait_live(), agent.status()
            eventually(lambda: agent.status().heartbeat is HelperStatus.LIVE, what="heartbeats")
        finally:
            agent.stop()
        bad = Dial(s.address, tls=True, ca_pem=ca.read_bytes(), token="wrong")
        stranger = InferenceAgent(bad, "g", "stranger", engine)
        stranger.start()
        try:
            eventually(lambda: stranger.status().error)
            assert stranger.status().session is SessionStatus.CONNECTING and "wrong" not in stranger.status().error
            assert "stranger" not in s.state().replicas
        finally:
            stranger.stop()
