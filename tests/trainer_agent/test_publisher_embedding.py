"""The Publisher inside other programs: threads, event loops, forks; what it leaves behind; what it never touches."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.trainer_agent.fleet import Fleet, eventually, fill, fleet, hook, same
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.errors import PublisherClosed, UpdateFailed
from weightplane.trainer_agent.publisher import PublishHandle
from weightplane.trainer_agent.sources import ModuleSource
from weightplane.trainer_agent.sources_gather import GatherSource
from weightplane.transports.digest import digest_tensor

ROOT = Path(__file__).resolve().parents[2]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])


@pytest.fixture
def f() -> Iterator[Fleet]:
    with fleet() as f:
        f.replica("r0", TorchModuleEngine(Model()))
        yield f


def test_a_cancel_that_comes_after_the_decision_gives_the_receipt_and_the_next_publish_goes_on(f: Fleet) -> None:
    module = Model()
    publisher = f.publisher(module)
    publisher.publish(1)
    handles: list[PublishHandle] = []
    made = threading.Event()

    def decided(n: int) -> None:
        made.wait(10)
        handles[0].cancel()

    fill(module, 2)
    with hook("server.decide.after_write", decided) as was_decided:
        handles.append(publisher.publish_async(2))
        made.set()
        assert handles[0].result(20).version == 2 and was_decided.is_set()
    fill(module, 3)
    assert publisher.publish(3).version == 3 and same(f.engines["r0"], module)


def test_source_free_comes_before_the_replicas_are_done(f: Fleet) -> None:
    module = Model()
    publisher = f.publisher(module)
    publisher.publish(1)
    go = threading.Event()

    def held(n: int) -> None:
        go.wait(10)

    fill(module, 2)
    want = {k: v.clone() for k, v in module.state_dict().items()}
    with hook("replica.apply.before", held):
        handle = publisher.publish_async(2)
        assert handle.source_free.wait(10) and not handle.done()
        fill(module, 3)  # the next step's work, while the replica applies the last one's
        with pytest.raises(TimeoutError):
            handle.result(0.05)
        go.set()
        assert handle.result(10).committed
    live = f.engines["r0"].modules[0].state_dict()
    assert all(torch.equal(live[k], v) for k, v in want.items())


def test_under_retry_the_source_is_held_to_the_end(f: Fleet) -> None:
    module = Model()
    publisher = f.publisher(module)
    publisher.publish(1)
    go, at_apply = threading.Event(), threading.Event()

    def held(n: int) -> None:
        at_apply.set()
        go.wait(10)

    with hook("replica.apply.before", held):
        handle = publisher.publish_async(2, failure="retry")
        assert at_apply.wait(10) and not handle.source_free.wait(0.1)
        go.set()
        assert handle.result(10).committed and handle.source_free.is_set()


def test_a_publish_waits_for_the_one_before_it(f: Fleet) -> None:
    publisher = f.publisher(Model())
    handles = [publisher.publish_async(step) for step in (1, 2, 3)]
    assert publisher.publish(4).committed
    assert {h.result(10).step for h in handles} == {1, 2, 3}


async def test_inside_a_running_loop(f: Fleet) -> None:
    module = Model()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.ensure_future(tick())
    async with f.publisher(module) as publisher:
        await publisher.ainit()
        receipts = [await publisher.apublish(step) for step in (1, 2)]
        handle = publisher.publish_async(3)
        await handle.wait_source_free()
        receipts.append(await handle)
    ticking.cancel()
    assert [r.step for r in receipts] == [1, 2, 3] and ticks > 5 and same(f.engines["r0"], module)


async def test_cancelling_a_coroutine_aborts_its_update(f: Fleet) -> None:
    publisher = f.publisher(Model())
    await publisher.apublish(1)
    before = f.state().committed

    go = threading.Event()

    with hook("trainer.send.bucket", lambda _: go.wait(10)) as there:
        task = asyncio.ensure_future(publisher.apublish(2))
        assert await asyncio.to_thread(there.wait, 10)
        task.cancel()
        asyncio.get_running_loop().call_later(0.1, go.set)  # the task has heard by then
        with pytest.raises(asyncio.CancelledError):
            await task
    eventually(lambda: f.state().open is None)
    assert f.state().committed == before
    assert (await publisher.apublish(3)).committed


def test_a_handle_can_be_cancelled(f: Fleet) -> None:
    publisher = f.publisher(Model())
    publisher.publish(1)

    go = threading.Event()

    with hook("trainer.send.bucket", lambda _: go.wait(10)) as there:
        handle = publisher.publish_async(2)
        assert there.wait(10)
        handle.cancel("enough")
        go.set()
        with pytest.raises(PublisherClosed, match="enough"):
            handle.result(5)
    assert handle.source_free.is_set()
    assert publisher.publish(3).committed


def test_in_another_thread(f: Fleet) -> None:
    module, done = Model(), []

    def run() -> None:
        with f.publisher(module) as publisher:
            done.append(publisher.publish(1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert done and done[0].committed and same(f.engines["r0"], module)


def test_a_forked_child_is_told_so(f: Fleet) -> None:
    publisher = f.publisher(Model())
    publisher._pid = os.getpid() + 1  # what a fork looks like from inside; a real fork is in the script below
    for call in (publisher.init, lambda: publisher.publish(1), lambda: publisher.publish_async(1)):
        with pytest.raises(RuntimeError, match="a fork of it"):
            call()
    publisher._pid = os.getpid()
    publisher.publish(1)


SCRIPT = """
import os, signal, sys, threading
before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
import torch
from torch import nn
from weightplane.trainer_agent.errors import ForkedProcessError
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource

