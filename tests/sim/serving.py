"""Who retains a copy and sends it to replicas that are caught up: a replica's agent, or all ranks of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from weightplane.controlplane.core import desired
from weightplane.controlplane.core.model import NONE_HELD, Held, Retained

from .world import PIECES, World

__all__ = ["Copies"]


class Copies:
    """One holder's copy. ``up``: whether it lives and is reached; ``failed``: told what cannot be sent, and why."""

    def __init__(self, world: World, name: str, up: Callable[[], bool], failed: Callable[[str], None]) -> None:
        self.world, self.rng = world, world.rng(f"copies/{name}")
        self.keeps = self.rng.random() < 0.6
        self._up, self._failed = up, failed
        self.lose()

    def lose(self) -> None:
        """The process ended."""
        self.forget()
        self.orders: dict[str, desired.ServeOrder] = {}

    def forget(self) -> None:
        """Nothing is kept any more; what is being sent is read to its end."""
        self.held = NONE_HELD
        self.content = NONE_HELD  # what the copy's bytes are: not what it says, where one went wrong

    @property
    def says(self) -> Retained | None:
        return Retained(self.held, "m-1") if self.held.version else None

    def take(self, held: Held) -> None:
        """Keep a copy of ``held``; now and then a bit of it is wrong."""
        self.held = held
        self.content = held if self.rng.random() < 0.97 or not self.world.faulty else Held(-1, "garbage")

    def told(self, orders: Iterable[desired.ServeOrder]) -> None:
        """What is to be sent now."""
        before, self.orders = self.orders, {o.catch_up_id: o for o in orders}
        for o in self.orders.values():
            if o.catch_up_id in before:
                continue
            if o.held != self.held:
                self._failed(o.catch_up_id)
            else:
                self.world.after(self.world.latency(), self._send, o.catch_up_id, self.content, 0)

    def _send(self, catch_up_id: str, content: Held, bucket: int) -> None:
        """The next bucket, once it may go: to every worker of the one replica."""
        o = self.orders.get(catch_up_id)
        if o is None:
            return
        if not self._up() or not o.go or o.hold:
            self.world.after(0.02, self._send, catch_up_id, content, bucket)
            return
        for member in o.channel.receivers:
            rid, _, worker = member.rpartition("/")
            agent: Any = self.world.agents[rid]
            if agent.up():
                delay = self.rng.uniform(0.001, 0.03)
                self.world.after(delay, agent.bytes, catch_up_id, 1, bucket, content, int(worker))
        if bucket + 1 < PIECES:
            self.world.after(self.rng.uniform(0.001, 0.1), self._send, catch_up_id, content, bucket + 1)
