"""The receiving side of transports whose receivers pull (see ``pull``).

The data thread does everything itself: it dials each sender at ``arm``, reads messages while it waits (asleep), and
reads memory when a bucket is ready. An abort wakes it through a descriptor; a sender's end shows as the connection's.
Between its calls, for importers that map memory, another thread takes what senders say (``pull_idle``).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weightplane.controlplane import failpoints
from weightplane.controlplane.core.plan import Bucket
from weightplane.v1.transport_pb2 import (
    PullArmed,
    PullBucket,
    PullBye,
    PullDone,
    PullEndpoint,
    PullHello,
    PullMessage,
    PullProof,
    PullServe,
    PullTable,
)

from .base import ArmToken, ChannelAborted, ChannelSpec, ChannelTimeout, PeerLost, ReceiveChannel, TransportError
from .pull_abc import Entry, Importer, Pull
from .pull_idle import ear
from .pull_wire import FRAME, PROTOCOL, FrameError, Frames, dial, encode, host_id, new_nonce, proof

if TYPE_CHECKING:
    import torch

__all__ = ["PullReceiveChannel"]

_PEER_CHECK = 0.02  # seconds between two looks at whether the sender is there, while its memory is read
_CHUNK = 64 << 10
_MOST = 1_000_000  # chunks, regions or buckets that one sender may declare
_RETRY = 0.02  # seconds until a sender that has not opened its side is dialled again; doubles up to ten times this
#: A network that has just come back says this while it still looks for its neighbours: it is asked for so long.
_NO_ROUTE, _ROUTE_S = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH}), 2.0
_ENDED = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class _Refused(Exception):
    pass


class _Sender:
    """A connection to one sender, and what it has told."""

    def __init__(self, member: str, sock: socket.socket) -> None:
        self.member, self.socket = member, sock
        self.frames = Frames()
        self.number = 0  # of the last ``armed``
        self.entries: dict[int, tuple[int, Entry]] = {}
        self.regions: set[int] = set()
        self.chunks = 0
        self.token: ArmToken | None = None
        self.ready: dict[int, int] = {}
        self.fitting: dict[int, tuple[Entry, Sequence[torch.Tensor]]] = {}  # of each bucket's bytes
        self.partial = False  # a message of ours is half sent
        self.bye = ""
        self.fault: TransportError | None = None  # found while nobody asked


class PullReceiveChannel(ReceiveChannel):
    """One receiver of one channel; ``importer`` is its own, ``endpoints`` are the senders', by member."""

    def __init__(self, spec: ChannelSpec, member: str, directory: Path, endpoints: Mapping[str, PullEndpoint],
                 importer: Importer) -> None:  # fmt: skip
        self.spec, self.member = spec, member
        self._directory, self._endpoints, self._importer = directory, endpoints, importer
        importer.ask_serve = self._ask_serve
        self._senders: dict[str, _Sender] = {}
        self._token: ArmToken | None = None
        self._deadline = 0.0
        self._bucket = -1
        self._landed = 0
        self._looked = 0.0
        self._left: set[int] = set()  # buckets that are armed and were not received
        self._next: tuple[Bucket, Sequence[torch.Tensor]] | None = None
        self._pulling = False
        self._lock = threading.Lock()  # for what abort touches: the wake descriptor, the sockets
        self._busy = threading.Lock()  # held by who works here: the data thread, or the ear between its calls
        self._reason: str | None = None
        self._closed = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def bytes_landed(self) -> int:
        """See ``ReceiveChannel``."""
        return self._landed

    def arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        """See ``ReceiveChannel``. Waits, until the deadline, for senders that have not opened their side yet."""
        with self._working():
            self._arm(token, buckets, deadline)

    def _arm(self, token: ArmToken, buckets: Sequence[Bucket], deadline: float) -> None:
        self._begin(-1)
        for bucket in buckets:
            if self.member not in bucket.receivers or bucket.sender not in self.spec.senders:
                raise TransportError(f"bucket {bucket.index} is not {self.member!r}'s on this channel")
        if why := self._importer.broken:
            raise TransportError(f"channel {self.spec.channel_id}: {why}: bind a new one")
        self._importer.quiet()  # what was begun for an earlier call
        self._next = None
        self._deadline = deadline
        if token != self._token:
            self._token = token
            self._left.clear()
        self._left.update(b.index for b in buckets)
        for name in dict.fromkeys(b.sender for b in buckets):
            found = self._senders.get(name)
            if found is not None and self._ended(found):
                self._forget(found)
                found = None
            sender = found or self._connect(name)
            if token != sender.token:
                self._announce(sender, token)

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
        self._begin(bucket.index)
        sender = self._senders.get(bucket.sender)
        if self._token is None or sender is None:
            raise TransportError(f"bucket {bucket.index}: the channel was never armed for it", bucket=bucket.index)
        failpoints.hit(f"{name}.receive.before")
        self._check_size(sender, bucket, spans)
        while bucket.index not in sender.ready:
            self._wait(sender)
        inside, landed_before = f"{name}.receive.inside", self._landed

        def landed(nbytes: int) -> None:
            self._landed += nbytes
            failpoints.hit(inside)

        def check() -> None:
            self._look(sender)
            self._begin_next()

        pull = Pull(bucket, self._entry_of(sender, bucket, spans), spans, check, landed)
        self._importer.begin(sender.member, pull)
        self._begin_next()
        self._pulling = True
        try:
            self._importer.pull(sender.member, pull)
        finally:
            self._pulling = False
        if self._landed - landed_before != bucket.nbytes:
            raise AssertionError(f"bucket {bucket.index}: the importer counted {self._landed - landed_before} bytes")
        self._looked = 0.0
        self._look(sender)  # a sender that had left may have changed what was read
        del sender.ready[bucket.index]
        self._left.discard(bucket.index)
        self._say(sender, PullMessage(done=PullDone(bucket=bucket.index, armed=sender.number)))
        failpoints.hit(f"{name}.receive.after")

    def _check_size(self, sender: _Sender, bucket: Bucket, spans: Sequence[torch.Tensor]) -> None:
        known = sender.fitting.get(bucket.index)
        if known is not None and known[1] is spans:  # looked at before
            return
        found = sum(span.numel() for span in spans)
        if found != bucket.nbytes:
            text = f"bucket {bucket.index} has {bucket.nbytes} bytes, its spans {found}"
            raise TransportError(text, bucket=bucket.index)

    def _entry_of(self, sender: _Sender, bucket: Bucket, spans: Sequence[torch.Tensor]) -> Entry:
        """Where a ready bucket's bytes lie; spans and entry fit it."""
        version, entry = sender.entries.get(bucket.index, (0, None))
        known = sender.fitting.get(bucket.index)
        if known is not None and known[0] is entry and known[1] is spans and version == sender.ready[bucket.index]:
            return known[0]
        if entry is None or version != sender.ready[bucket.index] or sum(entry.sizes) != bucket.nbytes:
            raise self._foul(sender, f"declared bucket {bucket.index} ready, but not where its bytes lie")
        sender.fitting[bucket.index] = entry, spans
        return entry

    def _begin_next(self) -> None:
        """Let the importer begin the bucket that comes next, if its sender has it ready by now."""
        if self._next is None:
            return
        bucket, spans = self._next
        sender = self._senders.get(bucket.sender)
        if sender is None:
            return
        if bucket.index not in sender.ready:
            self._take_all(sender)
        if bucket.index in sender.ready:
            self._next = None
            self._check_size(sender, bucket, spans)
            pull = Pull(bucket, self._entry_of(sender, bucket, spans), spans, lambda: None, lambda _: None)
            self._importer.begin(sender.member, pull)

    def abort(self, reason: str) -> None:
        """See ``ReceiveChannel``; the senders notice too."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)
                self._leave(f"aborted: {reason}"[:1000])

    def close(self) -> None:
        """See ``ReceiveChannel``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._leave("closed")
            os.close(self._wake_fd)
        with self._busy:
            self._importer.close()
            for sender in self._senders.values():
                self._hang_up(sender)
            self._senders.clear()

    @property
    def details(self) -> Mapping[str, str]:
        """How bytes move, for ``doctor`` and logs."""
        return self._importer.details()

    # --- inside

    def _ask_serve(self, sender: str, on: bool) -> None:
        self._say(self._senders[sender], PullMessage(serve=PullServe(on=on)))

    def _begin(self, bucket: int) -> None:
        self._bucket = bucket
        if self._closed:
            raise TransportError(f"channel {self.spec.channel_id} is closed", bucket=bucket)
        if self._reason is not None:
            raise ChannelAborted(f"channel {self.spec.channel_id}: {self._reason}", bucket=bucket)

    def _check(self, waiting_for: str) -> float:
        """Raise if aborted or too late; the seconds left."""
        self._begin(self._bucket)
        left = self._deadline - time.monotonic()
        if left <= 0:
            where = f" in bucket {self._bucket}" if self._bucket >= 0 else ""
            raise ChannelTimeout(
                f"{self.member!r} waited for {waiting_for!r}{where} until the deadline",
                peers=(waiting_for,),
                bucket=self._bucket,
            )
        return left

    def _look(self, sender: _Sender) -> None:
        """While memory is read: raise if aborted, too late, or the sender has left."""
        self._check(sender.member)
        now = time.monotonic()
        if now - self._looked >= _PEER_CHECK:
            self._looked = now
            if self._ended(sender):
                with contextlib.suppress(FrameError, OSError):  # its last words
                    sender.frames.feed(sender.socket.recv(_CHUNK))
                    for message in sender.frames.messages():
                        sender.bye = message.bye.reason[:1000] or sender.bye
                self._check(sender.member)  # an abort of ours ends the connection too, and may have come since
                raise self._lost(sender)

    def _ended(self, sender: _Sender) -> bool:
        poll = select.poll()
        poll.register(sender.socket, select.POLLRDHUP)
        return any(event & _ENDED for _, event in poll.poll(0))

    def _lost(self, sender: _Sender) -> PeerLost:
        why = f"left: {sender.bye}" if sender.bye else "closed the connection, or died"
        text = f"{sender.member!r} {why} (bucket {self._bucket})"
        return PeerLost(text, peers=(sender.member,), bucket=self._bucket)

    def _foul(self, sender: _Sender, text: str) -> TransportError:
        return TransportError(f"{sender.member!r} {text}", peers=(sender.member,), bucket=self._bucket)

    # --- connections

    def _connect(self, name: str) -> _Sender:
        """A proven connection to a sender. Waits for one that has not opened its side; not for one that is gone."""
        pause, until = _RETRY, time.monotonic() + _ROUTE_S
        while True:
            sender = None
            try:
                sock = dial(self.spec, self.member, name, self._endpoints.get(name, PullEndpoint()), self._directory)
                sender = _Sender(name, sock)
                self._open(sender)
                return sender
            except BlockingIOError:
                pass  # more wait to be accepted than there is room for
            except _Refused:
                pass
            except (FileNotFoundError, ConnectionError, TimeoutError) as e:
                text = f"{name!r} cannot be reached: its listener is gone ({e.strerror or e}), so it died or shut down"
                text += f"; tried {self._address(name)}"
                raise PeerLost(text, peers=(name,), bucket=self._bucket) from e
            except OSError as e:
                if e.errno not in _NO_ROUTE or time.monotonic() > until:
                    text = f"{name!r} cannot be reached: {e.strerror or e}; tried {self._address(name)}"
                    raise TransportError(text, peers=(name,)) from e
            except ChannelTimeout as e:
                text = f"{e}: nothing answered at {self._address(name)}"
                raise ChannelTimeout(text, peers=e.peers, bucket=e.bucket) from None
            finally:
                if sender is not None and self._senders.get(name) is not sender:
                    sender.socket.close()
            self._poll(name, None, 0, min(pause, self._check(name)))
            pause = min(2 * pause, 10 * _RETRY)

    def _address(self, name: str) -> str:
        """Where a sender was looked for, and who decides."""
        endpoint = self._endpoints.get(name, PullEndpoint())
        if endpoint.socket and endpoint.host_id == host_id(self._directory):
            return f"the socket {endpoint.socket} in {self._directory}"
        return f"{endpoint.address} (WEIGHTPLANE_PULL_BIND and _ADVERTISE at {name!r})"

    def _open(self, sender: _Sender) -> None:
        self._poll(sender.member, sender.socket, select.POLLOUT, self._check(sender.member))
        error = sender.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        hello = PullHello(
            protocol=PROTOCOL,
            channel_id=self.spec.channel_id,
            sender=sender.member,
            receiver=self.member,
            nonce=new_nonce(),
        )
        self._say(sender, PullMessage(hello=hello))
        challenge = self._answer(sender, "challenge").challenge
        shown = proof(self.spec.key, "sender", hello, challenge.nonce)
        if len(challenge.nonce) != 32 or not hmac.compare_digest(shown, challenge.proof):
            raise self._foul(sender, "does not know the channel's key: the key of one of the two is not the channel's")
        answer = PullProof(proof=proof(self.spec.key, "receiver", hello, challenge.nonce))
        self._say(sender, PullMessage(proof=answer))
        welcome = self._answer(sender, "welcome").welcome
        sender.frames.limit = FRAME
        with self._lock:
            self._senders[sender.member] = sender
        try:
            self._importer.attach(sender.member, welcome, lambda: self._look(sender))
        except BaseException:
            self._forget(sender)
            raise

    def _answer(self, sender: _Sender, kind: str) -> PullMessage:
        """The next message of the handshake."""
        while (message := self._frame(sender)) is None:
            self._fill(sender)
        found = message.WhichOneof("message")
        if found == "refused":
            if message.refused.retry:
                raise _Refused
            reason = message.refused.reason[:1000]
            raise ChannelAborted(f"{sender.member!r} refused {self.member!r}: {reason}", peers=(sender.member,))
        if found != kind:
            raise self._foul(sender, f"sent {found} where {kind} was due")
        return message

    def _announce(self, sender: _Sender, token: ArmToken) -> None:
        sender.token = token
        sender.number += 1
        sender.ready.clear()
        armed = PullArmed(
            update_id=token.update_id,
            epoch=token.epoch,
            generation=token.generation,
            number=sender.number,
        )
        self._say(sender, PullMessage(armed=armed))

    def _forget(self, sender: _Sender) -> None:
        self._importer.detach(sender.member)
        with self._lock:
            self._senders.pop(sender.member, None)
            self._hang_up(sender)

    def _hang_up(self, sender: _Sender) -> None:
        if self._importer.maps:
            ear().forget(sender.socket.fileno())
        sender.socket.close()

    # --- between the data thread's calls

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """The data thread is in a call; after an update's last one the ear hears what comes."""
        with self._busy:
            yield
        if self._importer.maps and not self._left:
            self._listen()

    def _listen(self) -> None:
        with self._lock:
            for sender in self._senders.values():
                if not self._closed and sender.fault is None:
                    ear().listen(sender.socket.fileno(), self._hear)

    def _hear(self) -> None:
        """A sender said something, or ended. The ear's thread; not while the data thread is in a call."""
        if not self._busy.acquire(blocking=False):
            return  # whoever works listens again afterwards
        try:
            if self._closed:
                return
            for sender in self._senders.values():
                try:
                    self._take_all(sender)
                    if self._ended(sender):
                        self._lose_memory(sender)
                except TransportError as e:
                    sender.fault = e
                    self._lose_memory(sender)
        finally:
            self._busy.release()
        self._listen()

    def _take_all(self, sender: _Sender) -> None:
        """Take what has come, without waiting."""
        with contextlib.suppress(OSError):  # nothing has; what ended shows elsewhere
            sender.frames.feed(sender.socket.recv(_CHUNK))
        while (message := self._frame(sender)) is not None:
            self._take(sender, message)

    def _lose_memory(self, sender: _Sender) -> None:
        """A sender has ended: what it declared is not read any more. The data thread finds the connection's end."""
        if sender.fault is None:
            sender.fault = self._lost(sender)
        sender.ready.clear()
        sender.entries.clear()
        sender.fitting.clear()
        sender.chunks = 0
        regions, sender.regions = sender.regions, set()
        self._importer.quiet()
        self._importer.unmap(sender.member, regions)

    def _leave(self, reason: str) -> None:
        """Tell every sender and end the connections; under the lock, any thread."""
        bye = encode(PullMessage(bye=PullBye(reason=reason)))
        for sender in self._senders.values():
            with contextlib.suppress(OSError):
                if not sender.partial:
                    sender.socket.send(bye)
                sender.socket.shutdown(socket.SHUT_RDWR)

    # --- messages

    def _poll(self, waiting_for: str, sock: socket.socket | None, events: int, seconds: float) -> None:
        """Sleep until the socket is ready, an abort, or the time is over; raise if aborted or too late."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if sock is not None:
            poll.register(sock, events)
        poll.poll(max(0.0, seconds) * 1000 + 1)
        self._check(waiting_for)

    def _say(self, sender: _Sender, message: PullMessage) -> None:
        data = encode(message)
        while True:
            try:
                with self._lock:
                    data = data[sender.socket.send(data) :]
                    sender.partial = bool(data)
            except BlockingIOError:
                pass
            except OSError as e:
                self._check(sender.member)  # an abort of ours ends the connection too
                raise self._lost(sender) from e
            if not data:
                return
            self._poll(sender.member, sender.socket, select.POLLOUT, self._check(sender.member))

    def _fill(self, sender: _Sender) -> None:
        """Wait for bytes and take them."""
        left = self._check(sender.member)
        if sender.fault is not None:
            raise sender.fault
        self._poll(sender.member, sender.socket, select.POLLIN, left)
        try:
            data = sender.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as e:
            self._check(sender.member)
            raise self._lost(sender) from e
        if not data:
            self._check(sender.member)
            raise self._lost(sender)
        sender.frames.feed(data)

    def _frame(self, sender: _Sender) -> PullMessage | None:
        try:
            return sender.frames.next()
        except FrameError as e:
            raise self._foul(sender, f"sent what is no message: {e}") from e

    def _wait(self, sender: _Sender) -> None:
        """Take messages until at least one has come."""
        while (message := self._frame(sender)) is None:
            self._fill(sender)
        self._take(sender, message)

    def _take(self, sender: _Sender, message: PullMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "ready":
            if message.ready.armed == sender.number:
                if len(sender.ready) > _MOST:
                    raise self._foul(sender, f"declared more than {_MOST} buckets ready")
                sender.ready[message.ready.bucket] = message.ready.version
        elif kind == "table":
            self._table(sender, message.table)
        elif kind == "bye":
            sender.bye = message.bye.reason[:1000]
        else:
            raise self._foul(sender, f"sent {kind}, which is not for a receiver")

    def _table(self, sender: _Sender, table: PullTable) -> None:
        new = [r.id for r in table.regions]
        if len(set(new)) != len(new) or not sender.regions.isdisjoint(new):
            raise self._foul(sender, "declared a region twice")
        if len(sender.regions) + len(new) > _MOST:
            raise self._foul(sender, f"declared more than {_MOST} regions")
        if new:
            self._importer.map(sender.member, table.regions)
            sender.regions.update(new)
        if gone := sender.regions.intersection(table.gone):
            if self._pulling:
                raise self._foul(sender, "took memory back that is being read")
            sender.regions -= gone
            for index in [i for i, (_, e) in sender.entries.items() if not gone.isdisjoint(e.regions)]:
                sender.chunks -= len(sender.entries.pop(index)[1].sizes)
            self._importer.unmap(sender.member, gone)
        for part in table.buckets:
            self._entry(sender, part)

    def _entry(self, sender: _Sender, part: PullBucket) -> None:
        made = Entry(tuple(part.regions), tuple(part.offsets), tuple(part.sizes))
        version, old = sender.entries.get(part.bucket, (0, None))
        if not len(made.regions) == len(made.offsets) == len(made.sizes) or not all(made.sizes):
            raise self._foul(sender, f"declared chunks of bucket {part.bucket} that make no sense")
        if not sender.regions.issuperset(made.regions):
            raise self._foul(sender, f"declared chunks of bucket {part.bucket} in a region that it has not declared")
        if old is not None and version == part.version:  # a long list goes on
            made = Entry(old.regions + made.regions, old.offsets + made.offsets, old.sizes + made.sizes)
        sender.chunks += len(made.sizes) - (len(old.sizes) if old is not None else 0)
        sender.entries[part.bucket] = (part.version, made)
        if sender.chunks > _MOST or len(sender.entries) > _MOST:
            raise self._foul(sender, f"declared more than {_MOST} chunks")
