"""Questions to the coordinator that change nothing: who is there, what the group wants, what became of an update."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from weightplane.controlplane.core.reasons import Reason
from weightplane.v1 import fleet_pb2, update_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

from .client import Client
from .errors import CallRefused, CoordinatorUnreachable, PublishError, RpcRefused, Unanswered

__all__ = ["Questions"]

_LOOK_S = 1.0

log = logging.getLogger(__name__)


class Questions:
    """About one group. Any thread. Unless said otherwise raises ``CallRefused`` or ``CoordinatorUnreachable``."""

    def __init__(self, client: Client, group: str) -> None:
        self._client, self._group = client, group
        self._known = fleet_pb2.GroupPolicy()

    def wait_for_replicas(self, count: int, deadline: float, check: Callable[[], None]) -> tuple[str, ...]:
        """See ``Publisher.wait_for_replicas``; ``check`` may raise meanwhile."""
        replicas: dict[str, str] | None = None
        while True:
            try:
                # The last look has time of its own: what is left of the caller's may be too little for any answer.
                seen = self.replicas(max(deadline, time.monotonic() + _LOOK_S))
                replicas = {info.replica_id: _not_ready(info) for info in seen}
            except CoordinatorUnreachable:
                if replicas is None or time.monotonic() < deadline:
                    raise
            ready = sorted(r for r, why in replicas.items() if not why)
            if len(ready) >= count:
                return tuple(ready)
            if time.monotonic() + 0.1 >= deadline:
                others = "".join(f"; {r}: {why}" for r, why in sorted(replicas.items()) if why)
                found = f"found {len(ready)} ({', '.join(ready) or 'none'}){others}"
                raise TimeoutError(f"group {self._group!r}: expected {count} replica(s), {found}")
            check()
            time.sleep(0.1)

    def replicas(self, deadline: float) -> list[fleet_pb2.ReplicaInfo]:
        """The group's replicas as they are; none of a group that there is not."""
        try:
            answer: fleet_pb2.ListReplicasResponse = self._client.call(
                "ListReplicas", fleet_pb2.ListReplicasRequest(group=self._group), deadline
            )
        except RpcRefused as e:
            if e.failure.reason is Reason.UNKNOWN_GROUP:
                return []
            raise CallRefused(e.failure) from None
        except Unanswered as e:
            raise self._client.unreachable(e) from None
        return list(answer.replicas)

    def policy(self, *, ask: bool = True) -> fleet_pb2.GroupPolicy:
        """The group's policies: as they are, or as last heard (all defaults if never) without ``ask`` or an answer
        within a second."""
        if not ask:
            return self._known
        try:
            request = fleet_pb2.GetGroupRequest(group=self._group)
            answer: fleet_pb2.GetGroupResponse = self._client.call("GetGroup", request, time.monotonic() + 1.0)
        except (RpcRefused, Unanswered) as e:
            log.info("group %s: its policies could not be asked for: %s", self._group, e)
            return self._known
        self._known = answer.group.policy
        return self._known

    def outcome(self, update_id: str, deadline: float) -> update_pb2.UpdateInfo:
        """What became of an update."""
        try:
            request = wt.GetUpdateRequest(group=self._group, update_id=update_id)
            answer: wt.GetUpdateResponse = self._client.call("GetUpdate", request, deadline)
        except RpcRefused as e:
            raise CallRefused(e.failure) from None
        except Unanswered as e:
            raise self._client.unreachable(e) from None
        return answer.update

    def drained(self, update_id: str, deadline: float) -> update_pb2.UpdateInfo | None:
        """An aborted update once its members are drained: what it says then is the same for every rank. ``None`` if it
        was not aborted, or cannot be learnt."""
        while time.monotonic() < deadline:
            try:
                update = self.outcome(update_id, deadline)
            except PublishError as e:
                log.info("group %s: %s", self._group, e)
                return None
            if update.phase == update_pb2.UPDATE_PHASE_ABORTED:
                return update
            if update.phase == update_pb2.UPDATE_PHASE_COMMITTED:
                return None
            time.sleep(0.02)
        return None


def _not_ready(info: fleet_pb2.ReplicaInfo) -> str:
    """Why a replica may not take part in an update; empty if it may."""
    return info.may_not_join
