"""Streams that follow: one update or all of a group's (WatchUpdate), and the group itself (WatchGroup)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from weakref import WeakKeyDictionary

from weightplane.controlplane.core.events import RankGone, RankHello
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.update_state import Update
from weightplane.v1 import weight_transfer_pb2 as wt

from . import project
from .fields import refuse
from .runtime import Group

__all__ = ["SHARED_S", "changes", "paced", "updates"]

_LONGEST_S = 2.0
SHARED_S = 0.1  # that watchers are given the same message of one state; its clocks are as old


@contextmanager
def changes(group: Group) -> Iterator[asyncio.Event]:
    """An event that is set whenever something of the group worth telling changed."""
    event = asyncio.Event()
    group.watchers.add(event)
    try:
        yield event
    finally:
        group.watchers.discard(event)


async def paced(changed: asyncio.Event, began: float) -> None:
    """Wait for news, and before looking at it nineteen times as long as the last look took since ``began``.

    A look at a fleet of a thousand costs milliseconds and a barrier brings a thousand news: so followed, it costs the
    loop a twentieth of its time at most. What happened in between is in the newest message. A write that waited for its
    reader, or for its turn among hundreds, is no look: two seconds at most.
    """
    await asyncio.sleep(min(_LONGEST_S, 19 * (perf_counter() - began)))
    await changed.wait()
    changed.clear()


async def updates(
    group: Group, generation: int, rank: int, update_id: str, write: Callable[[wt.WatchUpdateResponse], Awaitable[None]]
) -> None:
    """The newest of an update whenever it changed. With a generation the stream is the rank's lease."""
    if update_id and group.find(update_id) is None:
        refuse(Reason.UNKNOWN_UPDATE, f"no update {update_id!r} in group {group.name!r}")
    if not generation:
        await _follow(group, 0, update_id, write)
        return
    await group.call(lambda call: RankHello(call, 0, generation, rank, watch=True))
    try:
        await _follow(group, generation, update_id, write)
    finally:
        group.submit(RankGone(generation, rank))


async def _follow(
    group: Group, generation: int, update_id: str, write: Callable[[wt.WatchUpdateResponse], Awaitable[None]]
) -> None:
    sent: wt.WatchUpdateResponse | None = None
    with changes(group) as changed:
        while True:
            if group.over is not None:
                raise group.over
            began = perf_counter()
            u = group.find(update_id) if update_id else project.newest_update(group.state, generation)
            answer = _shared(group, u, generation)
            if sent is None or not _same(sent, answer):
                await write(answer)
                sent = answer
            if answer.fenced or (update_id and (u is None or u.closed)):
                return
            await paced(changed, began)


_Told = dict[tuple[str, int], wt.WatchUpdateResponse]
#: By group: a state of it, until when that may be told of, and what watchers were told, by update and generation.
_told: WeakKeyDictionary[Group, tuple[GroupState, float, _Told]] = WeakKeyDictionary()


def _shared(group: Group, u: Update | None, generation: int) -> wt.WatchUpdateResponse:
    """``_event``, made once for all who look at the same state at the same time."""
    state, until, told = _told.get(group, (None, 0.0, {}))
    if state is not group.state or group.now() > until:
        told = {}
        _told[group] = group.state, group.now() + SHARED_S, told
    key = (u.update_id if u is not None else "", generation)
    if key not in told:
        told[key] = _event(group, u, generation)
    return told[key]


def _event(group: Group, u: Update | None, generation: int) -> wt.WatchUpdateResponse:
    t = group.state.trainer
    fenced = bool(generation) and (t is None or t.closed or t.generation != generation)
    answer = wt.WatchUpdateResponse(fenced=fenced)
    if u is not None:
        answer.update.CopyFrom(project.update_info(group.state, u, group.now()))
        answer.progress.extend(project.progress(u))
        answer.calls.extend(project.armed_calls(u))
    return answer


def _same(a: wt.WatchUpdateResponse, b: wt.WatchUpdateResponse) -> bool:
    """Equal but for the clocks. A copy of a thousand participants would cost more than the comparison."""
    if not (a.HasField("update") and b.HasField("update")):
        return a == b
    clocks = b.update.remaining_ms, b.update.timings.total_s
    b.update.remaining_ms, b.update.timings.total_s = a.update.remaining_ms, a.update.timings.total_s
    same = a == b
    b.update.remaining_ms, b.update.timings.total_s = clocks
    return same
