"""What a join costs is paid when it happens: an idle trainer binds, the replica says where its tensors are."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.server import fields, pages
from weightplane.controlplane.server.transfer_service import TransferService
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.rpc import AgentCalls
from weightplane.trainer_agent import UpdateFailed, ahead
from weightplane.trainer_agent.channels import ChannelPool

from .fleet import Fleet, eventually, fill, fleet, hook, same


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


class Counted:
    """How often something was called."""

    def __init__(self) -> None:
        self.n = 0

    def before(self, inner: Any) -> Any:
        def called(*args: Any) -> Any:
            self.n += 1
            return inner(*args)

        return called


def said(log: pytest.LogCaptureFixture, text: str) -> bool:
    return text in log.text


@pytest.fixture
def f() -> Iterator[Fleet]:
    with fleet() as made:
        made.replica("r0", TorchModuleEngine(model(1)))
        yield made


def bound(f: Fleet) -> set[str]:
    """The replicas that the trainer's channels reach; nobody while it binds."""
    if any(t.name == "weightplane-bind-ahead" for t in threading.enumerate()):
        return set()
    trainer = f.state().trainer
    return {name for c in trainer.channels for name, _ in c.replicas} if trainer is not None else set()


def test_an_idle_trainer_binds_to_a_replica_that_came(f: Fleet) -> None:
    trained = model(2)
    publisher = f.publisher(trained, heartbeat="helper")
    publisher.publish(1)
    f.replica("late", TorchModuleEngine(model(3)))
    eventually(lambda: bound(f) == {"r0", "late"}, what="it is bound")
    fill(trained, 7)
    with hook("trainer.init.after", lambda n: None) as bound_again:
        assert {r.replica_id for r in publisher.publish(2).replicas} == {"r0", "late"}
    assert not bound_again.is_set(), "the publish had to bind"
    assert same(f.engines["late"], trained)


