"""The connections of a receiver that pulls to its senders: dialled, proven, spoken on, and found ended.

All of it in the thread that works on the channel (the data thread, or the ear between its calls), but for ``leave``.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from weightplane.v1.transport_pb2 import PullArmed, PullBye, PullEndpoint, PullHello, PullMessage, PullProof

from .base import ArmToken, ChannelAborted, ChannelSpec, ChannelTimeout, PeerLost, TransportError
from .pull_abc import Importer
from .pull_declared import Declared
from .pull_idle import ear
from .pull_wait import PullWait
from .pull_wire import FRAME, PROTOCOL, FrameError, Frames, dial, encode, host_id, new_nonce, proof

__all__ = ["Sender", "Senders"]

_PEER_CHECK = 0.02  # seconds between two looks at whether the sender is there, while its memory is read
_CHUNK = 64 << 10
_RETRY = 0.02  # seconds until a sender that has not opened its side is dialled again; doubles up to ten times this
#: A network that has just come back says this while it still looks for its neighbours: it is asked for so long.
_NO_ROUTE, _ROUTE_S = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH}), 2.0
_ENDED = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class _Refused(Exception):
    pass


def _foul(member: str, wait: PullWait, text: str) -> TransportError:
    return TransportError(f"{member!r} {text}", peers=(member,), bucket=wait.bucket)


class Sender:
    """A connection to one sender, and what it has told."""

    def __init__(self, member: str, sock: socket.socket, importer: Importer, wait: PullWait) -> None:
        self.member, self.socket, self._wait = member, sock, wait
        self.frames = Frames()
        # Not a method of ours: what was declared holds the receiver's memory, and goes with us at once, not in a cycle.
        self.declared = Declared(member, importer, partial(_foul, member, wait))
        self.number = 0  # of the last ``armed``
        self.token: ArmToken | None = None
        self.partial = False  # a message of ours is half sent
        self.bye = ""
        self.fault: TransportError | None = None  # found while nobody asked

    def ended(self) -> bool:
        """Whether the connection is over."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return any(event & _ENDED for _, event in poll.poll(0))

    def lost(self) -> PeerLost:
        """The error for a connection that is over."""
        why = f"left: {self.bye}" if self.bye else "closed the connection, or died"
        text = f"{self.member!r} {why} (bucket {self._wait.bucket})"
        return PeerLost(text, peers=(self.member,), bucket=self._wait.bucket)

    def foul(self, text: str) -> TransportError:
        """The error for what no sender says."""
        return _foul(self.member, self._wait, text)

    def lose_memory(self) -> None:
        """It has ended: what it declared is not read any more. The data thread finds the connection's end."""
        if self.fault is None:
            self.fault = self.lost()
        self.declared.lose()


