"""WatchGroup: what changed in a group, by revision, resumable within the last changes kept."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from weakref import WeakKeyDictionary

from weightplane.controlplane.core.model import GroupState, Replica
from weightplane.v1 import fleet_pb2 as fl

from . import project
from .runtime import Group
from .watch import changes

__all__ = ["KEPT", "follow"]

#: Changes kept per group. A watcher that was away for longer starts with a full picture.
KEPT = 1024
_PACE_S = 0.05


class _Feed:
    """The changes of one group since its first watcher. ``look`` compares with what was seen last."""

    def __init__(self, state: GroupState) -> None:
        self.changes: deque[fl.WatchGroupResponse] = deque(maxlen=KEPT)
        self.began = state.revision
        self._seen: dict[str, tuple[Replica, bytes]] = {}
        self._group = b""
        self._wide: object = None
        self._state = state
        self._compare(state)

    @property
    def floor(self) -> int:
        """Revisions from here on can be resumed after."""
        return self.changes[0].revision - 1 if len(self.changes) == KEPT else self.began

    @property
    def revision(self) -> int:
        """Of the newest change."""
        return self.changes[-1].revision if self.changes else self.began

    def look(self, group: Group) -> None:
        """Take in what changed since the last look."""
        state = group.state
        if state is self._state:
            return
        changed, removed = self._compare(state)
        info = project.group_info(state, group.now())
        text = _without_clock(info)
        if changed or removed or text != self._group:
            self._group = text
            self.changes.append(
                fl.WatchGroupResponse(revision=state.revision, group=info, replicas=changed, removed=removed)
            )

    def _compare(self, state: GroupState) -> tuple[list[fl.ReplicaInfo], list[str]]:
        wide = (state.committed, state.rewinding)
        changed: list[fl.ReplicaInfo] = []
        for rid, r in state.replicas.items():
            seen = self._seen.get(rid)
            if seen is not None and seen[0] is r and wide == self._wide:
                continue
            info = project.replica_info(state, r)
            text = info.SerializeToString(deterministic=True)
            if seen is None or seen[1] != text:
                changed.append(info)
            self._seen[rid] = (r, text)
        removed = sorted(set(self._seen) - set(state.replicas))
        for rid in removed:
            del self._seen[rid]
        self._wide, self._state = wide, state
        return changed, removed


def _without_clock(info: fl.GroupInfo) -> bytes:
    copy = fl.GroupInfo()
    copy.CopyFrom(info)
    copy.ClearField("revision")
    copy.open_update.ClearField("remaining_ms")
    copy.open_update.timings.ClearField("total_s")
    return copy.SerializeToString(deterministic=True)


_feeds: WeakKeyDictionary[Group, _Feed] = WeakKeyDictionary()


async def follow(group: Group, after: int) -> AsyncIterator[fl.WatchGroupResponse]:
    """Changes after a revision; if they are not all kept, a full picture first."""
    feed = _feeds.get(group)
    if feed is None:
        feed = _feeds[group] = _Feed(group.state)
    feed.look(group)
    if after < feed.floor or after > max(feed.revision, group.state.revision):
        state = group.state
        yield fl.WatchGroupResponse(
            revision=state.revision,
            group=project.group_info(state, group.now()),
            replicas=[project.replica_info(state, r) for _, r in sorted(state.replicas.items())],
            full=True,
        )
        after = state.revision
    with changes(group) as changed:
        while True:
            if group.over is not None:
                raise group.over
            feed.look(group)
            missed = after < feed.floor
            for change in [c for c in feed.changes if c.revision > after]:
                yield change
                after = change.revision
            if missed:
                after = 0  # unreachable in practice: a full picture comes next time
            await changed.wait()
            changed.clear()
            await asyncio.sleep(_PACE_S)
