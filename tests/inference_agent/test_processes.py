"""Real processes: leases through a held GIL and a stop, a death told at once, SIGTERM as goodbye, embedding."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.inference_agent.models import Constant, manifest_of
from tests.inference_agent.process import CONFIG, program
from tests.inference_agent.server import eventually
from tests.inference_agent.trainer import Trainer
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.heartbeat import HelperStatus
from weightplane.demo.model import build_model
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.serve import load_engine
from weightplane.inference_agent.session import SessionStatus
from weightplane.transports.base import TransportError
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, update_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def plane() -> Iterator[str]:
    with program("plane", "2.0") as (_, said):
        yield said["address"]


def known(address: str, name: str) -> Any:
    """What the control plane says of a replica; None if it knows none of that name."""
    return next((r for r in listed(address) if r.replica_id == name), None)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_gil_held_for_five_seconds_between_updates_keeps_the_incarnation(plane: str) -> None:
    """TTL 2 s, beats every 0.2 s: the helper process beats on while this interpreter does nothing at all."""
    agent = InferenceAgent(plane, "g", "gil", TorchModuleEngine(Constant())).start()
    try:
        assert agent.wait_live()
        eventually(lambda: known(plane, "gil") and agent.status().heartbeat is HelperStatus.LIVE)
        life = agent.incarnation
        ctypes.PyDLL(None).sleep(5)
        at_once = known(plane, "gil")
        assert at_once.liveness == fleet_pb2.LIVENESS_LIVE and at_once.incarnation == life
        assert agent.incarnation == life
    finally:
        agent.stop()


def test_without_the_helper_the_same_hold_costs_the_lease(plane: str) -> None:
    """The planted defect: no heartbeat helper."""
    agent = InferenceAgent(plane, "g", "nobeat", TorchModuleEngine(Constant()), heartbeat=False).start()
    try:
        assert agent.wait_live()
        ctypes.PyDLL(None).sleep(3)
        assert known(plane, "nobeat").liveness != fleet_pb2.LIVENESS_LIVE
    finally:
        agent.stop()


def test_a_stop_between_updates_keeps_the_incarnation(plane: str) -> None:
    with program("replica", plane, "stopped") as (process, said):
        eventually(lambda: known(plane, "stopped"))
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4)
        assert known(plane, "stopped").liveness == fleet_pb2.LIVENESS_LIVE
        os.kill(process.pid, signal.SIGCONT)
        assert known(plane, "stopped").incarnation == said["incarnation"]


@pytest.mark.alone
def test_a_replica_stopped_in_mid_update_is_found_left_out_and_comes_back(plane: str) -> None:
    """SIGSTOP while an update waits on it: aborted within TTL + beat + 1 s; after SIGCONT it takes the next one."""
    model = build_model(CONFIG, 7)
    manifest = manifest_of(model)
    values = {manifest.index[n]: p.detach() for n, p in model.named_parameters()}
    with (
        program("replica", plane, "frozen") as (process, said),
        Trainer(plane, manifest, "shm", bucket_bytes=8192) as t,
    ):
        eventually(lambda: known(plane, "frozen").weights == update_pb2.WEIGHTS_STATE_JOINING)
        t.init()
        only: dict[str, Any] = {"exclude": [r.replica_id for r in listed(plane) if r.replica_id != "frozen"]}
        started = t.start(1, timeout=60, **only)
        os.kill(process.pid, signal.SIGSTOP)
        at = time.monotonic()
        with pytest.raises((TransportError, grpc.RpcError)):
            t.send(started, values)
            t.finish()
        info = eventually(lambda: aborted(t), 10)
        assert time.monotonic() - at < 2.0 + 0.2 + 1.0 + 1.5, "TTL, a beat, a second, and the slack of a busy machine"
        assert "frozen" in info.failure.message
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: known(plane, "frozen").liveness == fleet_pb2.LIVENESS_LIVE)
        t.init()
        done = eventually(lambda: t.publish(values, 2, **only), 20)
        assert known(plane, "frozen").incarnation == said["incarnation"]
        assert done.outcomes[0].held.version == done.version


def listed(address: str) -> Any:
    channel = Dial(address).channel()
    try:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        return stub.ListReplicas(fleet_pb2.ListReplicasRequest(group="g"), timeout=5).replicas
    finally:
        channel.close()


def aborted(t: Trainer) -> Any:
    """The trainer's update once it is over; the caller's flush waits for nobody."""
    for c in t.open.values():
        c.abort("the update is over")
    t.open.clear()
    info = t.stub.GetUpdate(wt.GetUpdateRequest(group="g", update_id=t.update_id), timeout=5).update
    return info if info.phase == update_pb2.UPDATE_PHASE_ABORTED else None


def test_P21_SIGKILL_is_told_by_the_helper_which_leaves_as_every_child_does(plane: str) -> None:
    with program("replica", plane, "killed") as (process, said):
        eventually(lambda: known(plane, "killed").liveness == fleet_pb2.LIVENESS_LIVE)
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
            children = [int(pid) for pid in f.read().split()]
        assert said["helper"] in children
        process.kill()
        eventually(lambda: known(plane, "killed").liveness == fleet_pb2.LIVENESS_LOST, 2.5)
        eventually(lambda: not any(map(alive, children)), 2.5)


def test_SIGTERM_says_goodbye_and_exits_0(plane: str) -> None:
    with program("replica", plane, "leaving") as (process, said):
        eventually(lambda: known(plane, "leaving"))
        process.terminate()
        assert process.wait(8) == 0
        assert known(plane, "leaving").admin == fleet_pb2.ADMIN_STATE_LEAVING
        assert not alive(said["helper"])


def test_a_second_process_of_the_same_name_ends_the_first(plane: str) -> None:
    with program("replica", plane, "twice") as (first, _), program("replica", plane, "twice"):
        assert first.wait(10) == 1


async def test_it_works_inside_a_running_loop_and_leaves_no_thread_or_child(plane: str) -> None:
    """No loop of ours, no signal handler; subprocesses still start; everything ends with stop."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    agent = InferenceAgent(plane, "g", "embedded", TorchModuleEngine(Constant())).start()
    ticks = 0
    while agent.status().session is not SessionStatus.LIVE:
        await asyncio.sleep(0.02)
        ticks += 1
        assert ticks < 500
    for _ in range(20):
        child = await asyncio.create_subprocess_exec("true")
        assert await child.wait() == 0
    helper = agent._helper
    assert helper is not None and alive(helper.pid)
    assert {n: signal.getsignal(n) for n in before} == before
    await asyncio.to_thread(agent.stop)
    assert not alive(helper.pid)


def test_engines_load_by_module_and_by_name() -> None:
    assert load_engine("tests.inference_agent.process:demo_engine", {"staged": False}).generator is not None
    for wrong in ("nowhere:factory", "tests.inference_agent.process:nothing", "no_such_engine", "json:dumps"):
        with pytest.raises((ValueError, TypeError)):
            load_engine(wrong)
