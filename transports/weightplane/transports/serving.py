"""Sending from a retained copy to replicas that are caught up: a thread for each member of ours in each catch-up.

The channel is opened and armed as soon as a catch-up is ordered, sends once it may, begins no bucket while it is held
back, and is aborted when it is ordered no more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.failpoints import hit
from weightplane.v1 import agent_pb2

from .base import ArmToken, ChannelSpec, SendChannel, Transport
from .buckets import SourceSpans
from .retained import RetainedCopy, Retainer

__all__ = ["Order", "Serving", "order_of"]

log = logging.getLogger(__name__)

_DEADLINE_S = 3600.0  # the coordinator ends what takes too long: it may have to wait for updates


@dataclass(frozen=True)
class Order:
    """One catch-up to send, as the coordinator asks for it."""

    catch_up_id: str
    held: Held
    plan_id: str
    spec: ChannelSpec
    epoch: int
    generation: int
    go: bool
    hold: bool


def order_of(m: agent_pb2.ServeOrder, group: str) -> Order:
    """An order from the contract's message."""
    held = Held(m.held.version, m.held.update_id)
    return Order(m.catch_up_id, held, m.plan_id, ChannelSpec.of(m.binding, group), m.epoch, m.generation, m.go, m.hold)


class _Sending:
    """One catch-up being sent."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._changed = threading.Condition()
        self._over = False
        self.failed = False
        self._channels: list[SendChannel] = []

    def told(self, order: Order) -> None:
        """The newest order."""
        with self._changed:
            self.order = order
            self._changed.notify_all()

    def end(self) -> None:
        """It is ordered no more."""
        with self._changed:
            self._over = True
            channels = list(self._channels)
            self._changed.notify_all()
        for channel in channels:
            channel.abort("the catch-up is over")

    def add(self, channel: SendChannel) -> None:
        with self._changed:
            self._channels.append(channel)
            over = self._over
        if over:
            channel.abort("the catch-up is over")

    @property
    def over(self) -> bool:
        with self._changed:
            return self._over

    def may_send(self) -> bool:
        """Wait until a bucket may be begun; False if it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or (self.order.go and not self.order.hold))
            return not self._over


class Serving:
    """Carries out a member's orders. ``orders`` and ``close`` return at once; any thread.

    ``transport`` gives an enabled transport by name, ``plan`` fetches one; ``failed`` is told, from a thread of ours,
    which catch-up cannot be sent and why. ``mine``: our members.
    """

    def __init__(
        self,
        group: str,
        mine: Sequence[str],
        retainer: Retainer,
        transport: Callable[[str], Transport],
        plan: Callable[[str, Manifest], Plan],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._group, self._mine, self._retainer = group, frozenset(mine), retainer
        self._transport, self._plan, self._failed = transport, plan, failed
        self._lock = threading.Lock()
        self._under_way: dict[str, _Sending] = {}

    def orders(self, orders: Sequence[Order]) -> None:
        """The whole list as it is now."""
        named = {o.catch_up_id: o for o in orders}
        with self._lock:
            gone = [self._under_way.pop(k) for k in list(self._under_way) if k not in named]
            fresh = {k: _Sending(o) for k, o in named.items() if k not in self._under_way}
            known = {k: self._under_way[k] for k in named if k in self._under_way}
            self._under_way.update(fresh)
        for sending in gone:
            sending.end()
        for k, sending in known.items():
            sending.told(named[k])
        for sending in fresh.values():
            threading.Thread(target=self._serve, args=(sending,), name="weightplane-catch-up", daemon=True).start()

    def close(self) -> None:
        """End all."""
        self.orders(())

    def _serve(self, sending: _Sending) -> None:
        order = sending.order
        copy = self._retainer.read(order.held)
        try:
            if copy is None:
                found = self._retainer.get()
                what = f"version {found.held.version}" if found is not None else "nothing"
                raise LookupError(f"a copy of version {order.held.version} was to be sent, and {what} is retained")
            self._send_all(sending, copy)
        except BaseException as e:
            self._fail(sending, e)
        finally:
            if copy is not None:
                copy.done()

    def _send_all(self, sending: _Sending, copy: RetainedCopy) -> None:
        order = sending.order
        plan = self._plan(order.plan_id, copy.manifest)
        members = [m for m in order.spec.senders if m in self._mine]
        began = time.monotonic()
        others = [
            threading.Thread(target=self._guarded, args=(sending, partial(self._send, sending, copy, plan, m)))
            for m in members[1:]
        ]
        for thread in others:
            thread.start()
        try:
            for member in members[:1]:
                self._send(sending, copy, plan, member)
        finally:
            if sending.failed:
                sending.end()
            for thread in others:
                thread.join()
        if not sending.over and not sending.failed:
            extra = {"group": self._group, "update_id": order.catch_up_id, "version": order.held.version}
            seconds = time.monotonic() - began
            log.info("catch-up %s: %d bytes sent in %.2f s", order.catch_up_id, plan.nbytes, seconds, extra=extra)

    def _guarded(self, sending: _Sending, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self._fail(sending, e)

    def _fail(self, sending: _Sending, error: BaseException) -> None:
        if sending.over or sending.failed:
            return  # ended by its abort, or told already
        sending.failed = True
        sending.end()
        log.warning("catch-up %s cannot be sent: %s", sending.order.catch_up_id, error, extra={"group": self._group})
        self._failed(sending.order.catch_up_id, error)

    def _send(self, sending: _Sending, copy: RetainedCopy, plan: Plan, member: str) -> None:
        order = sending.order
        transport = self._transport(order.spec.transport)
        channel = transport.open_sender(order.spec, member)
        try:
            sending.add(channel)
            keep = not transport.capabilities.buffered
            source = SourceSpans(plan, copy.manifest, member, copy.locals(member), keep=keep)
            token = ArmToken(order.catch_up_id, order.epoch, order.generation)
            channel.arm(token, source.buckets, time.monotonic() + _DEADLINE_S)
            for bucket in source.buckets:
                if not sending.may_send():
                    return
                hit("serve.bucket")
                channel.send(bucket, source.spans(bucket))
            channel.flush()
        finally:
            channel.close()
