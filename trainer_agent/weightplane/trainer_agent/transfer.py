"""The transfer of an update from one rank: arm, declare, send, hash; a call for each mode that takes part."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.plan import Bucket, Plan, Segment
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.states import Verify
from weightplane.controlplane.failpoints import hit
from weightplane.transports.base import ArmToken
from weightplane.transports.buckets import SourceSpans
from weightplane.transports.digest import digest_spans
from weightplane.v1 import agent_pb2, common_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

from .client import Pending
from .context import Rank, UpdateEnded, UserCode
from .errors import RpcRefused
from .hashing import RegionDigests
from .produced import NOTHING_QUEUED, Produced
from .replay import of_channel
from .sending import Lane, Sending
from .sources import Source
from .sources_gather import GatherSource
from .stop import Stop
from .supply import DirectSupply, GatherSupply

__all__ = ["Transfer"]

T = TypeVar("T")

_DIGEST_PAGE = 100_000
#: Seconds. A peer that leaves has mostly told the coordinator why, whose word is the cause: it is waited for so long.
_WORD_S = 0.5
#: Seconds past the deadline: by then the coordinator, whose clock says the same, has said whom the update waited for.
_LAST_WORD_S = 0.25
_PREFETCH = 64 << 20  # bytes gathered ahead of the wire, where gathering and sending do not share a device


class Transfer:
    """The transfer of one started update. ``run`` in the publishing thread; ``exclude`` and ``abandon`` in any."""

    def __init__(
        self,
        rank: Rank,
        source: Source,
        manifest: Manifest,
        answer: wt.StartUpdateResponse,
        plans: dict[str, Plan],
        deadline: float,
        stop: Stop,
        on_error: Callable[[BaseException], None],
        produced: Produced = NOTHING_QUEUED,
        *,
        hold_source: bool = True,
        begin_finish: Callable[[], None] = lambda: None,
    ) -> None:
        """``produced``: what the caller had queued when it published. ``hold_source``: what is worked out for the
        source's memory may be kept for the next update, and that memory with it. ``begin_finish``: called as soon as
        nothing is left to be said about the update's bytes, which may still be on the wire."""
        self._rank, self._source, self._manifest = rank, source, manifest
        self._produced, self._hold_source = produced, hold_source
        self._answer, self._plans, self._deadline = answer, plans, deadline
        self._stop, self._on_error, self._begin_finish = stop, on_error, begin_finish
        self._sending: list[Sending] = []
        self._excluded: set[str] = set()
        self._units = 0
        self.user_code = UserCode()
        self.armed: list[str] = []  # channels whose buckets everyone has heard of
        self.done = False  # ``run`` has returned: no byte is on any channel
        self._window: GatherSupply | None = None
        self._digests: RegionDigests | None = None
        if answer.verify != common_pb2.VERIFY_LEVEL_OFF:
            sampled = answer.verify == common_pb2.VERIFY_LEVEL_SAMPLED
            self._digests = RegionDigests(
                list(plans.values()),
                rank.member,
                share=not isinstance(source, GatherSource),  # a tensor is gone when another lane would owe its digest
                update_id=answer.update_id,
                verify=Verify.SAMPLED if sampled else Verify.FULL,
            )

    def run(self) -> None:
        """Everything: when it returns, every receiver has read every byte and the digests are in.

        Raises what stopped it: a transport's error, the source's, the coordinator's, or the reason to stop.
        """
        by_mode: dict[bool, list[str]] = {False: [], True: []}
        for c in self._answer.channels:
            by_mode[c.mode == common_pb2.MODE_IN_PLACE].append(c.channel_id)
        calls = [channels for channels in (by_mode[False], by_mode[True]) if channels]
        for seq, channels in enumerate(calls, 1):
            lanes = self._arm(channels)
            request = self._declaration(seq, channels if len(calls) > 1 else [])
            declared = self._rank.client.begin("UpdateWeights", request, self._deadline, self._stop)
            try:
                sending = self._prepare(lanes)
            except BaseException:
                declared.cancel()
                raise
            self._declare(declared, request, lanes)
            hit("trainer.update.armed")
            self._send(sending, last=seq == len(calls))
        self._rank.pool.former.clear()  # followed by now: it would keep memory that the source has replaced
        self.done = True

    def exclude(self, replica_ids: Sequence[str]) -> None:
        """These replicas are out: go on for the others."""
        self._excluded.update(replica_ids)
        for sending in list(self._sending):
            sending.exclude(replica_ids)

    def abandon(self, reason: str) -> None:
        """Abort the channels that bytes may be on. Returns at once."""
        if self.armed and not self.done:  # else the update may commit yet, and the next goes over the same channels
            self._rank.pool.abort(list(self.armed), reason)

    def join(self, seconds: float) -> bool:
        """After ``abandon``: whether all sending threads have left the source."""
        end = time.monotonic() + seconds
        return not [s for s in self._sending if not s.join(max(0.0, end - time.monotonic()))]

    def let_go(self) -> None:
        """After everything: keep nothing that keeps the source's memory."""
        self._sending.clear()
        self._window = None

    @property
    def mirrored(self) -> tuple[int, float]:
        """See ``Sending.mirrored``; of all calls."""
        found = [s.mirrored for s in self._sending]
        return sum(n for n, _ in found), sum(seconds for _, seconds in found)

    # --- parts ---

    def _arm(self, channels: Sequence[str]) -> list[Lane]:
        r = self._rank
        token = ArmToken(self._answer.update_id, self._answer.epoch, r.generation)
        lanes: list[Lane] = []
        self._produced.order()
        for channel_id in channels:
            plan = self._plans[channel_id]
            opened = r.pool.open(channel_id)
            buckets = of_channel(opened.channel, plan, self._manifest, r.member, r.pool.former).buckets
            opened.channel.arm(token, buckets, self._deadline)
            lanes.append(Lane(len(lanes), opened, plan, buckets))
        return lanes

    def _declaration(self, seq: int, channels: Sequence[str]) -> wt.UpdateWeightsRequest:
        r = self._rank
        return wt.UpdateWeightsRequest(
            request_id=uuid.uuid4().hex,
            group=r.group,
            generation=r.generation,
            update_id=self._answer.update_id,
            epoch=self._answer.epoch,
            rank=r.rank,
            seq=seq,
            buckets=[agent_pb2.BucketRange(channel_id=c) for c in channels],
        )

    def _declare(self, declared: Pending, request: wt.UpdateWeightsRequest, lanes: Sequence[Lane]) -> None:
        """UpdateWeights: returns when every receiver and every rank is armed."""
        r = self._rank
        while True:
            try:
                answer: wt.UpdateWeightsResponse = declared.wait()
                break
            except RpcRefused as e:
                # The in-place call of a mixed update is refused until every rank put its staged digests.
                if e.failure.reason is not Reason.DIGESTS_REQUIRED or r.world_size == 1:
                    raise
                if self._stop.wait(lambda: False, time.monotonic() + 0.02) or time.monotonic() >= self._deadline:
                    raise
                declared = r.client.begin("UpdateWeights", request, self._deadline, self._stop)
        self.armed.extend(x.opened.spec.channel_id for x in lanes)
        for lane in lanes:
            if lane.opened.spec.channel_id in answer.excluded_channels:
                lane.excluded = lane.ended = True

    def _prepare(self, lanes: Sequence[Lane]) -> Sending:
        """All that can be done while the others arm."""
        source, stop = self._source, self._stop
        work = [(x.plan, () if x.ended else x.buckets) for x in lanes]
        gathers = source if isinstance(source, GatherSource) else None
        alone = gathers is not None and gathers.device_kind != "cpu"
        room = 0 if alone else _PREFETCH
        self._window = GatherSupply(work, stop, room, gathers.device_kind) if gathers is not None else None
        tolerant = self._answer.commit_policy.WhichOneof("policy") == "at_least"
        sending = Sending(
            lanes,
            self._manifest,
            self._window or DirectSupply(source, work, replay=self._hold_source),
            self._digests,
            stop,
            tolerant_s=2 * self._rank.ttl_s if tolerant else _WORD_S,
            one_at_a_time=alone,
            progress=self._count,
            on_error=self._on_error,
            produced=self._produced,
        )
        self._sending.append(sending)
        sending.prepare()
        return sending

    def _send(self, sending: Sending, last: bool) -> None:
        """Send, and put the digests as soon as they are known. With the last of them the coordinator has heard all:
        what is left are bytes, and who receives them says when they are there."""
        if self._excluded:
            sending.exclude(sorted(self._excluded))
        sending.start()
        gathers, early = self._window is not None, False
        if gathers:
            assert isinstance(self._source, GatherSource) and self._window is not None
            self._pump(self._source, self._window, sending)
        elif self._digests is None or sending.wait_hashed(self._deadline):
            early = True
            self._put_all(sending)
            if last:
                self._begin_finish()
        if not sending.wait(self._deadline) and not sending.wait(self._deadline + _LAST_WORD_S):
            raise TimeoutError(f"{self._rank.member} could not send its buckets by the update's deadline")
        if not early:
            self._put_all(sending)

    def _put_all(self, sending: Sending) -> None:
        if self._digests is not None:
            for lane in sending.lanes:
                if not lane.excluded:
                    self._put_digests(lane.plan, self._digests.of_plan(lane.plan, self._late))

    def _count(self) -> None:
        self._units += 1
        self._rank.progress(self._units)

    def _pump(self, source: GatherSource, window: GatherSupply, sending: Sending) -> None:
        """Run the user's iterator in this thread, on every rank, to its end even if the update was aborted meanwhile:
        a rank that stopped halfway would leave the others inside a collective. Only when a rank failed (then their
        collectives are lost anyway), or the caller wants to go, it is left at once."""
        for index, local in self._timed(source.iterate(sends=self._rank.rank == source.sender_rank)):
            self.user_code.after = self._manifest.tensors[index].name
            if self._leaves():
                self._stop.check()
            if local is None or self._stop.error is not None or sending.error is not None:
                continue
            window.offer(index, local)
            del local
            try:
                window.wait_wanted(self._deadline)
            except UpdateEnded:
                if self._leaves():
                    raise
        window.exhaust()
        self._stop.check()

    def _leaves(self) -> bool:
        error = self._stop.error
        return error is not None and not (isinstance(error, UpdateEnded) and not error.by_rank)

    def _timed(self, iterator: Iterator[T]) -> Iterator[T]:
        """The same iterator, with ``user_code`` saying whether this thread is inside it."""
        code = self.user_code
        while True:
            code.since = time.monotonic()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                code.spent += time.monotonic() - code.since
                code.since = 0.0
            yield item

    def _late(self, plan: Plan, region: int) -> int:
        """The digest of a region that no lane hashed (the lane that would have was excluded)."""
        r = plan.regions[region]
        bucket = Bucket(0, r.sender, r.receivers, (Segment(region, 0, r.nbytes),), r.nbytes)
        return digest_spans(SourceSpans(plan, self._manifest, self._rank.member, self._source.tensor).spans(bucket))

    def _put_digests(self, plan: Plan, values: Sequence[int]) -> None:
        r = self._rank
        for first in range(0, max(len(values), 1), _DIGEST_PAGE):
            request = wt.PutDigestsRequest(
                request_id=uuid.uuid4().hex,
                group=r.group,
                generation=r.generation,
                update_id=self._answer.update_id,
                epoch=self._answer.epoch,
                rank=r.rank,
                plan_id=plan.id,
                digests=values[first : first + _DIGEST_PAGE],
                first=first,
                total=len(values),
            )
            r.client.call("PutDigests", request, self._deadline, self._stop)
