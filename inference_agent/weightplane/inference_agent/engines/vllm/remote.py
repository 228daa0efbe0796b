"""A worker's side of an update, where the worker is a vLLM process: what the agent drives from here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightplane.controlplane.core.plan import Bucket
from weightplane.inference_agent.receipts import WorkerPlan
from weightplane.inference_agent.transfer import Worker
from weightplane.inference_agent.vllm_plugin.wire import channel_json, plan_json
from weightplane.transports.base import ArmToken, ChannelAborted, ReceiveChannel

from ..base import EngineError, Reception
from .links import WorkerLink

if TYPE_CHECKING:
    import torch

__all__ = ["RemoteWorker", "open_worker"]

_CALL_S = 30.0
_CLOSE_S = 5.0
_GRACE_S = 0.7  # an aborted call is answered by the worker, or by us after this
_LATE_S = 1.0  # beyond the deadline that the worker itself keeps


class RemoteChannel(ReceiveChannel):
    """The channel that a worker holds. Its bytes go straight into the worker's process."""

    def __init__(self, link: WorkerLink, reception: Reception) -> None:
        self._link, self._update_id = link, reception.update_id
        self._channel_id, self._member = reception.channel.channel_id, reception.member
        self._deadline = time.monotonic() + _CALL_S
        self._reason, self._aborted_at = "", 0.0
        self._landed = 0
        self._done: set[int] = set()  # buckets that are in place before they were ordered

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        """See ``ReceiveChannel``."""
        self._deadline = deadline
        self._done.clear()
        self.ask(
            "arm",
            epoch=token.epoch,
            generation=token.generation,
            buckets=[b.index for b in buckets],
            remaining_s=max(0.0, deadline - time.monotonic()),
        )

    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """Not here: the worker has the spans."""
        raise EngineError("a worker in another process receives into memory of its own")

    @property
    def bytes_landed(self) -> int:
        """Of this update, as the worker last told."""
        return max(self._landed, self._link.landed if self._deadline > time.monotonic() else 0)

    def abort(self, reason: str) -> None:
        """See ``ReceiveChannel``."""
        if not self._reason:
            self._reason, self._aborted_at = reason, time.monotonic()
            self._link.post("abort", update_id=self._update_id, reason=reason)

    def close(self) -> None:
        """See ``ReceiveChannel``."""
        try:
            self._link.call("close_channel", _CLOSE_S, channel_id=self._channel_id, member=self._member)
        except EngineError:
            pass  # it is gone, and the channel with it

    def ask(self, do: str, **fields: Any) -> Any:
        """Ask about this update; ends within a second of ``abort``, whatever state the worker is in."""
        timeout = max(_CALL_S, self._deadline - time.monotonic() + _LATE_S)
        return self._link.call(do, timeout, self._cancelled, update_id=self._update_id, **fields)

    def take(self, bucket: Bucket) -> None:
        """Order a bucket, unless the worker has said that it is in place: it goes on by itself (``running``)."""
        if bucket.index in self._done:
            if self._reason:
                raise ChannelAborted(self._reason)
            self._done.discard(bucket.index)
            return
        said = self.ask("take", bucket=bucket.index)
        self.landed_now(said["landed"])
        self._done = set(said["done"]) - {bucket.index}

    def landed_now(self, nbytes: int) -> None:
        """What the worker says is in place."""
        self._landed = nbytes

    def _cancelled(self) -> str:
        return self._reason if self._reason and time.monotonic() - self._aborted_at > _GRACE_S else ""


@dataclass
class RemoteWorker(Worker):
    """See the module text."""

    remote: RemoteChannel
    _receipt: dict[str, Any] | None = field(default=None, kw_only=True)

    def take(self, bucket: Bucket) -> None:
        """See ``Worker``."""
        self.remote.take(bucket)

    def _said(self, whole: bool = False) -> Any:
        """The worker's receipt; it is asked once everything landed, and for the digests once more if they are read from
        live memory afterwards."""
        said = self._receipt
        if said is None or (whole and said["digests"] is None):
            said = self._receipt = self.remote.ask("receipt")
            self.remote.landed_now(said["landed"])
        return said

    def missing(self) -> list[str]:
        """See ``Worker``."""
        return list(self._said()["missing"])

    def elements(self) -> int:
        """See ``Worker``."""
        return int(self._said()["elements"])

    def packed(self) -> Sequence[int]:
        """See ``Worker``."""
        return [int(d) for d in self._said(whole=True)["digests"] or ()]


def open_worker(link: WorkerLink, r: Reception) -> RemoteWorker:
    """Let the worker open its end of the channel. A plan is sent once."""
    link.landed = 0
    channel = RemoteChannel(link, r)
    known = link.call("knows", _CALL_S, plan_id=r.plan.id)["known"]
    plan = {} if known else {"plan": plan_json(r.plan)}
    channel.ask(
        "open",
        group=r.group,
        member=r.member,
        channel=channel_json(r.channel),
        plan_id=r.plan.id,
        verify=r.verify.value,
        as_they_come=r.as_they_come,
        **plan,
    )
    share = WorkerPlan(r.plan, r.manifest, r.member)
    return RemoteWorker(r.member, r.thread, channel, share, 0, channel, channel_id=r.channel.channel_id)
