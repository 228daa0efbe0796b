"""Cases of lesser severity that no other test shows. Not planted; small."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest

from tests.cases.base import Even, Small, holds, site, soon
from tests.cases.cases_control import _Fails, held_up, in_thread
from tests.trainer_agent.fleet import fill, hook
from weightplane.controlplane.core.states import Admin
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.channels import ChannelPool
from weightplane.trainer_agent.errors import CallRefused, UpdateFailed
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc


def test_C33_two_resumes_at_once_in_a_wave_of_requests_hang_nobody() -> None:
    with site("r0", make=Even) as f:
        engine, publisher = f.engines["r0"], f.publisher(Even())
        publisher.publish(1)
        fleet = fleet_pb2_grpc.FleetServiceStub(publisher._hold.client._channel)
        fleet.PauseGeneration(fleet_pb2.PauseGenerationRequest(request_id="p", group="g"), timeout=10)
        done: list[int] = []

        def request() -> None:
            with engine.request(), engine.forward():
                done.append(1)

        waiting = [in_thread(request) for _ in range(8)]
        calls = [
            fleet.ResumeGeneration.future(fleet_pb2.ResumeGenerationRequest(request_id=f"r{i}", group="g"), timeout=10)
            for i in range(4)
        ]
        assert all(not c.result().replicas[0].pause_holders for c in calls)
        for t in waiting:
            t.join(5)
        assert len(done) == 8 and not engine.holders()


def test_C36_the_age_of_the_cache_shows_and_every_update_clears_it() -> None:
    with site("r0") as f:
        engine, module = f.engines["r0"], Small()
        publisher = f.publisher(module)
        for step in range(1, 6):
            publisher.publish(step)
            assert engine.cache_epoch == step


def test_C47_a_handle_is_done_only_after_the_apply() -> None:
    with site("r0") as f:
        module, go = Small(3), threading.Event()
        publisher = f.publisher(module)
        with hook("replica.apply.before", partial(held_up, go)) as reached:
            handle = publisher.publish_async(1)
            assert reached.wait(10)
            assert handle.source_free.wait(10), "every byte is there, and the source is free"
            time.sleep(0.1)
            assert not handle.done()
            go.set()
            assert handle.result(10).ready == ("r0",)
        assert holds(f.engines["r0"], module)


def test_C64_a_rank_that_comes_late_is_waited_for_as_long_as_init_timeout_says() -> None:
    with site("r0") as f:
        module = Small(1)
        job: dict[str, Any] = {"world_size": 2, "incarnation": "job", "trainer_id": "t"}
        alone = f.publisher(module, rank=0, init_timeout=1.5, **job)
        with pytest.raises(CallRefused, match=r"ranks \[1\] of 2"):
            alone.init()
        ranks = [f.publisher(module, rank=r, init_timeout=20, **job) for r in range(2)]
        first = in_thread(ranks[0].init)
        time.sleep(0.8)
        assert first.is_alive()
        ranks[1].init()
        first.join(5)
        assert all(r._hold.bound for r in ranks)


def test_P08_P24_subprocesses_beside_open_channels_hang_nobody() -> None:
    with site("r0") as f:
        module = Small(1)
        publisher = f.publisher(module)
        publisher.publish(1)
        ended: list[int] = []

        def run() -> None:
            for _ in range(25):
                ended.append(subprocess.run(["true"], timeout=20).returncode)

        threads = [in_thread(run) for _ in range(2)]
        step = 1
        while any(t.is_alive() for t in threads):
            step += 1
            fill(module, step)
            publisher.publish(step)
        assert ended == [0] * 50 and holds(f.engines["r0"], module)


SCRIPT = """
import os
from weightplane.controlplane.server.thread import ControlPlaneThread
from weightplane.controlplane.dial import Dial
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

def groups():
    with Dial(plane.address).channel() as channel:
        return fleet_pb2_grpc.FleetServiceStub(channel).ListGroups(fleet_pb2.ListGroupsRequest(), timeout=10).groups

with ControlPlaneThread() as plane:
    for _ in range(3):
        groups()
        pid = os.fork()
        if not pid:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        groups()
print("fine")
"""


def test_P10_a_child_forked_beside_a_running_server_exits_and_the_server_serves() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def test_P19_two_deployments_on_one_host_do_not_meet() -> None:
    """Each with its own control plane, the same names, every default."""
    with site("r0") as one, site("r0") as other:
        for step, transport in enumerate(("shm", "grpc"), 1):
            modules = [Small(10 * step), Small(10 * step + 1)]
            publishers = [f.publisher(m, transport=transport) for f, m in zip((one, other), modules, strict=True)]
            threads = [in_thread(partial(p.publish, step)) for p in publishers]
            for t in threads:
                t.join(20)
            for f, m, p in zip((one, other), modules, publishers, strict=True):
                assert holds(f.engines["r0"], m)
                p.close()


def test_P28_a_trainer_whose_teardown_raises_leaves_the_engines_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    with site("r0") as f:
        module = Small(1)
        first = f.publisher(module)
        first.publish(1)

        def raises(self: ChannelPool) -> None:
            raise OSError("the driver is gone")

        with monkeypatch.context() as m:
            m.setattr(ChannelPool, "close", raises)
            with pytest.raises(OSError, match="driver is gone"):
                first.close()
        fill(module, 2)
        second = f.publisher(module, trainer_id="second")
        assert second.publish(2).ready == ("r0",) and holds(f.engines["r0"], module)


def test_P30_an_engine_that_fails_every_update_is_quarantined_and_shown() -> None:
    with site("r0") as f:
        broken = _Fails(Small())
        broken.at = "prepare"
        f.replica("r1", broken)
        module = Small(1)
        publisher = f.publisher(module)
        limit = f.state().config.quarantine_after
        for step in range(1, limit + 1):
            with pytest.raises(UpdateFailed, match="no room"):
                publisher.publish(step)
        soon("it is quarantined", lambda: f.state().replicas["r1"].admin is Admin.QUARANTINED)
        info = f.check_replica("r1").replica
        assert info.failures_in_a_row == limit and "no room" in info.failure.message
        only = publisher.publish(9, exclude=("r1",))
        assert only.ready == ("r0",)
        broken.at = ""
        assert set(publisher.publish(10).ready) == {"r0", "r1"}, "a full update that goes well ends the quarantine"
        assert f.state().replicas["r1"].admin is Admin.ACTIVE


def test_T35_the_post_update_step_runs_once_however_many_buckets() -> None:
    runs: list[int] = []
    with site() as f:
        f.replica("r0", TorchModuleEngine(Small(), hooks=[lambda m: runs.append(1)]))
        publisher = f.publisher(Small(1))
        for step, mode in ((1, "staged"), (2, "in_place")):
            assert publisher.publish(step, mode=mode).bytes > 4 * 4096
            assert len(runs) == step
