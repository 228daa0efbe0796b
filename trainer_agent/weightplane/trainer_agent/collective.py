"""What makes several ranks one trainer: one incarnation, equal request ids, and word of a failure before the start."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable

from weightplane.v1 import weight_transfer_pb2 as wt

from .client import Client
from .errors import RpcRefused, Unanswered
from .stop import Stop

__all__ = ["default_incarnation", "start_request_id", "tell_others"]


def default_incarnation(world_size: int) -> str:
    """torchrun's run id with its restart count; random for a single rank outside it.

    ``ValueError`` for several ranks outside torchrun: they must be told one that is equal on all.
    """
    run, restarts = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if run and run != "none":
        return f"{run[:90]}.{restarts}"
    if world_size == 1:
        return uuid.uuid4().hex
    raise ValueError(
        "incarnation: expected a text that is equal on all ranks and fresh for each start of the job (there is no "
        "TORCHELASTIC_RUN_ID to take it from)"
    )


def start_request_id(incarnation: str, generation: int, publish: int, attempt: int) -> str:
    """The request_id of a StartUpdate, equal on all ranks: the first rank's call opens the update, the others' repeat
    it and get the same answer. The same id with other content (ranks that disagree) is refused by the coordinator."""
    text = f"{incarnation}\n{generation}\n{publish}\n{attempt}"
    return "s-" + hashlib.sha256(text.encode()).hexdigest()[:48]


def tell_others(
    client: Client,
    group: str,
    generation: int,
    rank: int,
    request_id: str,
    reason: str,
    join: Callable[[float, Stop], object],
    stop: Stop,
    seconds: float,
) -> None:
    """This rank failed before it could start: abort the update that the other ranks open, as soon as they do.

    Runs in a thread of its own: joins the ranks' barrier in this rank's stead (``join``), waits for the update of
    ``request_id``, aborts it naming this rank. Gives up after ``seconds``, or when ``stop`` is set.
    """

    def work() -> None:
        end, pause = time.monotonic() + seconds, 0.02
        try:
            join(end, stop)
            while time.monotonic() < end:
                update_id = _find(client, group, request_id, end, stop)
                if update_id:
                    abort = wt.AbortUpdateRequest(
                        request_id=uuid.uuid4().hex,
                        group=group,
                        generation=generation,
                        update_id=update_id,
                        reason=reason,
                        rank=rank,
                    )
                    client.call("AbortUpdate", abort, end, stop)
                    return
                stop.wait(lambda: False, time.monotonic() + pause)
                pause = min(0.5, 1.2 * pause)
        except Exception:  # noqa: S110 - the caller has its own error; the others' deadline holds whatever happens here
            pass

    threading.Thread(target=work, name="weightplane-tell-others", daemon=True).start()


def _find(client: Client, group: str, request_id: str, end: float, stop: Stop) -> str:
    try:
        request = wt.GetUpdateRequest(group=group, request_id=request_id)
        answer: wt.GetUpdateResponse = client.call("GetUpdate", request, end, stop)
    except (RpcRefused, Unanswered):
        return ""
    return answer.update.update_id
