"""WatchGroup: what changed in a group, by revision, resumable within the last changes kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from time import perf_counter
from weakref import WeakKeyDictionary

from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.model import Replica
from weightplane.v1 import fleet_pb2 as fl

from . import fleet_view
from .runtime import Group
from .watch import SHARED_S, changes, paced

__all__ = ["KEPT", "follow"]

#: Changes kept per group. A watcher that was away for longer starts with a full picture.
KEPT = 256
_APART = 8  # a watcher that is further behind is told them as one


class _Feed:
    """The changes of one group since its first watcher. ``look`` compares with what was seen last."""

    def __init__(self, state: GroupState) -> None:
        self.changes: deque[fl.WatchGroupResponse] = deque(maxlen=KEPT)
        self.began = state.revision
        self._seen: dict[str, tuple[Replica, bytes]] = {}
        self._group = b""
        self._wide: object = None
        self._state = state
        self._picture: tuple[GroupState, float, fl.WatchGroupResponse] | None = None
        self._after: dict[int, list[fl.WatchGroupResponse]] = {}
        self._compare(state)

    @property
    def floor(self) -> int:
        """Revisions from here on can be resumed after."""
        return self.changes[0].revision - 1 if len(self.changes) == KEPT else self.began

    def after(self, revision: int) -> list[fl.WatchGroupResponse]:
        """Changes newer than a revision; many of them as one. All watchers are given the same messages: made and put
        into JSON for each of a few hundred, they cost a publish seconds."""
        found = self._after.get(revision)
        if found is None:
            if len(self._after) >= KEPT:
                self._after.clear()  # any revision may be asked for
            found = [c for c in self.changes if c.revision > revision]
            found = self._after[revision] = found if len(found) <= _APART else [_together(found)]
        return found

    def full(self, group: Group) -> fl.WatchGroupResponse:
        """The whole group as it is."""
        if self._picture is None or self._picture[0] is not group.state or group.now() > self._picture[1]:
            self._picture = group.state, group.now() + SHARED_S, _full(group)
        return self._picture[2]

    def look(self, group: Group) -> None:
        """Take in what changed since the last look."""
        state = group.state
        if state is self._state:
            return
        changed, removed = self._compare(state)
        info = fleet_view.group_info(state, group.now())
        text = _without_clock(info)
        if changed or removed or text != self._group:
            self._group = text
            self._after.clear()
            self.changes.append(
                fl.WatchGroupResponse(revision=state.revision, group=info, replicas=changed, removed=removed)
            )

    def _compare(self, state: GroupState) -> tuple[list[fl.ReplicaInfo], list[str]]:
        wide = (state.committed, state.rewinding, {rid: c.catch_up_id for rid, c in state.catch_ups.items()})
        changed: list[fl.ReplicaInfo] = []
        for rid, r in state.replicas.items():
            seen = self._seen.get(rid)
            if seen is not None and seen[0] is r and wide == self._wide:
                continue
            info = fleet_view.replica_info(state, r)
            text = info.SerializeToString(deterministic=True)
            if seen is None or seen[1] != text:
                changed.append(info)
            self._seen[rid] = (r, text)
        removed = sorted(set(self._seen) - set(state.replicas))
        for rid in removed:
            del self._seen[rid]
        self._wide, self._state = wide, state
        return changed, removed


def _together(changes: list[fl.WatchGroupResponse]) -> fl.WatchGroupResponse:
    """The changes, oldest first, as one."""
    replicas: dict[str, fl.ReplicaInfo] = {}
    removed: dict[str, None] = {}
    for c in changes:
        for r in c.replicas:
            replicas[r.replica_id] = r
            removed.pop(r.replica_id, None)
        for rid in c.removed:
            replicas.pop(rid, None)
            removed[rid] = None
    last = changes[-1]
    return fl.WatchGroupResponse(
        revision=last.revision, group=last.group, replicas=replicas.values(), removed=list(removed)
    )


def _without_clock(info: fl.GroupInfo) -> bytes:
    copy = fl.GroupInfo()
    copy.CopyFrom(info)
    copy.ClearField("revision")
    copy.open_update.ClearField("remaining_ms")
    copy.open_update.timings.ClearField("total_s")
    return copy.SerializeToString(deterministic=True)


_feeds: WeakKeyDictionary[Group, _Feed] = WeakKeyDictionary()


async def follow(group: Group, after: int, write: Callable[[fl.WatchGroupResponse], Awaitable[None]]) -> None:
    """Changes after a revision. Whoever knows none, or one too old, gets a full picture."""
    feed = _feeds.get(group)
    if feed is None:
        feed = _feeds[group] = _Feed(group.state)
    with changes(group) as changed:
        while True:
            if group.over is not None:
                raise group.over
            began = perf_counter()
            feed.look(group)
            if not feed.floor <= after <= group.state.revision:
                after = group.state.revision
                await write(feed.full(group))
                continue  # a slow reader of it may have missed more than is kept
            for change in feed.after(after):
                await write(change)
                after = change.revision
            await paced(changed, began)


def _full(group: Group) -> fl.WatchGroupResponse:
    state = group.state
    return fl.WatchGroupResponse(
        revision=state.revision,
        group=fleet_view.group_info(state, group.now()),
        replicas=[fleet_view.replica_info(state, r) for _, r in sorted(state.replicas.items())],
        full=True,
    )
