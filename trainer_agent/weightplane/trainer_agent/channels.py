"""The sending ends of a rank's channels: opened when first armed, never used again once aborted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from weightplane.controlplane.failpoints import hit
from weightplane.transports import registry
from weightplane.transports.base import ChannelSpec, SendChannel, Transport, TransportError
from weightplane.transports.watchdog import abort_all
from weightplane.v1 import agent_pb2, transport_pb2

from .replay import ChannelReplay, forget, newest

__all__ = ["ChannelPool", "OpenChannel", "offers_for"]

log = logging.getLogger(__name__)


def offers_for(
    member: str, device_kind: str
) -> tuple[list[transport_pb2.Rendezvous], list[agent_pb2.TransportRefusal]]:
    """What this rank offers, one entry per transport that works here; and why the others do not."""
    offers: list[transport_pb2.Rendezvous] = []
    refusals: list[agent_pb2.TransportRefusal] = []
    for name, probe in registry.available().items():
        why = "" if probe.ok else probe.reason or "it does not work here"
        if not why:
            kinds = registry.get(name).capabilities.device_kinds
            if device_kind == "cpu" and kinds and "cpu" not in kinds:
                why = f"it moves {'/'.join(sorted(kinds))} memory only, and the source's tensors are on the CPU"
        if not why:
            try:
                offers.append(registry.get(name).offer(member))
                continue
            except TransportError as e:
                why = str(e)
        refusals.append(agent_pb2.TransportRefusal(transport=name, reason=why[:1000]))
    return offers, refusals


@dataclass(frozen=True)
class OpenChannel:
    """One channel, open for sending as ``member``."""

    spec: ChannelSpec
    member: str
    transport: Transport
    channel: SendChannel

    @property
    def replicas(self) -> frozenset[str]:
        """The replicas at its other end."""
        return frozenset(r.rpartition("/")[0] for r in self.spec.receivers)


class ChannelPool:
    """This rank's channels by id. ``bind``, ``open`` and ``close`` from one thread at a time; ``abort`` from any."""

    def __init__(self, group: str, member: str) -> None:
        self._group, self._member = group, member
        self._lock = threading.Lock()
        self._bindings: dict[str, transport_pb2.ChannelBinding] = {}
        self._open: dict[str, OpenChannel] = {}
        self._dead: set[str] = set()
        self._replaced: set[str] = set()  # transports of which a channel was open that is bound no more
        self.former: list[ChannelReplay] = []  # what was last sent by channels that are bound no more

    def bind(self, bindings: Iterable[transport_pb2.ChannelBinding]) -> None:
        """What InitTransfer answered: channels that are not in it any more are closed."""
        new = {b.channel_id: b for b in bindings if self._member in b.senders}
        with self._lock:
            self._bindings = new
            stale = [self._open.pop(c) for c in list(self._open) if c not in new]
            self._dead &= new.keys()
        if stale:  # else what the last binding left is still to be followed
            self._replaced = {o.spec.transport for o in stale}
            self.former = newest(o.channel for o in stale)
        forget(o.channel for o in stale)
        for opened in stale:
            opened.channel.close()

    def reopen(self) -> None:
        """Open what takes the place of channels that were open. Raises as ``open``, which then raises again."""
        with self._lock:
            wanted = [b.channel_id for b in self._bindings.values() if b.transport in self._replaced]
            self._replaced = set()
        for channel_id in wanted:
            self.open(channel_id)

    def open(self, channel_id: str) -> OpenChannel:
        """The channel, opened now if it was not. ``TransportError`` says what is wrong."""
        with self._lock:
            binding = self._bindings.get(channel_id)
            opened = self._open.get(channel_id)
            dead = channel_id in self._dead
        if binding is None:
            raise TransportError(f"channel {channel_id} was never bound to {self._member}")
        if dead:
            raise TransportError(f"channel {channel_id} was aborted and cannot be used again")
        if opened is None:
            opened = self._make(binding)
            with self._lock:
                self._open[channel_id] = opened
        return opened

    def _make(self, b: transport_pb2.ChannelBinding) -> OpenChannel:
        spec = ChannelSpec.of(b, self._group)
        transport = registry.get(b.transport)
        hit("trainer.open.before")
        log.debug("opening channel %s by %s to %d receiver(s)", b.channel_id, b.transport, len(spec.receivers))
        return OpenChannel(spec, self._member, transport, transport.open_sender(spec, self._member))

    def release(self) -> None:
        """Let go of all memory of the source that is kept for the next update. Between updates."""
        with self._lock:
            opened = list(self._open.values())
        self._let_go(opened)
        for o in opened:
            try:
                o.channel.flush()  # nothing is on its way: it lets go of what only the channel holds
            except TransportError as e:
                log.debug("channel %s: %s", o.spec.channel_id, e)

    def _let_go(self, opened: Iterable[OpenChannel]) -> None:
        self.former, self._replaced = [], set()
        forget(o.channel for o in opened)

    def abort(self, channel_ids: Iterable[str], reason: str) -> None:
        """Abort and never use again. Any thread; returns at once."""
        with self._lock:
            self._dead.update(channel_ids)
            opened = [self._open[c] for c in channel_ids if c in self._open]
        abort_all((o.channel for o in opened), reason)

    def close(self) -> None:
        """Close all."""
        with self._lock:
            opened, self._open, self._bindings = list(self._open.values()), {}, {}
        self._let_go(opened)
        for o in opened:
            o.channel.close()
