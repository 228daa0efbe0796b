"""One open stream of a member, and how it may be told to end."""

from __future__ import annotations

import asyncio

import grpc

from weightplane.controlplane.core.reasons import Failure, Reason

from .errors import Refused

__all__ = ["Session", "stepping_down", "superseded"]


class Session:
    """One open stream of a member. ``wake`` makes it send the newest state; it never holds more than one message.

    ``revision`` is that of the newest desired state sent, ``generation`` a trainer rank's (0: a replica's session).
    """

    def __init__(self, agent_id: str, kind: str, number: int, generation: int = 0) -> None:
        self.agent_id, self.kind, self.number, self.generation = agent_id, kind, number, generation
        self.revision = 0
        self.changed = asyncio.Event()
        self.ended: asyncio.Future[Refused] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """What the member should know changed."""
        self.changed.set()

    def end(self, why: Refused) -> None:
        """End the stream with this status. A repeat changes nothing."""
        if not self.ended.done():
            self.ended.set_result(why)


def superseded(agent_id: str, session: int) -> Refused:
    """What a stream is told that a newer hello replaced."""
    message = f"a newer session of {agent_id} (after {session - 1}) superseded this one: do not redial"
    return Refused(Failure(Reason.SESSION_SUPERSEDED, message, agent_id))


def stepping_down(message: str) -> Refused:
    """What streams and callers are told while leadership is taken (again)."""
    failure = Failure(Reason.COORDINATOR_RESTARTED, f"{message}; dial again")
    return Refused(failure, code=grpc.StatusCode.UNAVAILABLE)
