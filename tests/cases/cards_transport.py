"""Transports over wires: complete means complete on the device; who leaves or dies holds nobody up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from tests.cases.base import Small, check, must, soon
from tests.cases.card_models import Even
from tests.cases.cards import Stand, cards, on, on_sender, turned_off
from tests.cases.wires import Wire
from tests.trainer_agent.fleet import fill, hook
from tests.transports.host_card import card
from weightplane.controlplane.core.states import Admin
from weightplane.trainer_agent.publisher import PublishHandle

LAST = Even.LAYERS
DELAY_S = 0.15


def even(w: Wire, size: int = Even.SIZE) -> Any:
    return on_sender(w, Even(size))


@contextmanager
def produced_late(w: Wire, module: Even, k: float) -> Iterator[None]:
    """Inside, the calling thread's current stream still writes the module, a while from now."""
    if w.sender != "cpu":
        with torch.cuda.stream(torch.cuda.Stream(w.sender)):
            torch.cuda._sleep(int(2 * DELAY_S * 2e9))
            module.become(k)
            yield
        return
    writing = card().writing = threading.Event()

    def kernel() -> None:
        time.sleep(2 * DELAY_S)  # what it would take
        module.become(k)
        writing.set()

    thread = threading.Thread(target=kernel)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        card().writing = None


@on("shm", "ucx", "cuda_ipc", "nccl", but=("shm-host", "ucx-host", "nccl-host"))  # these know no streams
def X12_what_the_current_stream_still_writes_is_waited_for(w: Wire) -> None:
    with cards(w, "even") as c:
        module = even(w)
        for verify in ("off",) if w.on_host else ("off", "full"):  # there hashes read the host's memory, past streams
            publisher = c.publisher(module, bucket_bytes=Even.BUCKET, verify=verify, incarnation=f"job {verify}")
            publisher.init()
            for step in (1, 2, 3):
                k = 10.0 * step + len(verify)
                with produced_late(w, module, k), must("the values are those that were being written"):
                    publisher.publish(step)
                c.exact("the values are those that were being written", _filled(k))
            publisher.close()


def _filled(k: float, size: int = Even.SIZE) -> Even:
    module = Even(size)
    module.become(k)
    return module


@on("cuda_ipc", "nccl", "ucx")
def X10_every_value_is_final_when_generation_goes_on(w: Wire) -> None:
    """A generation loop reads on a stream of its own, all the time; the last buckets are large, then slow too."""
    small = w.on_host or w.transport == "nccl"  # there what is unpacked after the wire ends last
    size, repeats = Even.SIZE if small else 4 << 20, 10 if w.on_host else 100
    with cards(w, "even" if small else "large", staged=True) as c:
        module = even(w, size)
        publisher = c.publisher(module, bucket_bytes=8 * size, verify="off")
        module.become(1)
        c.commits("the update commits", publisher, 1)
        c.twin.do("read", name="r0")
        for step in range(2, 2 + 2 * repeats):
            if step == 2 + 2 * repeats - 6 and w.transport != "ucx":
                c.twin.do("drag", seconds=DELAY_S / 3)
            module.become(step)
            c.commits("the update commits", publisher, step, mode="in_place" if step % 2 else "staged")
            if step % 10 == 0:
                c.exact("every value is final when finish returns", module)
        said = c.twin.do("was_read")
        check("every value is final when a pass reads", not said["torn"], said["torn"][:3])
        check("there were passes", said["passes"] >= repeats, said["passes"])
        c.exact("every value is final when finish returns", module)


@on("cuda_ipc", "nccl")
def X11_complete_means_on_the_device_and_the_time_says_so(w: Wire) -> None:
    """Copies that end late, by a delay on the product's own streams; a consumer clones at the earliest moment."""
    with cards(w, "even", clones=True) as c:
        module = even(w)
        publisher = c.publisher(module, bucket_bytes=Even.BUCKET, verify="off")
        module.become(1)
        c.commits("the update commits", publisher, 1)
        c.twin.do("drag", seconds=DELAY_S)
        for step in (2, 3):
            module.become(step)
            began = time.monotonic()
            receipt = c.commits("the update commits", publisher, step)
            took = time.monotonic() - began
            found = c.twin.do("cloned")
            check("what the consumer cloned on its stream is final", found == [float(step)], found)
            wire_s = receipt.replicas[0].wire_s
            check("the time is the device's", DELAY_S * 0.6 <= wire_s <= took, wire_s, took)
            c.exact("the values are exact", module)


