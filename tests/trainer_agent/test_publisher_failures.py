"""What goes wrong with a publish, and what its caller is told: every case against the real control plane."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer_agent.fleet import Fleet, eventually, fill, fleet, hook, same
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.states import Liveness, PauseMode
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent import hashing
from weightplane.trainer_agent.errors import (
    CallRefused,
    CoordinatorUnreachable,
    PublisherClosed,
    TrainerFenced,
    TrainerHeld,
    UpdateFailed,
    UpdateRefused,
)
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource, StateDictSource
from weightplane.transports.digest import digest_bytes


class Model(nn.Module):
    def __init__(self, rows: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])


@pytest.fixture
def f() -> Iterator[Fleet]:
    with fleet() as f:
        yield f


@pytest.mark.parametrize("raised", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["commit", "pause", "prepare"])
@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_an_engine_that_raises_what_is_no_exception_is_named_and_healed_by_the_next_publish(
    f: Fleet, raised: type[BaseException], where: str, mode: str
) -> None:
    class Odd(TorchModuleEngine):
        armed = False

        def _may_raise(self, here: str) -> None:
            if self.armed and here == where:
                self.armed = False
                raise raised

        def commit(self, update_id: str) -> None:
            self._may_raise("commit")
            super().commit(update_id)

        def pause(self, holder: str, mode: PauseMode) -> None:
            self._may_raise("pause")
            super().pause(holder, mode)

        def prepare(self, *args: Any, **more: Any) -> Any:
            self._may_raise("prepare")
            return super().prepare(*args, **more)

    f.replica("r0", TorchModuleEngine(Model()))
    odd = Odd(Model())
    f.replica("r1", odd)
    module = Model()
    publisher = f.publisher(module, mode=mode, update_timeout=10)
    publisher.publish(1)
    odd.armed = True
    fill(module, 2)
    try:
        receipt = publisher.publish(2)
        (said,) = [r for r in receipt.replicas if r.replica_id == "r1"]
        assert said.failure is not None and raised.__name__ in str(said.failure)
    except UpdateFailed as e:
        assert raised.__name__ in str(e) and "r1" in str(e)
    assert not odd.armed
    fill(module, 3)
    publisher.publish(3)
    assert same(f.engines["r0"], module) and same(odd, module)


@pytest.fixture
def pair(f: Fleet) -> Fleet:
    for name in ("r0", "r1"):
        f.replica(name, TorchModuleEngine(Model()))
    return f


def kill(f: Fleet, name: str) -> None:
    f.agents[name].stop(leave=False)


# --- before an update is open ---------------------------------------------------------------------------------------


def test_no_replica_is_refused_and_said(f: Fleet) -> None:
    publisher = f.publisher(Model())
    with pytest.raises(UpdateRefused, match=r"no update was opened.*at least 1 eligible replica") as caught:
        publisher.publish(1)
    assert caught.value.reason is Reason.NOT_ENOUGH_REPLICAS and caught.value.update_id == ""
    with pytest.raises(TimeoutError, match=r"expected 1 replica\(s\), found 0 \(none\)"):
        publisher.wait_for_replicas(1, timeout=0.3)


@pytest.mark.alone
def test_no_coordinator(f: Fleet) -> None:
    f.plane.stop()
    publisher = f.publisher(Model(), init_timeout=0.4)
    began = time.monotonic()
    with pytest.raises(CoordinatorUnreachable, match="Is it running"):
        publisher.publish(1)
    assert time.monotonic() - began < 2


def test_a_held_group_names_its_holder_and_takeover_fences_it(pair: Fleet) -> None:
    first = pair.publisher(Model(), trainer_id="first")
    first.publish(1)
    second = pair.publisher(Model(), trainer_id="second")
    with pytest.raises(TrainerHeld, match="'first'"):
        second.publish(1)
    third = pair.publisher(Model(), trainer_id="third", takeover=True)
    third.publish(2)
    with pytest.raises(TrainerFenced):
        first.publish(3)
    with pytest.raises(TrainerFenced):
        first.init()
    third.publish(3)


@pytest.mark.parametrize("heartbeat", ["stream", "helper"])
def test_a_takeover_in_mid_update_reaches_the_old_trainer_at_once(pair: Fleet, heartbeat: str) -> None:
    first = pair.publisher(Model(), trainer_id="first", heartbeat=heartbeat)
    second = pair.publisher(Model(), trainer_id="second", takeover=True)
    first.init()
    with hook("trainer.update.armed", lambda n: second.init()), pytest.raises(TrainerFenced):
        first.publish(1)
    second.publish(2)


def test_a_closed_publisher_gives_the_group_up(pair: Fleet) -> None:
    first = pair.publisher(Model(), trainer_id="first")
    first.publish(1)
    first.close()
    first.close()
    with pytest.raises(PublisherClosed):
        first.publish(2)
    pair.publisher(Model(), trainer_id="second").publish(2)


def test_an_unknown_transport_is_refused(pair: Fleet) -> None:
    with pytest.raises(CallRefused, match="transport: expected one that this rank offers"):
        pair.publisher(Model(), transport="pigeon").publish(1)


def test_options_are_checked() -> None:
    source = StateDictSource({"a": torch.ones(1)})
    for wrong, text in (
        ({"mode": "sideways"}, "mode: expected one of"),
        ({"commit_policy": 0}, "commit_policy: expected 'all'"),
        ({"commit_policy": "most"}, "commit_policy: expected 'all'"),
        ({"update_timeout": 0.01}, "update_timeout"),
        ({"prepare_timeout": 200.0, "update_timeout": 100.0}, "prepare_timeout"),
        ({"failure": "continue_stale"}, "max_stale_versions: expected at least 1"),
        ({"failure": "hope"}, "hope"),
        ({"rank": 2}, "rank: expected 0..0"),
        ({"world_size": 2}, "incarnation: expected a text that is equal on all ranks"),
        ({"heartbeat": "x"}, "heartbeat"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            Publisher("127.0.0.1:1", "g", source, **wrong)
    with pytest.raises(TypeError, match=r"unknown publish option\(s\) \['colour'\]"):
        Publisher("127.0.0.1:1", "g", source, colour="red")
    with pytest.raises(ValueError, match="not a loopback address"):
        Publisher("10.0.0.1:1", "g", source)


# --- the engine and the manifest disagree ---------------------------------------------------------------------------


def test_names_that_do_not_fit_fail_by_name_and_nothing_changes(pair: Fleet) -> None:
    module = Model()
    publisher = pair.publisher(module)
    publisher.publish(1)
    state = dict(module.state_dict())
    del state["layers.2.bias"]
    state["stranger"] = torch.ones(3)
    publisher.source = StateDictSource(state)
    with pytest.raises(UpdateFailed) as caught:
        publisher.publish(2)
    assert caught.value.reason is Reason.MANIFEST_MISMATCH and set(caught.value.failures) & {"r0", "r1"}
    assert "layers.2.bias" in str(caught.value) and "stranger" in str(caught.value)
    assert all(same(e, module) for e in pair.engines.values())
    publisher.source = ModuleSource(module)
    publisher.publish(3)


def test_a_source_that_cannot_travel_raises_its_own_error(pair: Fleet) -> None:
    publisher = pair.publisher(Model())
    publisher.publish(1)
    publisher.source = StateDictSource({"bad": torch.ones(2).to_sparse()})
    with pytest.raises(TypeError, match="'bad' has layout"):
        publisher.publish(2)
    publisher.source = ModuleSource(Model())
    publisher.publish(3)


@pytest.mark.alone
def test_a_source_that_fails_while_it_is_sent_aborts_the_update(pair: Fleet) -> None:
    class Broken(ModuleSource):
        def tensor(self, index: int):
            if index == 3:
                raise ZeroDivisionError("no tensor 3 today")
            return super().tensor(index)

    publisher = pair.publisher(Broken(Model()))
    began = time.monotonic()
    with pytest.raises((ZeroDivisionError, UpdateFailed), match="no tensor 3 today"):
        publisher.publish(1, update_timeout=30)
    assert time.monotonic() - began < 3
    publisher.source = ModuleSource(Model())
    publisher.publish(2)


def test_a_wrong_digest_names_the_tensor(pair: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = pair.publisher(Model())
    publisher.publish(1)
    real = digest_bytes
    with monkeypatch.context() as m:
        m.setattr(hashing, "digest_bytes", lambda data: real(data) ^ (1 if len(data) == 64 else 0))
        with pytest.raises(UpdateFailed) as caught:
            publisher.publish(2)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert any("bias" in t for f in caught.value.failures.values() for t in f.tensors)
    publisher.publish(3)


# --- replicas that come and go --------------------------------------------------------------------------------------


def test_a_late_joiner_is_bound_without_a_new_generation(f: Fleet) -> None:
    f.replica("r0", TorchModuleEngine(Model()))
    module = Model()
    publisher = f.publisher(module)
    publisher.publish(1)
    generation = f.state().trainer.generation
    f.replica("r1", TorchModuleEngine(Model()))
    assert set(publisher.publish(2).ready) == {"r0", "r1"}
    assert f.state().trainer.generation == generation
    assert same(f.engines["r1"], module)


def test_a_replica_that_dies_in_mid_transfer_fails_the_update_by_name(pair: Fleet) -> None:
    publisher = pair.publisher(Model())
    publisher.publish(1)
    with hook("trainer.update.armed", lambda n: kill(pair, "r1")), pytest.raises(UpdateFailed) as caught:
        publisher.publish(2, update_timeout=20)
    assert "r1" in caught.value.failures, caught.value
    eventually(lambda: pair.state().replicas["r1"].liveness is not Liveness.LIVE)
    module = Model()
    publisher.source = ModuleSource(module)
    receipt = publisher.publish(3)
    assert receipt.ready == ("r0",) and same(pair.engines["r0"], module)


def test_retry_goes_on_without_the_dead_and_the_source_is_held(pair: Fleet) -> None:
    module = Model()
    publisher = pair.publisher(module)
    publisher.publish(1)
    with hook("trainer.update.armed", lambda n: kill(pair, "r1") if n == 1 else None):
        handle = publisher.publish_async(2, failure="retry", update_timeout=20)
        receipt = handle.result(20)
    assert receipt.retries == 1 and receipt.ready == ("r0",) and same(pair.engines["r0"], module)
    assert receipt.metrics()["retries"] == 1 and "r1" in receipt.absent


def test_at_least_goes_on_without_the_dead(pair: Fleet) -> None:
    module = Model(4096)
    for name in ("r0", "r1"):
        kill(pair, name)
        pair.replica(name, TorchModuleEngine(Model(4096)))
    publisher = pair.publisher(module, commit_policy=1)
    publisher.publish(1)
    fill(module, 5)
    with hook("trainer.send.bucket", lambda n: kill(pair, "r1") if n == 20 else None):
        receipt = publisher.publish(2, update_timeout=30)
    assert receipt.committed and receipt.ready == ("r0",) and receipt.retries == 0
    lost = next(r for r in receipt.replicas if r.replica_id == "r1")
    assert lost.excluded and lost.failure is not None
    assert same(pair.engines["r0"], module)
    fill(module, 6)
    assert publisher.publish(3).ready == ("r0",) and same(pair.engines["r0"], module)


def test_continue_stale_returns_a_receipt_that_says_so_until_the_bound(pair: Fleet) -> None:
    publisher = pair.publisher(Model(), failure="continue_stale", max_stale_versions=2)
    publisher.publish(1)
    for n in (1, 2):
        receipt = publisher.publish(n + 1, exclude=("r0", "r1"))
        assert not receipt.committed and receipt.stale == n and receipt.lag_versions == n
        assert receipt.failure is not None and receipt.failure.reason is Reason.NOT_ENOUGH_REPLICAS
    with pytest.raises(UpdateRefused):
        publisher.publish(4, exclude=("r0", "r1"))
    assert publisher.publish(5).committed
    assert publisher.publish(6, exclude=("r0", "r1")).stale == 1


def test_the_groups_failure_policy_holds_unless_the_publish_says_otherwise(pair: Fleet) -> None:
    from weightplane.v1 import fleet_pb2

    publisher = pair.publisher(Model())
    publisher.publish(1)
    policy = fleet_pb2.GroupPolicy(
        failure=fleet_pb2.FAILURE_POLICY_CONTINUE_STALE, max_stale_versions=1, update_timeout_ms=7000
    )
    request = fleet_pb2.UpdateGroupRequest(request_id="policy", group="g", policy=policy)
    publisher._hold.client.call("UpdateGroup", request, time.monotonic() + 5)
    with pytest.raises(UpdateRefused):
        publisher.publish(2, exclude=("r0", "r1"), failure="raise")
    publisher.publish(3)
    assert publisher.publish(4, exclude=("r0", "r1")).stale == 1
    with pytest.raises(UpdateRefused):
        publisher.publish(5, exclude=("r0", "r1"))
    receipt = publisher.publish(6)
    update = pair.state().history[receipt.update_id]
    assert update.deadline - update.started_at == pytest.approx(7.0)


def test_a_lost_store_is_asked_anew(pair: Fleet) -> None:
    from weightplane.controlplane.store.memory import Disk

    module = Model()
    publisher = pair.publisher(module)
    publisher.publish(1)
    pair.plane.stop()
    pair.plane.disk = Disk()
    pair.plane.start()
    eventually(lambda: len([r for r in pair.state().replicas.values() if r.reported]) == 2)
    receipt = publisher.publish(2, update_timeout=20)
    assert set(receipt.ready) == {"r0", "r1"} and all(same(e, module) for e in pair.engines.values())


def test_staged_and_in_place_replicas_take_one_update(f: Fleet) -> None:
    f.replica("r0", TorchModuleEngine(Model()))
    f.replica("r1", TorchModuleEngine(Model(), staged=False))
    module = Model()
    publisher = f.publisher(module)
    for step in (1, 2):
        fill(module, step)
        receipt = publisher.publish(step)
        assert {r.replica_id: r.mode for r in receipt.replicas} == {"r0": "STAGED", "r1": "IN_PLACE"}
        assert all(same(e, module) for e in f.engines.values())


def test_shm_and_grpc_in_one_update(f: Fleet) -> None:
    f.replica("r0", TorchModuleEngine(Model()), transports=["shm"])
    f.replica("r1", TorchModuleEngine(Model()), transports=["grpc"])
    module = Model()
    publisher = f.publisher(module, transport="")
    hashed: list[int] = []
    real = digest_bytes

    def counting(data):
        hashed.append(len(data))
        return real(data)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(hashing, "digest_bytes", counting)
        receipt = publisher.publish(1)
    assert set(receipt.ready) == {"r0", "r1"} and all(same(e, module) for e in f.engines.values())
    assert sum(hashed) == sum(p.nbytes for p in module.parameters())  # once, for two plans


# --- the coordinator goes away --------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["trainer.start.after", "trainer.update.armed", "trainer.finish.before"])
def test_a_coordinator_that_restarts_before_the_decision_fails_the_update(pair: Fleet, point: str) -> None:
    publisher = pair.publisher(Model())
    publisher.publish(1)

    def restart(n: int) -> None:
        pair.plane.stop()
        pair.plane.start()

    with hook(point, restart), pytest.raises(UpdateFailed) as caught:
        publisher.publish(2, update_timeout=15)
    assert caught.value.reason in (Reason.COORDINATOR_RESTARTED, Reason.MEMBER_LOST), caught.value
    module = Model()
    publisher.source = ModuleSource(module)
    receipt = publisher.publish(3)
    assert receipt.committed and all(same(e, module) for e in pair.engines.values())


@pytest.mark.parametrize("heartbeat", ["stream", "helper"])
def test_a_coordinator_that_is_away_for_a_moment_costs_only_the_moment(pair: Fleet, heartbeat: str) -> None:
    module = Model()
    publisher = pair.publisher(module, heartbeat=heartbeat)
    publisher.publish(1)
    pair.plane.stop()
    timer = threading.Timer(0.7, pair.plane.start)
    timer.start()
    receipt = publisher.publish(2, update_timeout=15)
    timer.join()
    assert set(receipt.ready) == {"r0", "r1"} and all(same(e, module) for e in pair.engines.values())


def test_an_answer_lost_after_the_decision_is_asked_for(pair: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    import grpc

    from weightplane.trainer_agent.client import Client
    from weightplane.trainer_agent.errors import Unanswered

    publisher = pair.publisher(Model())
    real = Client.call

    def lossy(self: Client, method: str, *rest, **kw):
        answer = real(self, method, *rest, **kw)
        if method == "FinishUpdate":
            raise Unanswered(method, grpc.StatusCode.DEADLINE_EXCEEDED, "lost on the way")
        return answer

    monkeypatch.setattr(Client, "call", lossy)
    assert set(publisher.publish(1).ready) == {"r0", "r1"}


# --- the caller goes away -------------------------------------------------------------------------------------------


def test_ctrl_c_aborts_the_update_and_the_next_one_works(pair: Fleet) -> None:
    module = Model()
    publisher = pair.publisher(module)
    publisher.publish(1)
    before = pair.state().committed
    began = time.monotonic()
    stuck = threading.Event()

    def interrupt(n: int) -> None:
        if n == 3:
            threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
            stuck.wait(3)

    with hook("trainer.send.bucket", interrupt), pytest.raises(KeyboardInterrupt):
        publisher.publish(2, update_timeout=30)
    stuck.set()
    assert time.monotonic() - began < 5
    eventually(lambda: pair.state().open is None)
    last = list(pair.state().history.values())[-1]
    assert last.phase.value == "ABORTED" and pair.state().committed == before
    fill(module, 9)
    assert publisher.publish(3).committed and all(same(e, module) for e in pair.engines.values())


@pytest.mark.alone
def test_an_operators_abort_is_raised_within_a_second(pair: Fleet) -> None:
    from weightplane.v1 import weight_transfer_pb2 as wt

    publisher = pair.publisher(Model())
    publisher.publish(1)
    aborted: list[float] = []

    def abort(n: int) -> None:
        if n == 2:
            request = wt.AbortUpdateRequest(request_id="op", group="g", generation=0, reason="by an operator", rank=-1)
            threading.Thread(
                target=lambda: publisher._hold.client.transfer.AbortUpdate(request, timeout=5), daemon=True
            ).start()
            eventually(lambda: pair.state().open is None or pair.state().open.failure, what="it is aborted")
            aborted.append(time.monotonic())

    with hook("trainer.send.bucket", abort), pytest.raises(UpdateFailed, match="by an operator") as caught:
        publisher.publish(2)
    assert caught.value.reason is Reason.ABORTED_BY_CALLER and time.monotonic() - aborted[0] < 1
    publisher.publish(3)


def test_close_ends_a_publish_under_way(pair: Fleet) -> None:
    publisher = pair.publisher(Model())
    publisher.publish(1)
    threads = threading.active_count()
    go = threading.Event()

    def slowly(n: int) -> None:
        go.wait(0.5)

    with hook("trainer.send.bucket", slowly):
        handle = publisher.publish_async(2)
        time.sleep(0.2)
        began = time.monotonic()
        publisher.close()
        assert time.monotonic() - began < 5
    with pytest.raises(PublisherClosed):
        handle.result(1)
    assert handle.source_free.is_set()
    eventually(lambda: threading.active_count() < threads)
