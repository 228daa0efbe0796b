"""Processes: who dies, who forks, and what it costs the others. The one that dies is a real process."""

from __future__ import annotations

import time
from typing import Any

from tests.cases.base import Site, Small, case, check, must, refused, site, soon
from tests.cases.children import POOL
from tests.trainer_agent.fleet import fill, same
from weightplane.trainer_agent.errors import TrainerHeld, UpdateFailed


def with_child(f: Site, name: str, **arguments: Any) -> Any:
    """A replica in a process of its own."""
    child = POOL.become("replica", address=f.address, name=name, **arguments)
    soon(f"{name} is here", lambda: name in f.state().replicas and f.state().replicas[name].reported)
    return child


def granted(publisher: Any, seconds: float) -> bool:
    """Whether init is granted within that time, by a trainer that waits for the lease of the one before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            publisher.init()
            return True
        except TrainerHeld:
            time.sleep(0.05)
    return False


@case
def P01_a_receiver_that_breaks_in_the_transfer_reaches_the_trainer_in_its_own_words() -> None:
    with site("r0") as f:
        child = with_child(f, "r1", fail_at=3)
        module = Small(1)
        publisher = f.publisher(module)
        began = time.monotonic()
        e = refused("the trainer raises", lambda: publisher.publish(1, update_timeout=6), UpdateFailed)
        check("the trainer gets the receiver's error text", "the receiver broke in bucket 3" in str(e), e)
        check("at once, not at the deadline", time.monotonic() - began < 5)
        check("the receiver is named", "r1" in e.failures, e.failures)
        f.idle("the update is aborted on both sides", 2)
        check("nothing moved", f.engines["r0"].held()[0].version == 0)
        child.ask(do="calm")
        fill(module, 2)
        with must("the next update works"):
            receipt = publisher.publish(2)
        check("on all", set(receipt.ready) == {"r0", "r1"} and same(f.engines["r0"], module), receipt)


@case
def P02_a_forked_child_is_told_so_and_its_parent_goes_on() -> None:
    with site("r0") as f:
        child = POOL.become("trainer", address=f.address, name="parent")
        said = child.ask(do="publish")
        check("the parent publishes", said == {"ready": ["r0"]}, said)
        said = child.ask(do="fork")
        check("the forked child is told at once", said == {"child": "told"}, said)
        said = child.ask(do="publish")
        check("the parent is unaffected", said == {"ready": ["r0"]}, said)
        check("the engine holds its weights", same(f.engines["r0"], Small(1)))


@case
def P03_a_new_trainer_takes_over_from_a_killed_one() -> None:
    with site("r0", "r1") as f:
        lives = f.lives
        child = POOL.become("trainer", address=f.address, name="first")
        said = child.ask(do="publish")
        check("the first trainer publishes", said == {"ready": ["r0", "r1"]}, said)
        child.kill()
        module = Small(5)
        second = f.publisher(module, trainer_id="second")
        check("a new trainer's init succeeds", granted(second, 8))
        with must("its full update succeeds"):
            receipt = second.publish(2, update_timeout=6)
        check("on all", set(receipt.ready) == {"r0", "r1"}, receipt)
        check("the bytes are exact", all(same(e, module) for e in f.engines.values()))
        check("no engine was restarted", f.lives == lives)


@case
def P05_a_dead_engine_is_found_named_and_left_out() -> None:
    with site("r0") as f:
        child = with_child(f, "r1")
        life, module = f.lives["r0"], Small(1)
        publisher = f.publisher(module)
        check("both take updates", set(publisher.publish(1).ready) == {"r0", "r1"})
        child.kill()
        began = time.monotonic()
        try:
            receipt = publisher.publish(2, update_timeout=6)
        except UpdateFailed as e:
            check("it is found at once", time.monotonic() - began < 5, e)
            check("the error names it", "r1" in e.failures, e)
            with must("the next update goes on without it"):
                receipt = publisher.publish(3)
        check("it is found at once", time.monotonic() - began < 5 + 1)
        check("the dead one is named", "r1" in receipt.absent, receipt)
        check("the others are unaffected", receipt.ready == ("r0",) and f.lives["r0"] == life, receipt)
        check("the bytes are exact", same(f.engines["r0"], module))


@case
def P07_a_client_that_left_without_a_word_is_succeeded_and_a_live_one_is_not_robbed() -> None:
    with site("r0") as f:
        child = POOL.become("trainer", address=f.address, name="first")
        module = Small(4)
        second = f.publisher(module, trainer_id="second")
        e = refused("a live session is not stolen", second.init, TrainerHeld)
        check("its holder is named", "'first'" in str(e), e)
        said = child.ask(do="publish")
        check("its holder goes on", said == {"ready": ["r0"]}, said)
        generation = f.state().trainer.generation
        child.tell(do="exit")
        check("it left without a word", child.process.wait(20) == 0)
        check("a new client's init succeeds", granted(second, 4))
        check("under a higher generation", f.state().trainer.generation > generation)
        with must("its update commits"):
            second.publish(2)
        check("the bytes are exact", same(f.engines["r0"], module))