publisher = Publisher(sys.argv[1], "g", ModuleSource(nn.Linear(2, 2)), update_timeout=2, heartbeat="stream")
pid = os.fork()
if not pid:
    try:
        publisher.publish(1)
    except ForkedProcessError as e:
        assert "spawn" in str(e)
        os._exit(7)
    os._exit(8)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
try:
    publisher.publish(1)
except Exception as e:
    assert type(e).__name__ == "UpdateFailed", repr(e)  # the replica holds another model
publisher.close()
assert {s: signal.getsignal(s) for s in before} == before
assert not torch.cuda.is_initialized()
assert all(t.daemon for t in threading.enumerate() if t is not threading.main_thread())
import asyncio
try:
    asyncio.get_running_loop()
except RuntimeError:
    print("fine")
"""


def test_no_signals_no_fork_no_loop_no_cuda(f: Fleet) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, f.address]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def test_a_program_that_forgets_to_close_still_ends(f: Fleet) -> None:
    script = SCRIPT.partition("pid = os.fork()")[0] + "publisher.init()\nprint('fine')\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, f.address]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def test_the_package_offers_its_names_without_torch() -> None:
    script = (
        "import sys, weightplane.trainer_agent as t; assert 'torch' not in sys.modules; "
        "assert all(getattr(t, n) is not None for n in t.__all__)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_hundred_publishes_leave_the_source_untouched_and_nothing_behind(f: Fleet) -> None:
    module = Model()
    before = {k: (digest_tensor(v), v.data_ptr(), v._version) for k, v in module.state_dict().items()}
    publisher = f.publisher(ModuleSource(module))
    for step in range(5):
        publisher.publish(step)

    def kept() -> tuple[int, int, int]:
        mapped = sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return len(os.listdir("/proc/self/fd")), threading.active_count(), mapped

    gc.collect()
    first = kept()
    for step in range(5, 100):
        publisher.publish(step)
    gc.collect()
    slack = 3  # gRPC opens and closes descriptors of its own; a leak would be ninety-five of something
    eventually(lambda: all(now <= then + slack for now, then in zip(kept(), first, strict=True)), what=f"{first}")
    assert {k: (digest_tensor(v), v.data_ptr(), v._version) for k, v in module.state_dict().items()} == before
    threads = threading.active_count()
    publisher.close()
    eventually(lambda: threading.active_count() < threads)


def test_a_cast_source_publishes_the_cast_values(f: Fleet) -> None:
    f.agents["r0"].stop(leave=False)
    f.replica("r0", TorchModuleEngine(Model().bfloat16()))
    module = Model()
    publisher = f.publisher(ModuleSource(module, cast=torch.bfloat16), bucket_bytes=4096)
    receipt = publisher.publish(1)
    assert receipt.bytes == sum(p.numel() * 2 for p in module.parameters())
    live = f.engines["r0"].modules[0].state_dict()
    assert all(torch.equal(live[k], v.bfloat16()) for k, v in module.state_dict().items())


def test_a_gather_source_on_one_rank(f: Fleet) -> None:
    module = Model()
    seen: list[str] = []

    def fn(step: int):
        for name, tensor in module.state_dict().items():
            seen.append(name)
            yield name, tensor.clone()

    publisher = f.publisher(GatherSource(fn))
    for step in (1, 2):
        fill(module, step)
        receipt = publisher.publish(step)
        assert same(f.engines["r0"], module) and receipt.gather_s > 0
    assert len(seen) == 3 * len(module.state_dict())  # one look, then once a publish
    handle = publisher.publish_async(3)
    assert handle.result(10).committed


def test_a_gather_source_that_breaks_raises_its_own_error(f: Fleet) -> None:
    module, broken = Model(), [False]

    def fn(step: int):
        for i, (name, tensor) in enumerate(module.state_dict().items()):
            if broken[0] and i == 3:
                raise ArithmeticError("the collective is broken")
            yield name, tensor.clone()

    publisher = f.publisher(GatherSource(fn))
    publisher.publish(1)
    broken[0] = True
    with pytest.raises(ArithmeticError, match="the collective is broken"):
        publisher.publish(2)
    broken[0] = False
    assert publisher.publish(3).committed


def test_a_fleets_failure_lets_the_iterator_run_to_its_end(f: Fleet) -> None:
    module = Model()
    yielded: list[str] = []

    def fn(step: int):
        for name, tensor in module.state_dict().items():
            yielded.append(name)
            yield name, tensor.clone()

    publisher = f.publisher(GatherSource(fn))
    publisher.publish(1)
    yielded.clear()

    def die(n: int) -> None:
        f.agents["r0"].stop(leave=False)

    with hook("trainer.update.armed", die), pytest.raises(UpdateFailed):
        publisher.publish(2)
    assert len(yielded) == len(module.state_dict())