@on()
def X14_finish_waits_for_bytes_that_land_late(w: Wire) -> None:
    with cards(w, "even") as c:
        module = even(w)
        publisher = c.publisher(module, bucket_bytes=Even.BUCKET)
        for step in (1, 2):
            module.become(step)
            c.twin.do("hold", point="replica.receive.before", nth=LAST)
            handle = publisher.publish_async(step)
            check(
                "finish waits for the bytes: the last bucket is late",
                c.twin.do("inside", seconds=8 if w.on_host else 15),
            )
            holders = c.twin.do("holders", name="r0")
            waits = c.held_in_transfer() and not handle.done() and "update" in holders
            check("finish waits for the bytes", waits, holders)
            c.twin.do("go")
            with must("finish waits for the bytes: it commits"):
                handle.result(20)
            c.exact("every byte is there", module)


@on()
def X03_a_trainer_that_steps_once_the_source_is_free_spoils_nothing(w: Wire) -> None:
    with cards(w, "even") as c:
        module = even(w)
        publisher = c.publisher(module, bucket_bytes=Even.BUCKET)
        publisher.init()
        for step in (1, 2, 3):
            old, new = float(2 * step), float(2 * step + 1)
            module.become(old)
            given: Future[PublishHandle] = Future()

            def optimizer(nth: int, given: Future[PublishHandle] = given, new: float = new) -> None:
                """Steps as soon as it may, between two buckets if it can."""
                if given.result(10).source_free.is_set():
                    module.become(new)

            with hook("trainer.send.bucket", optimizer):
                given.set_result(publisher.publish_async(step))
                with must("the receiver has all the old values"):
                    check("the source becomes free", given.result().source_free.wait(20))
                    module.become(new)
                    given.result().result(20)
            c.exact("the receiver has all the old values", _filled(old))


@on()
def X08_a_round_trip_brings_every_byte(w: Wire) -> None:
    with cards(w, "even") as c:
        module = even(w)
        publisher = c.publisher(module, bucket_bytes=Even.BUCKET)
        for step, k in enumerate((5.0, 7.0, 5.0), 1):
            module.become(k)
            c.commits("the update commits", publisher, step)
            c.exact("the digests are those of what was sent", module)


def _in_a_bucket(c: Stand, publisher: Any, step: int) -> PublishHandle:
    """A publish whose receiver stands in its third bucket."""
    c.twin.do("hold", point="replica.receive.inside", nth=3)
    handle: PublishHandle = publisher.publish_async(step, update_timeout=15)
    check("the receiver is in a bucket", c.twin.do("inside", seconds=20))
    return handle


def _goes_on(c: Stand, publisher: Any, module: Small) -> None:
    """The trainer's process is usable, with a fresh replica in the old one's place."""
    c.replace_twin()
    c.join("r0", "small", heartbeat=True)
    fill(module, 2)
    with must("the process is usable"):
        publisher.init()
        publisher.publish(2)
    c.exact("the next update is exact", module)


def _gone(c: Stand) -> bool:
    """Whether it has said goodbye, or has ended anyway."""
    return c.twin.process.poll() is not None or c.state().replicas["r0"].admin is Admin.LEAVING


@on()
def X05_a_receiver_that_leaves_in_a_bucket_ends_the_others_wait(w: Wire) -> None:
    with cards(w, "small", heartbeat=True) as c:
        module = on_sender(w, Small(1))
        publisher = c.publisher(module)
        publisher.init()
        handle = _in_a_bucket(c, publisher, 1)
        c.twin.tell(do="leave", arguments={})
        soon("it is known that it leaves", lambda: _gone(c), 15)
        turned_off("when its receiver leaves", c, lambda: handle.result(20), 4)
        check("it ended in good order", c.twin.process.wait(20) == 0, c.twin.process.returncode)
        _goes_on(c, publisher, module)


@on()
def X06_a_receiver_that_is_killed_in_a_bucket_hangs_nobody(w: Wire) -> None:
    with cards(w, "small", heartbeat=True) as c:
        module = on_sender(w, Small(1))
        publisher = c.publisher(module)
        publisher.init()
        handle = _in_a_bucket(c, publisher, 1)
        c.twin.kill()
        turned_off("when its receiver is killed", c, lambda: handle.result(20), 4)
        _goes_on(c, publisher, module)