def test_a_replica_says_where_its_tensors_are_before_an_update_asks(f: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = f.publisher(model(2), heartbeat="helper")
    publisher.publish(1)
    manifest_id = f.state().committed_manifest
    f.replica("late", TorchModuleEngine(model(3)))
    eventually(lambda: manifest_id in f.state().replicas["late"].placements, what="it is placed")
    said: list[Any] = []
    put = AgentCalls.put_placement

    def put_placement(self: AgentCalls, *args: Any) -> None:
        said.append(args)
        put(self, *args)

    monkeypatch.setattr(AgentCalls, "put_placement", put_placement)
    assert len(publisher.publish(2).replicas) == 2 and not said


def test_the_plan_with_a_replica_that_came_is_with_everybody_before_an_update_asks(
    f: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = f.publisher(model(2), heartbeat="helper")
    publisher.publish(1)
    fetched, opened = Counted(), Counted()
    monkeypatch.setattr(pages, "plan_page", fetched.before(pages.plan_page))
    monkeypatch.setattr(ChannelPool, "_make", opened.before(ChannelPool._make))
    f.replica("late", TorchModuleEngine(model(3)))
    eventually(lambda: fetched.n == 3, what="trainer and both replicas have fetched it")
    eventually(lambda: bound(f) == {"r0", "late"} and opened.n == 1, what="it is bound")
    assert len(publisher.publish(2).replicas) == 2
    assert (fetched.n, opened.n) == (3, 1), "the publish had to ask"


def test_what_is_fetched_ahead_in_vain_is_the_publishs_to_fetch(
    f: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = f.publisher(model(2), heartbeat="helper")
    publisher.publish(1)

    async def refuses(*_: Any) -> Any:
        fields.refuse(Reason.UNKNOWN_PLAN, "not here")

    with monkeypatch.context() as m, caplog.at_level(logging.INFO):
        m.setattr(pages, "plan_page", refuses)
        f.replica("late", TorchModuleEngine(model(3)))
        for who in ("replica r0: the next update's plan", "replica late: the next update's plan", "a plan"):
            eventually(partial(said, caplog, f"{who} is not fetched ahead"), what=who)
    assert len(publisher.publish(2).replicas) == 2


def test_a_model_that_does_not_fit_is_the_next_updates_to_refuse(f: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    publisher = f.publisher(model(2), heartbeat="helper")
    publisher.publish(1)
    with caplog.at_level(logging.INFO, "weightplane.inference_agent"):
        f.replica("odd", TorchModuleEngine(nn.Sequential(nn.Linear(8, 99), nn.Linear(99, 4))))
        eventually(lambda: "may be refused" in caplog.text, what="its log says so")
    assert "MANIFEST_MISMATCH [odd]" in caplog.text and "0.weight" in caplog.text
    with pytest.raises(UpdateFailed, match=r"odd.*0\.weight|0\.weight.*odd"):
        publisher.publish(2)
    assert f.state().committed.version == 1


def test_it_binds_on_the_gpu_that_the_trainer_uses(f: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's own current device is GPU 0."""
    publisher = f.publisher(model(2), heartbeat="helper")
    publisher.publish(1)
    current: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda n: current.append((threading.current_thread().name, n)))
    publisher._hold.device = 3
    f.replica("late", TorchModuleEngine(model(3)))
    eventually(lambda: bound(f) == {"r0", "late"}, what="it is bound")
    assert current == [("weightplane-bind-ahead", 3)]


def test_a_publish_that_begins_meanwhile_waits_for_it_and_commits(f: Fleet) -> None:
    publisher = f.publisher(model(2), heartbeat="helper")
    publisher.publish(1)
    go_on = threading.Event()

    def stands_still(n: int) -> None:
        go_on.wait(10)

    with hook("trainer.init.after", stands_still) as binding:
        f.replica("late", TorchModuleEngine(model(3)))
        assert binding.wait(10)
        handle = publisher.publish_async(2)
        go_on.set()
        assert len(handle.result(20).replicas) == 2


def test_who_came_during_a_publish_is_bound_after_it(f: Fleet) -> None:
    publisher = f.publisher(model(2), heartbeat="helper")
    publisher.init()

    def comes(n: int) -> None:
        f.replica("late", TorchModuleEngine(model(3)))

    with hook("trainer.update.armed", comes):
        assert {r.replica_id for r in publisher.publish(1).replicas} == {"r0"}
    eventually(lambda: bound(f) == {"r0", "late"}, what="it is bound")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_died_of_what_nobody_foresaw_is_not_the_last(f: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = f.publisher(model(2), heartbeat="helper")
    publisher.publish(1)
    died = threading.Event()

    def dies(*_: Any) -> None:
        died.set()
        raise ZeroDivisionError

    with monkeypatch.context() as m:
        m.setattr(ahead.BindAhead, "_prepare", dies)
        f.replica("late", TorchModuleEngine(model(3)))
        assert died.wait(10)
        eventually(
            lambda: not any(t.name == "weightplane-bind-ahead" for t in threading.enumerate()), what="it is gone"
        )
    f.replica("later", TorchModuleEngine(model(3)))
    eventually(lambda: bound(f) == {"r0", "late", "later"}, what="they are bound")


def test_a_publisher_that_closes_waits_for_no_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, held, forever = TransferService.InitTransfer, threading.Event(), asyncio.Event()

    async def init_transfer(self: TransferService, request: Any, context: Any) -> Any:
        if request.generation:  # the second one
            held.set()
            await forever.wait()
        return await answer(self, request, context)

    monkeypatch.setattr(TransferService, "InitTransfer", init_transfer)
    monkeypatch.setattr(ahead, "_BIND_S", 60.0)
    with fleet() as f:
        f.replica("r0", TorchModuleEngine(model(1)))
        publisher = f.publisher(model(2), heartbeat="helper")
        publisher.publish(1)
        f.replica("late", TorchModuleEngine(model(3)))
        assert held.wait(10)
        began = time.monotonic()
        publisher.close()  # it may have to wait for a helper that still starts
        assert time.monotonic() - began < 20
        assert not [t for t in threading.enumerate() if t.name == "weightplane-bind-ahead"]
