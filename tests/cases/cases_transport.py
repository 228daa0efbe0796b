"""Transports: whoever dies, changes the source or is slow; bytes are whole, and finish waits for them."""

from __future__ import annotations

import time
from concurrent.futures import Future

from tests.cases.base import MOVERS, TRANSPORTS, Even, Small, case, check, holds, must, refused, site, wired
from tests.cases.cases_process import with_child
from tests.trainer_agent.fleet import fill, hook, same
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.trainer_agent.publisher import PublishHandle


@case
def X03_a_trainer_that_steps_once_the_source_is_free_spoils_nothing() -> None:
    """The documented lock: a source may change from ``source_free`` on, and that is never set too early. A change that
    breaks the lock fails finish: ``tests/process/test_lies.py``."""
    module = Even()
    with site("r0", make=Even) as f:
        live: Even = f.engines["r0"].modules[0]  # type: ignore[assignment]
        for step, transport in enumerate(MOVERS, 1):
            old, new = float(2 * step), float(2 * step + 1)
            module.become(old)
            given: Future[PublishHandle] = Future()
            with f.publisher(module, transport=transport) as publisher:
                publisher.init()

                def optimizer(nth: int, given: Future[PublishHandle] = given, new: float = new) -> None:
                    """Steps as soon as it may, between two buckets if it can."""
                    if given.result(10).source_free.is_set():
                        module.become(new)

                with hook("trainer.send.bucket", optimizer):
                    given.set_result(publisher.publish_async(step))
                    with must(f"the receiver has all the old values over {transport}"):
                        check("the source becomes free", given.result().source_free.wait(20))
                        module.become(new)
                        given.result().result(20)
            check(f"the receiver has all the old values over {transport}", live.read() == {old}, live.read())


@case
def X06_a_receiver_that_is_killed_in_a_bucket_hangs_nobody() -> None:
    module = Small(1)
    for transport in MOVERS:
        with site("r0") as f:
            child = with_child(f, "r1", stop_at=3)
            publisher = f.publisher(module, transport=transport)
            handle = publisher.publish_async(1, update_timeout=8)
            said = child.heard(20)
            check(f"the receiver is in a bucket over {transport}", said == {"inside": 3}, said)
            child.kill()
            began = time.monotonic()
            e = refused(f"the trainer raises over {transport}", lambda h=handle: h.result(20), UpdateFailed)  # type: ignore[misc]
            check(f"long before the deadline over {transport}", time.monotonic() - began < 4, e)
            check("the dead one is named", "r1" in str(e), e)
            fill(module, 2)
            with must(f"the process is usable over {transport}"):
                publisher.init()
                receipt = publisher.publish(2)
            check("the others take it", receipt.ready == ("r0",) and same(f.engines["r0"], module), receipt)


LAST = 9  # of the buckets of Small


@case
def X14_finish_waits_for_bytes_that_land_late() -> None:
    module = Small()
    with site("r0") as f, wired("r0/0"):
        engine = f.engines["r0"]
        for step, transport in enumerate(TRANSPORTS, 1):
            fill(module, step)
            with f.publisher(module, transport=transport, mode="in_place") as publisher:
                said: list[str] = []

                def late(nth: int, said: list[str] = said) -> None:
                    """Before the bytes of the last bucket are taken: has anybody gone on without them?"""
                    if nth == LAST:
                        u = f.state().open
                        said.append(str(u.phase) if u is not None else "over")
                        said.append("held" if engine.holders() else "resumed")

                with hook("replica.receive.before", late), must(f"the update commits over {transport}"):
                    publisher.publish(step)
                check(
                    f"nobody went on before its bytes were there over {transport}",
                    said == ["TRANSFERRING", "held"],
                    said,
                )
                check(f"it holds every byte over {transport}", holds(engine, module))
