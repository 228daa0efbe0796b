"""Moving one call's buckets: a thread per channel sends in plan order, another hashes beside it.

A channel's data calls all come from its one thread; ``abort`` and ``drop`` come from any. A lane whose receivers were
all excluded just ends. With ``tolerant`` (a commit policy that can do without some) a lost peer is waited for until the
coordinator says that it is excluded; then the same bucket goes on for the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.plan import Bucket, Plan
from weightplane.controlplane.failpoints import hit
from weightplane.transports.base import ChannelAborted, PeerLost
from weightplane.transports.buckets import SourceSpans

from .channels import OpenChannel
from .hashing import LaneHasher, RegionDigests
from .sources import Local
from .stop import Stop
from .supply import Supply

__all__ = ["Lane", "Sending"]

_RETAINED = 256 << 20  # transient bytes that an unbuffered transport may hold before it is flushed
_ROTATION = 4  # scratch sets: one being filled and sent, at most three waiting to be hashed


class Lane:
    """One channel's part of a call."""

    def __init__(self, number: int, opened: OpenChannel, plan: Plan, buckets: Sequence[Bucket]) -> None:
        self.number, self.opened, self.plan, self.buckets = number, opened, plan, buckets
        self.dropped: set[str] = set()
        self.excluded = False
        self.ended = not buckets
        self.error: BaseException | None = None

    @property
    def receivers(self) -> frozenset[str]:
        """Members that its buckets go to."""
        return frozenset(r for b in self.buckets for r in b.receivers)


class Sending:
    """All lanes of one call. ``start``, then ``wait``. ``exclude`` from any thread."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        manifest: Manifest,
        supply: Supply,
        digests: RegionDigests | None,
        stop: Stop,
        *,
        tolerant_s: float = 0.0,
        one_at_a_time: bool = False,
        progress: Callable[[], None] = lambda: None,
        on_error: Callable[[BaseException], None] = lambda e: None,
    ) -> None:
        self.lanes = list(lanes)
        self._manifest, self._supply, self._digests, self._stop = manifest, supply, digests, stop
        self._tolerant_s, self._progress, self._on_error = tolerant_s, progress, on_error
        self._one_at_a_time = one_at_a_time
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start a thread for every lane that has buckets of ours."""
        for lane in self.lanes:
            if not lane.ended:
                thread = threading.Thread(
                    target=self._run, args=(lane,), name=f"weightplane-send-{lane.opened.spec.transport}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def wait(self, deadline: float) -> bool:
        """Wait until every lane ended; False at the deadline. Raises a lane's error, or the reason to stop."""
        over = self._stop.wait(lambda: all(x.ended for x in self.lanes) or self.error is not None, deadline)
        if self.error is not None:
            raise self.error
        return over

    @property
    def error(self) -> BaseException | None:
        """The first lane's error."""
        return next((x.error for x in self.lanes if x.error is not None), None)

    def exclude(self, replica_ids: Sequence[str]) -> None:
        """These replicas are out of the update: go on for the others."""
        for lane in self.lanes:
            members = [m for m in lane.receivers - lane.dropped if m.rpartition("/")[0] in replica_ids]
            if not members:
                continue
            lane.dropped.update(members)
            if lane.receivers <= lane.dropped:
                lane.excluded = True
                lane.opened.channel.abort(f"all its receivers were excluded: {sorted(set(replica_ids))}")
            else:
                for member in members:
                    lane.opened.channel.drop(member)
        self._stop.poke()

    def join(self, seconds: float) -> bool:
        """Wait for the threads; whether all have left their channels."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(t.is_alive() for t in self._threads)

    # --- one lane's thread ---

    def _run(self, lane: Lane) -> None:
        hasher = LaneHasher(lane.number, lane.plan, self._digests) if self._digests is not None else None
        try:
            try:
                self._send_all(lane, hasher)
            finally:
                self._supply.leave(lane.number)
                if hasher is not None:
                    hasher.finish()
        except BaseException as e:
            if not (lane.excluded and isinstance(e, ChannelAborted | PeerLost)) and self._stop.error is None:
                lane.error = e
                self._stop.poke()
                self._on_error(e)
        lane.ended = True
        self._stop.poke()

    def _send_all(self, lane: Lane, hasher: LaneHasher | None) -> None:
        member, capabilities = lane.opened.member, lane.opened.transport.capabilities
        retained: list[torch.Tensor] = []  # what an unbuffered transport may still read, if it is ours to free
        held = 0
        current: dict[int, Local | Sequence[Local]] = {}
        # A set of scratch is written again three buckets later, when its bucket has been hashed (LaneHasher.feed).
        keep = not capabilities.buffered
        spans = deque(SourceSpans(lane.plan, self._manifest, member, current, keep=keep) for _ in range(_ROTATION))
        for bucket in lane.buckets:
            if lane.excluded:
                return
            if self._one_at_a_time and not capabilities.buffered:
                self._patiently(lane, lane.opened.channel.flush)
                retained.clear()
            taken = self._supply.take(lane.number, bucket)
            current.clear()
            current.update(taken)
            parts = spans[0].spans(bucket)
            spans.rotate(-1)
            if capabilities.moves_bytes and "cuda" not in capabilities.device_kinds:
                parts = [p.cpu() if p.device.type == "cuda" else p for p in parts]
            if hasher is not None:
                hasher.feed(bucket, parts)
            hit("trainer.send.bucket")
            self._patiently(lane, lambda b=bucket, p=parts: lane.opened.channel.send(b, p))  # type: ignore[misc]
            if keep and self._supply.transient:
                retained.extend(parts)
                held += bucket.nbytes
                if held > _RETAINED:
                    self._patiently(lane, lane.opened.channel.flush)
                    retained.clear()
                    held = 0
            self._supply.done(lane.number, bucket)
            self._progress()
        if not lane.excluded:
            self._patiently(lane, lane.opened.channel.flush)

    def _patiently(self, lane: Lane, step: Callable[[], None]) -> None:
        """Run a data call; after a lost peer wait until it is excluded, if that may happen, and run it again."""
        while not lane.excluded:
            try:
                return step()
            except PeerLost as e:
                peers = set(e.peers)
                if not peers or peers <= lane.dropped:
                    raise
                end = time.monotonic() + self._tolerant_s
                if not self._stop.wait(lambda p=peers: p <= lane.dropped, end):  # type: ignore[misc]
                    raise
        return None