class Senders:
    """Those of one channel, by member. ``reading``: the importer reads memory now."""

    def __init__(
        self,
        spec: ChannelSpec,
        member: str,
        directory: Path,
        endpoints: Mapping[str, PullEndpoint],
        importer: Importer,
        wait: PullWait,
    ) -> None:
        self._spec, self._member, self._directory, self._endpoints = spec, member, directory, endpoints
        self._importer, self._wait = importer, wait
        self.known: dict[str, Sender] = {}  # changed under the wait's lock
        self.reading = False
        self._looked = 0.0

    # --- connections

    def connect(self, name: str) -> Sender:
        """A proven connection to a sender. Waits for one that has not opened its side; not for one that is gone."""
        pause, until = _RETRY, time.monotonic() + _ROUTE_S
        while True:
            sender = None
            try:
                sock = dial(self._spec, self._member, name, self._endpoints.get(name, PullEndpoint()), self._directory)
                sender = Sender(name, sock, self._importer, self._wait)
                self._open(sender)
                return sender
            except BlockingIOError:
                pass  # more wait to be accepted than there is room for
            except _Refused:
                pass
            except (FileNotFoundError, ConnectionError, TimeoutError) as e:
                text = f"{name!r} cannot be reached: its listener is gone ({e.strerror or e}), so it died or shut down"
                text += f"; tried {self._address(name)}"
                raise PeerLost(text, peers=(name,), bucket=self._wait.bucket) from e
            except OSError as e:
                if e.errno not in _NO_ROUTE or time.monotonic() > until:
                    text = f"{name!r} cannot be reached: {e.strerror or e}; tried {self._address(name)}"
                    raise TransportError(text, peers=(name,)) from e
            except ChannelTimeout as e:
                text = f"{e}: nothing answered at {self._address(name)}"
                raise ChannelTimeout(text, peers=e.peers, bucket=e.bucket) from None
            finally:
                if sender is not None and self.known.get(name) is not sender:
                    sender.socket.close()
            self._wait.poll(name, None, 0, min(pause, self._wait.check(name)))
            pause = min(2 * pause, 10 * _RETRY)

    def _address(self, name: str) -> str:
        """Where a sender was looked for, and who decides."""
        endpoint = self._endpoints.get(name, PullEndpoint())
        if endpoint.socket and endpoint.host_id == host_id(self._directory):
            return f"the socket {endpoint.socket} in {self._directory}"
        return f"{endpoint.address} (WEIGHTPLANE_PULL_BIND and _ADVERTISE at {name!r})"

    def _open(self, sender: Sender) -> None:
        self._wait.poll(sender.member, sender.socket, select.POLLOUT, self._wait.check(sender.member))
        error = sender.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        hello = PullHello(
            protocol=PROTOCOL,
            channel_id=self._spec.channel_id,
            sender=sender.member,
            receiver=self._member,
            nonce=new_nonce(),
        )
        self.say(sender, PullMessage(hello=hello))
        challenge = self._answer(sender, "challenge").challenge
        shown = proof(self._spec.key, "sender", hello, challenge.nonce)
        if len(challenge.nonce) != 32 or not hmac.compare_digest(shown, challenge.proof):
            raise sender.foul("does not know the channel's key: the key of one of the two is not the channel's")
        answer = PullProof(proof=proof(self._spec.key, "receiver", hello, challenge.nonce))
        self.say(sender, PullMessage(proof=answer))
        welcome = self._answer(sender, "welcome").welcome
        sender.frames.limit = FRAME
        with self._wait.lock:
            self.known[sender.member] = sender
        try:
            self._importer.attach(sender.member, welcome, lambda: self.look(sender))
        except BaseException:
            self.forget(sender)
            raise

    def _answer(self, sender: Sender, kind: str) -> PullMessage:
        """The next message of the handshake."""
        while (message := self._frame(sender)) is None:
            self._fill(sender)
        found = message.WhichOneof("message")
        if found == "refused":
            if message.refused.retry:
                raise _Refused
            reason = message.refused.reason[:1000]
            raise ChannelAborted(f"{sender.member!r} refused {self._member!r}: {reason}", peers=(sender.member,))
        if found != kind:
            raise sender.foul(f"sent {found} where {kind} was due")
        return message

    def forget(self, sender: Sender) -> None:
        """Detach and end one connection."""
        self._importer.detach(sender.member)
        with self._wait.lock:
            self.known.pop(sender.member, None)
            self._hang_up(sender)

    def _hang_up(self, sender: Sender) -> None:
        if self._importer.maps:
            ear().forget(sender.socket.fileno())
        sender.socket.close()

    def leave(self, reason: str) -> None:
        """Tell every sender and end the connections; under the wait's lock, any thread."""
        bye = encode(PullMessage(bye=PullBye(reason=reason)))
        for sender in self.known.values():
            with contextlib.suppress(OSError):
                if not sender.partial:
                    sender.socket.send(bye)
                sender.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After ``leave``: keep nothing."""
        for sender in self.known.values():
            self._hang_up(sender)
        self.known.clear()

    # --- what is said

    def announce(self, sender: Sender, token: ArmToken) -> None:
        """This receiver is armed for an update."""
        sender.token = token
        sender.number += 1
        sender.declared.rearm()
        armed = PullArmed(
            update_id=token.update_id,
            epoch=token.epoch,
            generation=token.generation,
            number=sender.number,
        )
        self.say(sender, PullMessage(armed=armed))

    def say(self, sender: Sender, message: PullMessage) -> None:
        """Send; waits for room."""
        data = encode(message)
        while True:
            try:
                with self._wait.lock:
                    data = data[sender.socket.send(data) :]
                    sender.partial = bool(data)
            except BlockingIOError:
                pass
            except OSError as e:
                self._wait.check(sender.member)  # an abort of ours ends the connection too
                raise sender.lost() from e
            if not data:
                return
            self._wait.poll(sender.member, sender.socket, select.POLLOUT, self._wait.check(sender.member))

    def hear(self, sender: Sender) -> None:
        """Take messages until at least one has come."""
        while (message := self._frame(sender)) is None:
            self._fill(sender)
        self._take(sender, message)

    def hear_all(self, sender: Sender) -> None:
        """Take what has come, without waiting."""
        with contextlib.suppress(OSError):  # nothing has; what ended shows elsewhere
            sender.frames.feed(sender.socket.recv(_CHUNK))
        while (message := self._frame(sender)) is not None:
            self._take(sender, message)

    def look(self, sender: Sender, now: bool = False) -> None:
        """While memory is read: raise if aborted, too late, or the sender has left, which is looked at now and then."""
        self._wait.check(sender.member)
        at = time.monotonic()
        if now or at - self._looked >= _PEER_CHECK:
            self._looked = at
            if sender.ended():
                with contextlib.suppress(FrameError, OSError):  # its last words
                    sender.frames.feed(sender.socket.recv(_CHUNK))
                    for message in sender.frames.messages():
                        sender.bye = message.bye.reason[:1000] or sender.bye
                self._wait.check(sender.member)  # an abort of ours ends the connection too, and may have come since
                raise sender.lost()

    def _fill(self, sender: Sender) -> None:
        """Wait for bytes and take them."""
        left = self._wait.check(sender.member)
        if sender.fault is not None:
            raise sender.fault
        self._wait.poll(sender.member, sender.socket, select.POLLIN, left)
        try:
            data = sender.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as e:
            self._wait.check(sender.member)
            raise sender.lost() from e
        if not data:
            self._wait.check(sender.member)
            raise sender.lost()
        sender.frames.feed(data)

    def _frame(self, sender: Sender) -> PullMessage | None:
        try:
            return sender.frames.next()
        except FrameError as e:
            raise sender.foul(f"sent what is no message: {e}") from e

    def _take(self, sender: Sender, message: PullMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "ready":
            if message.ready.armed == sender.number:
                sender.declared.take_ready(message.ready)
        elif kind == "table":
            sender.declared.take_table(message.table, self.reading)
        elif kind == "bye":
            sender.bye = message.bye.reason[:1000]
        else:
            raise sender.foul(f"sent {kind}, which is not for a receiver")
