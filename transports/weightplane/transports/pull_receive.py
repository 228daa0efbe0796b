"""The receiving side of transports whose receivers pull (see ``pull``).

The data thread does everything itself: it dials each sender at ``arm``, reads messages while it waits (asleep), and
reads memory when a bucket is ready. An abort wakes it through a descriptor; a sender's end shows as the connection's.
Between its calls, for importers that map memory, another thread takes what senders say (``pull_idle``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.plan import Bucket
from weightplane.v1.transport_pb2 import PullDone, PullEndpoint, PullMessage, PullServe

from .base import ArmToken, ChannelSpec, ReceiveChannel, TransportError
from .pull_abc import Importer, Pull
from .pull_idle import ear
from .pull_senders import Senders
from .pull_wait import PullWait

if TYPE_CHECKING:
    import torch

__all__ = ["PullReceiveChannel"]


class PullReceiveChannel(ReceiveChannel):
    """One receiver of one channel; ``importer`` is its own, ``endpoints`` are the senders', by member."""

    def __init__(self, spec: ChannelSpec, member: str, directory: Path, endpoints: Mapping[str, PullEndpoint],
                 importer: Importer) -> None:  # fmt: skip
        self.spec, self.member = spec, member
        self._importer, self._wait = importer, PullWait(spec, member)
        self._senders = Senders(spec, member, directory, endpoints, importer, self._wait)
        importer.ask_serve = self._ask_serve
        self._token: ArmToken | None = None
        self._landed = 0
        self._left: set[int] = set()  # buckets that are armed and were not received
        self._next: tuple[Bucket, Sequence[torch.Tensor]] | None = None
        self._busy = threading.Lock()  # held by who works here: the data thread, or the ear between its calls

    @property
    def bytes_landed(self) -> int:
        """See ``ReceiveChannel``."""
        return self._landed

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        """See ``ReceiveChannel``. Waits, until the deadline, for senders that have not opened their side yet."""
        with self._working():
            self._arm(token, buckets, deadline)

    def _arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        self._wait.begin(-1)
        for bucket in buckets:
            if self.member not in bucket.receivers or bucket.sender not in self.spec.senders:
                raise TransportError(f"bucket {bucket.index} is not {self.member!r}'s on this channel")
        if why := self._importer.broken:
            raise TransportError(f"channel {self.spec.channel_id}: {why}: bind a new one")
        self._importer.quiet()  # what was begun for an earlier call
        self._next = None
        self._wait.deadline = deadline
        if token != self._token:
            self._token = token
            self._left.clear()
        self._left.update(b.index for b in buckets)
        for name in dict.fromkeys(b.sender for b in buckets):
            found = self._senders.known.get(name)
            if found is not None and found.ended():
                self._senders.forget(found)
                found = None
            sender = found or self._senders.connect(name)
            if token != sender.token:
                self._senders.announce(sender, token)

    def ahead(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """See ``ReceiveChannel``. Begun when its sender is heard to have it ready."""
        self._next = bucket, spans

    def receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        """See ``ReceiveChannel``."""
        with self._working():
            try:
                self._receive(bucket, spans)
            except BaseException:
                self._next = None
                self._importer.quiet()
                raise

    def _receive(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        name = self.spec.transport
        self._wait.begin(bucket.index)
        sender = self._senders.known.get(bucket.sender)
        if self._token is None or sender is None:
            raise TransportError(f"bucket {bucket.index}: the channel was never armed for it", bucket=bucket.index)
        failpoints.hit(f"{name}.receive.before")
        sender.declared.check_size(bucket, spans)
        while bucket.index not in sender.declared.ready:
            self._senders.hear(sender)
        inside, landed_before = f"{name}.receive.inside", self._landed

        def landed(nbytes: int) -> None:
            self._landed += nbytes
            failpoints.hit(inside)

        def check() -> None:
            self._senders.look(sender)
            self._begin_next()

        pull = Pull(bucket, sender.declared.entry_of(bucket, spans), spans, check, landed)
        self._importer.begin(sender.member, pull)
        self._begin_next()
        self._senders.reading = True
        try:
            self._importer.pull(sender.member, pull)
        finally:
            self._senders.reading = False
        if self._landed - landed_before != bucket.nbytes:
            raise AssertionError(f"bucket {bucket.index}: the importer counted {self._landed - landed_before} bytes")
        self._senders.look(sender, now=True)  # a sender that had left may have changed what was read
        del sender.declared.ready[bucket.index]
        self._left.discard(bucket.index)
        self._senders.say(sender, PullMessage(done=PullDone(bucket=bucket.index, armed=sender.number)))
        failpoints.hit(f"{name}.receive.after")

    def _begin_next(self) -> None:
        """Let the importer begin the bucket that comes next, if its sender has it ready by now."""
        if self._next is None:
            return
        bucket, spans = self._next
        sender = self._senders.known.get(bucket.sender)
        if sender is None:
            return
        if bucket.index not in sender.declared.ready:
            self._senders.hear_all(sender)
        if bucket.index in sender.declared.ready:
            self._next = None
            sender.declared.check_size(bucket, spans)
            pull = Pull(bucket, sender.declared.entry_of(bucket, spans), spans, lambda: None, lambda _: None)
            self._importer.begin(sender.member, pull)

    def abort(self, reason: str) -> None:
        """See ``ReceiveChannel``; the senders notice too."""
        with self._wait.lock:
            self._wait.abort(reason)
            if not self._wait.closed:
                self._senders.leave(f"aborted: {reason}"[:1000])

    def close(self) -> None:
        """See ``ReceiveChannel``."""
        with self._wait.lock:
            if self._wait.closed:
                return
            self._senders.leave("closed")
            self._wait.close()
        with self._busy:
            self._importer.close()
            self._senders.close()

    @property
    def details(self) -> Mapping[str, str]:
        """How bytes move, for ``doctor`` and logs."""
        return self._importer.details()

    # --- inside

    def _ask_serve(self, sender: str, on: bool) -> None:
        self._senders.say(self._senders.known[sender], PullMessage(serve=PullServe(on=on)))

    # --- between the data thread's calls

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """The data thread is in a call; after an update's last one the ear hears what comes."""
        with self._busy:
            yield
        if self._importer.maps and not self._left:
            self._listen()

    def _listen(self) -> None:
        with self._wait.lock:
            for sender in self._senders.known.values():
                if not self._wait.closed and sender.fault is None:
                    ear().listen(sender.socket.fileno(), self._hear)

    def _hear(self) -> None:
        """A sender said something, or ended. The ear's thread; not while the data thread is in a call."""
        if not self._busy.acquire(blocking=False):
            return  # whoever works listens again afterwards
        try:
            if self._wait.closed:
                return
            for sender in self._senders.known.values():
                try:
                    self._senders.hear_all(sender)
                    if sender.ended():
                        sender.lose_memory()
                except TransportError as e:
                    sender.fault = e
                    sender.lose_memory()
        finally:
            self._busy.release()
        self._listen()
