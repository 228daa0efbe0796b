"""The sending side of transports whose receivers pull: the engine of ``ucx`` and ``cuda_ipc``.

``send`` tells each receiver of a bucket that its bytes may be read, and where; receivers read them one-sidedly and
answer *done*; ``flush`` waits for every answer. The spans must stay as they are until then (``buffered`` is false), and
are held. A receiver that is dropped, stopped or dead holds nobody up but those who wait for it by name.

Tables are made once: the very list object of an earlier ``send`` of a bucket costs one small message for each receiver.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.plan import Bucket
from weightplane.v1.transport_pb2 import PullBucket, PullMessage, PullReady, PullTable, PullWelcome

from .base import ArmToken, ChannelAborted, ChannelSpec, ChannelTimeout, PeerLost, SendChannel, TransportError
from .pull_abc import Entry, Exporter, Importer, Pull
from .pull_control import Listener
from .pull_link import Link
from .pull_receive import PullReceiveChannel
from .pull_wire import FrameError

if TYPE_CHECKING:
    import torch

__all__ = ["Entry", "Exporter", "Importer", "Pull", "PullReceiveChannel", "PullSendChannel"]

_SPLIT = 20_000  # chunks in one table message; a few hundred KiB
_TABLE = 1 << 20  # bytes of regions in one table message
_INSIDE = 2 << 20  # a failpoint is passed at least once for so many bytes
_CONNECTING_S = 10.0  # seconds that a receiver is served after it came and until it arms


class _Held:
    """A bucket's spans, its entry and the entry's version."""

    __slots__ = ("entry", "spans", "version")

    def __init__(self, spans: Sequence[torch.Tensor], entry: Entry, version: int) -> None:
        self.spans, self.entry, self.version = spans, entry, version


class PullSendChannel(SendChannel):
    """One sender of one channel. Its receivers connect to ``listener``; ``exporter`` is this channel's own."""

    def __init__(self, spec: ChannelSpec, member: str, listener: Listener, exporter: Exporter) -> None:
        self.spec, self.member = spec, member
        self._listener, self._exporter = listener, exporter
        self._changed = threading.Condition()
        self._links: dict[str, Link] = {}
        self._lost: dict[str, str] = {}
        self._dropped: set[str] = set()
        self._token: ArmToken | None = None
        self._deadline = 0.0
        self._reason: str | None = None
        self._closed = False
        self._held: dict[int, _Held] = {}
        self._last: dict[int, tuple[Entry, int]] = {}
        self._versions = 0
        self._posted: dict[str, set[int]] = {m: set() for m in spec.receivers}
        self._done: dict[str, set[int]] = {m: set() for m in spec.receivers}
        listener.register(self)

    # --- the data thread

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        """See ``SendChannel``. Waits for nobody."""
        with self._changed:
            self._check(-1)
            for bucket in buckets:
                if bucket.sender != self.member or not set(self.spec.receivers) >= set(bucket.receivers):
                    raise TransportError(f"bucket {bucket.index} is not {self.member!r}'s on this channel")
            self._deadline = deadline
            if token != self._token:
                self._token = token
                for receiver, posted in self._posted.items():
                    posted.clear()
                    self._done[receiver].clear()
                    if receiver in self._links:
                        self._lost.pop(receiver, None)
        self._exporter.armed()

    def send(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """See ``SendChannel``. Returns when the receivers are told; the spans must not change before ``flush``."""
        name = self.spec.transport
        with self._changed:
            self._check(bucket.index)
            if self._token is None:
                raise TransportError(f"bucket {bucket.index}: the channel was never armed", bucket=bucket.index)
        failpoints.hit(f"{name}.send.before")
        held = self._hold(bucket, spans)
        fresh = True
        for receiver in bucket.receivers:
            link = self._armed_link(receiver, bucket.index)
            if link is None:
                continue
            if fresh:
                self._exporter.publish(bucket, held.entry)
                fresh = False
            self._post(link, bucket, held)
            for _ in range(0, bucket.nbytes, _INSIDE):
                failpoints.hit(f"{name}.send.inside")
        with self._changed:
            self._check(bucket.index)
        failpoints.hit(f"{name}.send.after")

    def flush(self) -> None:
        """See ``SendChannel``. Dropped receivers are not waited for. Memory that only the channel holds is freed."""
        with self._changed:
            for receiver in self.spec.receivers:
                for index in sorted(self._posted[receiver]):
                    self._wait(receiver, index, lambda r=receiver, i=index: self._is_done(r, i))
            self._check(-1)
        self._settle()

    def close(self) -> None:
        """See ``SendChannel``. Receivers that still read are told first, and lose the memory then."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            links = list(self._links.values())
            self._changed.notify_all()
        self._listener.unregister(self, links)
        self._exporter.close()
        self._held.clear()

    # --- any thread

    @property
    def details(self) -> Mapping[str, str]:
        """How bytes move, for ``doctor`` and logs."""
        return self._exporter.details()

    def drop(self, member: str) -> None:
        """See ``SendChannel``. What the member still reads may be torn from now on; it is told."""
        with self._changed:
            self._dropped.add(member)
            link = self._links.get(member)
            self._changed.notify_all()
        if link is not None:
            link.close("was dropped", "dropped")

    def abort(self, reason: str) -> None:
        """See ``SendChannel``; the receivers notice too."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
            links = [] if self._closed else list(self._links.values())
            self._changed.notify_all()
        for link in links:
            link.close("this side was aborted", f"aborted: {reason}"[:1000])

    # --- the listener's thread (see Owner)

    def welcome(self) -> PullWelcome:
        """See ``Owner``."""
        return self._exporter.welcome()

    def admit(self, link: Link) -> str:
        """See ``Owner``. A newer connection takes an older one's place."""
        with self._changed:
            if self._closed or self._reason is not None:
                return self._reason or "closed"
            if link.receiver in self._dropped:
                return "dropped"
            old = self._links.get(link.receiver)
            self._links[link.receiver] = link
            if self._posted[link.receiver] <= self._done[link.receiver]:  # else it has lost what it was told
                self._lost.pop(link.receiver, None)
        if old is not None:
            old.close("connected anew")
        return ""

    def said(self, link: Link, message: PullMessage) -> None:
        """See ``Owner``."""
        kind = message.WhichOneof("message")
        with self._changed:
            if kind == "armed":
                link.armed = message.armed
            elif kind == "done":
                index, number = message.done.bucket, message.done.armed
                if link.armed is not None and number == link.armed.number and self._is_armed(link.receiver):
                    self._done[link.receiver] |= self._posted[link.receiver] & {index}
            elif kind == "serve":
                link.serve = message.serve.on
            elif kind == "bye":
                link.close(f"left: {message.bye.reason[:1000]}")
                self._gone(link)
            else:
                raise FrameError(f"{kind} is not for a sender")
            self._changed.notify_all()

    def ended(self, link: Link) -> None:
        """See ``Owner``."""
        with self._changed:
            self._gone(link)
            self._changed.notify_all()

    def pace(self) -> float | None:
        """See ``Owner``."""
        with self._changed:
            young = time.monotonic() - _CONNECTING_S
            serving = connecting = False
            for receiver, link in self._links.items():
                if link.armed is None:
                    connecting = connecting or link.since > young
                elif link.serve and self._posted[receiver] - self._done[receiver]:
                    serving = True
        return self._exporter.pace(serving) if serving or connecting else None

    def serve(self) -> None:
        """See ``Owner``."""
        self._exporter.serve()

    # --- inside

    def _gone(self, link: Link) -> None:
        if self._links.get(link.receiver) is link:
            del self._links[link.receiver]
            self._lost.setdefault(link.receiver, link.gone)

    def _check(self, bucket: int) -> None:
        if self._closed:
            raise TransportError(f"channel {self.spec.channel_id} is closed", bucket=bucket)
        if self._reason is not None:
            raise ChannelAborted(f"channel {self.spec.channel_id}: {self._reason}", bucket=bucket)

    def _hold(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> _Held:
        held = self._held.get(bucket.index)
        if held is not None and held.spans is spans and self._exporter.holds(held.entry):
            return held
        found = sum(span.numel() for span in spans)
        if found != bucket.nbytes:
            text = f"bucket {bucket.index} has {bucket.nbytes} bytes, its spans {found}"
            raise TransportError(text, bucket=bucket.index)
        entry = self._exporter.export(bucket, spans)
        if sum(entry.sizes) != bucket.nbytes:
            raise AssertionError(f"bucket {bucket.index}: the exporter's chunks have {sum(entry.sizes)} bytes")
        last, version = self._last.get(bucket.index, (None, 0))
        if last is not None and _equal(last, entry):
            entry = last  # another list of the same memory
        else:
            version = self._versions = self._versions + 1
            self._last[bucket.index] = (entry, version)
        held = _Held(spans, entry, version)
        self._held[bucket.index] = held
        return held

    def _armed_link(self, receiver: str, bucket: int) -> Link | None:
        """The connection of a receiver that is armed for this update; ``None`` if it was dropped."""
        with self._changed:
            self._wait(receiver, bucket, lambda: self._is_armed(receiver))
            return None if receiver in self._dropped else self._links.get(receiver)

    def _is_armed(self, receiver: str) -> bool:
        link, token = self._links.get(receiver), self._token
        armed = link.armed if link is not None else None
        if armed is None or token is None:
            return False
        return (armed.update_id, armed.epoch, armed.generation) == (token.update_id, token.epoch, token.generation)

    def _is_done(self, receiver: str, bucket: int) -> bool:
        if bucket in self._done[receiver]:
            return True
        link = self._links.get(receiver)
        if link is not None and link.armed is not None and not self._is_armed(receiver):
            text = f"{receiver!r} left this update before it had read everything (bucket {bucket})"
            raise PeerLost(text, peers=(receiver,), bucket=bucket)
        return False

    def _wait(self, receiver: str, bucket: int, done: object) -> None:
        """Wait, under the lock, for something of one receiver."""
        assert callable(done)
        while receiver not in self._dropped:
            self._check(bucket)
            if done():
                return
            lost = self._lost.get(receiver)
            if lost is not None:
                raise PeerLost(f"{receiver!r} {lost} (bucket {bucket})", peers=(receiver,), bucket=bucket)
            left = self._deadline - time.monotonic()
            if left <= 0:
                text = f"{self.member!r} waited for {receiver!r} in bucket {bucket} until the deadline"
                raise ChannelTimeout(text, peers=(receiver,), bucket=bucket)
            self._changed.wait(left)

    def _post(self, link: Link, bucket: Bucket, held: _Held) -> None:
        with self._changed:
            posted = self._posted[link.receiver]
            if bucket.index in posted and link.versions.get(bucket.index) == held.version:
                return  # sent again after another receiver was lost
            posted.add(bucket.index)
            assert link.armed is not None
            ready = PullReady(bucket=bucket.index, armed=link.armed.number, version=held.version)
        if link.versions.get(bucket.index) != held.version:
            link.post(*self._tables(link, bucket.index, held))
            link.versions[bucket.index] = held.version
        link.post(PullMessage(ready=ready))
        if link.serve:
            self._listener.wake()

    def _tables(self, link: Link, index: int, held: _Held) -> Iterator[PullMessage]:
        entry = held.entry
        new = dict.fromkeys(r for r in entry.regions if r not in link.regions)
        link.regions.update(new)
        table, size = PullTable(), 0
        for region in map(self._exporter.region, new):
            table.regions.append(region)
            size += region.ByteSize()
            if size >= _TABLE:
                yield PullMessage(table=table)
                table, size = PullTable(), 0
        if size:
            yield PullMessage(table=table)
        for at in range(0, len(entry.sizes), _SPLIT):
            cut = slice(at, at + _SPLIT)
            part_of = PullBucket(
                bucket=index,
                version=held.version,
                regions=entry.regions[cut],
                offsets=entry.offsets[cut],
                sizes=entry.sizes[cut],
            )
            yield PullMessage(table=PullTable(buckets=[part_of]))

    def _settle(self) -> None:
        """After everything was read: forget lists that nobody else holds, and what they alone kept registered."""
        for index in list(self._held):  # no name for one of them, which would outlive the loop
            if sys.getrefcount(self._held[index].spans) <= 2:  # ours, and the call's: this very list cannot come again
                del self._held[index]
        gone = set(self._exporter.settle([h.entry for h in self._held.values()]))
        if not gone:
            return
        self._held = {i: h for i, h in self._held.items() if gone.isdisjoint(h.entry.regions)}
        self._last = {i: e for i, e in self._last.items() if gone.isdisjoint(e[0].regions)}
        with self._changed:
            links = list(self._links.values())
        for link in links:
            if told := gone & link.regions:
                link.regions -= told
                link.post(PullMessage(table=PullTable(gone=sorted(told))))


def _equal(a: Entry, b: Entry) -> bool:
    return (a.regions, a.offsets, a.sizes) == (b.regions, b.offsets, b.sizes)
