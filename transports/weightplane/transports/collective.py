"""The channel of collective transports: what its two ends share. ``nccl`` is made of it.

**Ranks**: the channel's senders, then its receivers, in its order. Each sender has a communicator with all receivers,
in which it is rank 0 (with one sender: the channel's own; else split from it).

**Order**: all members go through one sequence, the plan's buckets by index and then the acknowledgements by sender,
each member through its own part of it. Every operation is queued on one stream of the device, so one runs at a time.
Two members never wait for each other: who waits, waits for a member that is behind it in the one sequence, and the
member that is furthest behind waits for nobody. A bucket for all receivers is broadcast, one for some of them is sent
to each in one group. Receivers may queue the next bucket too (``ahead``), never past the end of a call: there the
acknowledgements stand.

**Connecting** begins with the first ``send`` or ``receive``, when everybody is armed (a member that has no bucket in
the call begins when it is armed: the others cannot do without it).

**Completion**: ``receive`` returns when the bucket is complete on the device. When ``flush`` returns, the device reads
no source any more; after the last bucket of a call every receiver has taken everything, too, because each of them
joins the acknowledgement when it has (a reduction of one byte; one byte sent for buckets that not all receive).

**Faults**: a library that waits for a dead peer waits for ever, so nobody is sure of who is gone: a channel ends by its
deadline, by an abort, or by what the library notices (``PeerLost`` that names all who may be meant). What ends one call
ends the channel: what a collective was told cannot be taken back. Its communicators are aborted, ids are single use,
and the next channel has a new one. A member that leaves (``drop``) ends it too.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.plan import Bucket

from .base import ArmToken, ChannelAborted, ChannelSpec, ChannelTimeout, PeerLost, TransportError
from .collective_abc import Communicator
from .collective_connect import Connect, Connection
from .collective_lanes import Lanes, Mark, Slot
from .collective_layout import FENCE_BYTES, Packed, Step, Tuning, encoded, fence, steps_of
from .collective_program import Program

__all__ = ["CollectiveChannel", "Flight"]

log = logging.getLogger(__name__)

_INSIDE: Final = 2 << 20  # bytes for which a failpoint is passed at least once
_DRAIN_S: Final = 0.7  # seconds that a call waits for the device to be idle after an abort, before it raises anyway
_CLOSE_S: Final = 4.0  # the same for ``close``
_SPIN_S, _SHORT_S, _LONG_S = 0.1, 50e-6, 0.001  # looking: how long often, and how often then and later
_ASK_S: Final = 0.05  # seconds between two questions whether the library noticed something
#: Members take the one deadline each from its own arming: who gets there first leaves, and ends the others' connecting.
_SKEW_S: Final = 0.25

_abandoned: list[Any] = []  # what a device that could not be stopped may still touch: never freed


class Flight:
    """A bucket that was queued: its marks in order, each with the bytes that are done when it has passed."""

    __slots__ = ("marks", "program")

    def __init__(self, program: Program) -> None:
        self.program = program
        self.marks: deque[tuple[Mark, int]] = deque()


class CollectiveChannel:
    """See the module text. The thread contract is ``base``'s."""

    sends: bool

    def __init__(self, spec: ChannelSpec, member: str, lanes: Lanes, connect: Connect, tuning: Tuning) -> None:
        """``connect(check)`` gives the communicators by sender, which queue on the wire stream of ``lanes``."""
        self.spec, self.member, self._tuning = spec, member, tuning
        self._lanes = lanes
        self._others = tuple(m for m in (*spec.senders, *spec.receivers) if m != member)
        self._connection = Connection(f"{spec.transport}-{member}", connect, self._live)
        self._lock = threading.Lock()
        self._wake, self._drained = threading.Event(), threading.Event()
        self._reason: str | None = None
        self._ending = self._closed = False
        self._deadline = self._asked = 0.0
        self._doing: tuple[int, Sequence[str]] = (-1, ())  # the bucket, and whom it needs
        self._token: ArmToken | None = None
        self._queue: deque[Bucket] = deque()
        self._moved = False
        self._steps: dict[int, tuple[Bucket, tuple[Step, ...]]] = {}
        self._programs: dict[int, Program] = {}
        self._slot = 0
        self._fences: dict[int, dict[str, int | str]] = {}  # by the bucket that it precedes
        self._fence_device: torch.Tensor | None = None
        self._fence_host: torch.Tensor | None = None
        self._bytes: torch.Tensor | None = None

    # --- arming

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        """See ``SendChannel`` and ``ReceiveChannel``: checks, buffers, tables; the library is not asked.

        ``ChannelAborted``: an earlier call was left unfinished.
        """
        self._check(-1)
        if self._moved and self._queue:
            left = self._queue[0].index
            self.abort(f"{self.member!r} left an update unfinished at bucket {left}: a collective cannot skip it")
            self._check(left)
        self._validate(buckets)
        self._deadline = deadline
        self._token, self._queue, self._moved = token, deque(buckets), False
        steps = [self._steps_of(b) for b in buckets]
        packed = [s.nbytes for some in steps for s in some if isinstance(s, Packed)]
        self._settle()
        if self._lanes.prepare(self._tuning.slots, max(packed, default=0)):
            self._programs.clear()  # they are of the buffers that were
        self._slot = 0
        self._plan_fences(token, buckets)
        self._plan_acks(buckets)
        if not buckets:
            self._connection.start(deadline)

    def _validate(self, buckets: Sequence[Bucket]) -> None:
        at = -1
        for b in buckets:
            mine = b.sender == self.member if self.sends else self.member in b.receivers
            if not mine or b.sender not in self.spec.senders or not set(b.receivers) <= set(self.spec.receivers):
                raise TransportError(f"bucket {b.index} is not {self.member!r}'s on this channel", bucket=b.index)
            if b.index <= at:
                raise TransportError(f"bucket {b.index} comes after bucket {at}: not the plan's order", bucket=b.index)
            at = b.index

    def _settle(self) -> None:
        """Before buffers may be replaced: nothing of an earlier call is on its way."""
        return None

    def _steps_of(self, bucket: Bucket) -> tuple[Step, ...]:
        known = self._steps.get(bucket.index)
        if known is None or (known[0] is not bucket and known[0] != bucket):
            known = self._steps[bucket.index] = (bucket, steps_of(bucket, self._tuning))
        return known[1]

    def _plan_fences(self, token: ArmToken, buckets: Sequence[Bucket]) -> None:
        together: dict[tuple[str, tuple[str, ...]], list[Bucket]] = {}
        for b in buckets:
            together.setdefault((b.sender, b.receivers), []).append(b)
        self._fences = {
            some[0].index: fence(self.spec.channel_id, token, some, self._tuning) for some in together.values()
        }
        size = FENCE_BYTES * max(1, len(self._fences))
        if self._fence_host is None or self._fence_host.numel() < size:
            self._fence_host, self._fence_device = self._lanes.host(size), self._lanes.scratch(size)
        if self.sends:
            for n, said in enumerate(self._fences.values()):
                raw = torch.frombuffer(bytearray(encoded(said)), dtype=torch.uint8)
                self._fence_host[n * FENCE_BYTES : (n + 1) * FENCE_BYTES].copy_(raw)

    def _fence_place(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a fence lies on the host and on the device."""
        assert self._fence_host is not None and self._fence_device is not None
        n = list(self._fences).index(bucket.index) * FENCE_BYTES
        return self._fence_host[n : n + FENCE_BYTES], self._fence_device[n : n + FENCE_BYTES]

    @abstractmethod
    def _plan_acks(self, buckets: Sequence[Bucket]) -> None:
        """Note what is acknowledged once all ``buckets`` have moved."""

    def _ack_bytes(self, n: int) -> torch.Tensor:
        """Bytes for acknowledgements; what they hold does not matter."""
        if self._bytes is None or self._bytes.numel() < n:
            self._bytes = self._lanes.scratch(n)
        return self._bytes[:n]

    # --- moving

    def _enter(self, bucket: Bucket) -> None:
        """The bucket is the next of those armed, and everybody is connected."""
        self._check(bucket.index)
        if self._token is None:
            raise TransportError(f"bucket {bucket.index}: the channel was never armed", bucket=bucket.index)
        self._doing = (bucket.index, self._peers(bucket))
        if not self._queue or self._queue[0].index != bucket.index:
            due = f"bucket {self._queue[0].index}" if self._queue else "none"
            raise TransportError(
                f"bucket {bucket.index}: {due} is next; a collective moves every armed bucket once, in plan order",
                bucket=bucket.index,
            )
        self._moved = True
        if not self._connection.done.is_set():
            self._connection.start(self._deadline)
            self._until(self._connection.done.is_set, bucket.index, self._others, "to connect")
        self._connected(bucket.index)

    def _connected(self, bucket: int) -> None:
        error = self._connection.error
        if error is None:
            return
        self._check(bucket)  # what ended it, if that is known here
        if time.monotonic() >= self._deadline - _SKEW_S:
            raise self._late("to connect", bucket, self._others, f" ({error})")
        self._fail(f"could not connect: {error}")
        if isinstance(error, TransportError):
            raise error
        raise TransportError(f"{self.member!r} could not connect: {type(error).__name__}: {error}") from error

    def _communicator(self, sender: str) -> Communicator:
        return self._connection.communicators[self.spec.senders.index(sender)]

    def _program(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> Program:
        known = self._programs.get(bucket.index)
        if known is None or known.spans is not spans or known.bucket is not self._steps[bucket.index][0]:
            held, steps = self._steps[bucket.index]
            known = self._programs[bucket.index] = Program(held, steps, spans, self._lanes, sends=self.sends)
        return known

    def _forget(self) -> None:
        """Nothing is on its way: let go of lists of spans that nobody else holds, which cannot come again."""
        for index, program in list(self._programs.items()):
            if sys.getrefcount(program.spans) <= 2:  # the program's reference, and the call's
                del self._programs[index]

    def _next_slot(self, step: Step) -> Slot | None:
        if not isinstance(step, Packed):
            return None
        slot = self._lanes.slots[self._slot]
        self._slot = (self._slot + 1) % len(self._lanes.slots)
        return slot

    def _peers(self, bucket: Bucket) -> tuple[str, ...]:
        """Whom a bucket needs besides this member."""
        return tuple(m for m in (bucket.sender, *bucket.receivers) if m != self.member)

    def _for_all(self, bucket: Bucket) -> bool:
        return len(bucket.receivers) == len(self.spec.receivers)

    def _rank_of(self, receiver: str) -> int:
        return 1 + self.spec.receivers.index(receiver)

    def _inside(self, nbytes: int) -> None:
        for _ in range(0, nbytes, _INSIDE):
            failpoints.hit(f"{self.spec.transport}.{'send' if self.sends else 'receive'}.inside")

    @contextmanager
    def _asking(self, bucket: Bucket) -> Iterator[None]:
        """Around calls of the library and the device: what they raise ends the channel."""
        try:
            yield
        except (ChannelAborted, ChannelTimeout, PeerLost):
            raise
        except TransportError as e:
            self._check(bucket.index)  # an abort makes them fail
            self._fail(str(e))
            e.bucket = bucket.index
            raise

    # --- waiting

    def _passed(self, mark: Mark, bucket: int, peers: Sequence[str]) -> None:
        """Wait for a mark."""
        self._until(lambda: self._lanes.passed(mark), bucket, peers, "for bytes")
        self._check(bucket)  # an abort ends what was queued, and then it has passed too

    def _until(self, done: Callable[[], bool], bucket: int, peers: Sequence[str], what: str) -> None:
        start = time.monotonic()
        while not done():
            self._check(bucket)
            now = time.monotonic()
            if now >= self._deadline:
                raise self._late(what, bucket, peers)
            if now - self._asked >= _ASK_S:
                self._asked = now
                self._ask(bucket, peers)
            self._wake.wait(_SHORT_S if now - start < _SPIN_S else _LONG_S)

    def _late(self, what: str, bucket: int, peers: Sequence[str], more: str = "") -> ChannelTimeout:
        text = f"{self.member!r} waited {what} in bucket {bucket} until the deadline{more}; it needs {', '.join(peers)}"
        self._fail(text)
        return ChannelTimeout(text, peers=peers, bucket=bucket)

    def _live(self) -> None:
        """What communicators check while they wait in a call of theirs."""
        bucket, peers = self._doing
        self._check(bucket)
        if time.monotonic() >= self._deadline:
            raise self._late("for the library", bucket, peers)

    def _ask(self, bucket: int, peers: Sequence[str]) -> None:
        for communicator in self._connection.communicators.values():
            problem = communicator.problem()
            if problem and self._reason is None:
                text = f"{self.member!r} lost one of {', '.join(peers)} in bucket {bucket}: {problem}"
                self._fail(text)
                raise PeerLost(text, peers=peers, bucket=bucket)

    def _check(self, bucket: int) -> None:
        reason = self._reason
        if reason is not None:
            self._drained.wait(_DRAIN_S)
            raise ChannelAborted(f"channel {self.spec.channel_id}: {reason}", bucket=bucket)

    def _fail(self, reason: str) -> None:
        """The call fails for a reason of its own; the channel ends, and nothing of it runs on when the call raises."""
        self.abort(reason)
        self._drained.wait(_DRAIN_S)

    # --- ending

    def drop(self, member: str) -> None:
        """See ``SendChannel``: ends the channel. Its receivers are told by the control plane."""
        self.abort(f"{member} was left out, and a communicator cannot go on without one of its members")

    def abort(self, reason: str) -> None:
        """See ``base``. Returns at once; a thread aborts the communicators."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
            begin, self._ending = not self._ending, True
        self._wake.set()
        if begin:
            threading.Thread(target=self._end, name=f"{self.spec.transport}-abort", daemon=True).start()

    def _end(self) -> None:
        try:
            self._connection.abort()
            pause = threading.Event()
            while not self._lanes.idle():
                pause.wait(_LONG_S)
            self._drained.set()
        except Exception as e:  # a device that is broken
            log.warning("channel %s of %r does not end: %s", self.spec.channel_id, self.member, e)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called. Any thread."""
        return self._closed

    def close(self) -> None:
        """See ``base``. A device that does not stop within seconds keeps the memory that it may still touch."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._reason is None:
            self._leave()
        self.abort("closed")
        if self._drained.wait(_CLOSE_S):
            self._programs.clear()
            self._lanes.close()
        else:
            log.warning(
                "channel %s of %r: the device still runs; its memory is kept", self.spec.channel_id, self.member
            )
            _abandoned.append(self)

    def _leave(self) -> None:
        """Before a channel in good order is closed."""
        return None
