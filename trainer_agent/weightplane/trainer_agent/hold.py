"""A rank's hold on a group: the lease under one generation, its channels, and what the coordinator has been told."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.placement import Piece, Placement
from weightplane.controlplane.core.plan import Plan
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.failpoints import hit
from weightplane.controlplane.host import host_id
from weightplane.transports import grpc_tls
from weightplane.v1 import agent_pb2, tensor_pb2, transport_pb2, update_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

from .channels import ChannelPool, offers_for
from .client import Client
from .context import Rank
from .errors import CallRefused, PublishError, RpcRefused, TrainerFenced, TrainerHeld, Unanswered
from .plans import PlanCache, manifest_pages, placement_pages
from .questions import Questions
from .sources import Source, member_name
from .stop import Stop
from .watching import Notice, Watch

__all__ = ["NEVER_GRANTED", "Hold", "HoldSettings"]

log = logging.getLogger(__name__)

#: What a coordinator whose store was lost says of our generation: nobody fenced us, so we may ask again.
NEVER_GRANTED = "was never granted"
_TRANSIENT_BUCKET = 64 << 20  # bytes of tensors, made on a GPU as they are sent, that are there at once
_KNOWN = 8  # manifests that the coordinator is taken to remember


@dataclass(frozen=True)
class HoldSettings:
    """Who asks for the hold, and how it wants to send. ``transient``: what of, is made as it is sent."""

    dial: Dial
    group: str
    trainer_id: str
    incarnation: str
    rank: int
    world_size: int
    transport: str
    bucket_bytes: int
    transient: bool
    takeover: bool
    resume_step: int | None
    helper: bool


class Hold:
    """See the module's text. One thread at a time, but for ``listener``, ``check`` and ``close``."""

    def __init__(self, settings: HoldSettings) -> None:
        self.settings = settings
        self.group = settings.group
        grpc_tls.present(settings.dial)
        self.client = Client(settings.dial)
        self.questions = Questions(self.client, settings.group)
        self.pool = ChannelPool(settings.group, member_name(settings.rank))
        self.plans = PlanCache()
        self.generation = 0
        self.epoch = 0
        self.ttl_s = 3.0
        self.choices: tuple[wt.TransportChoice, ...] = ()  # how each worker is reached, as bound last
        self.committed_step = -1
        self.listener: Callable[[update_pb2.UpdateInfo], None] | None = None
        self.request_ids: list[str] = []
        self.telling: Stop | None = None  # word of an earlier failure, still on its way to the other ranks
        self.told: list[Callable[[agent_pb2.DesiredTrainer], None]] = []  # hear what this rank should know
        self.says: Callable[[], agent_pb2.TrainerReport] | None = None  # what this rank retains
        self.welcomed: Callable[[], None] | None = None  # a session began
        self._watch: Watch | None = None
        self._over: Failure | None = None
        self._current: Stop | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Piece, ...]] = OrderedDict()  # manifests told of, and our placement
        self._device_kind = "cpu"
        self.device: int | None = None  # the trainer's GPU, as its thread had it when it took the hold
        self.offers: list[transport_pb2.Rendezvous] = []  # as InitTransfer said last
        self.manifest: Manifest | None = None  # announced last

    @property
    def bound(self) -> bool:
        """Whether the hold was granted."""
        return self.generation > 0

    def check(self) -> None:
        """Raise ``TrainerFenced`` once the hold is over."""
        if self._over is not None:
            raise TrainerFenced(self._over)

    def fenced(self, seconds: float) -> bool:
        """Whether the hold is over; word of it may take this long to come."""
        end = time.monotonic() + seconds
        while self._over is None and time.monotonic() < end:
            time.sleep(0.01)
        return self._over is not None

    # --- init and rebind ---

    def init(self, deadline: float, device_kind: str) -> None:
        """Ask for the hold, or bind again under it. Returns when every rank has called."""
        self.check()
        self._device_kind = device_kind
        if device_kind == "cuda":
            import torch

            self.device = torch.cuda.current_device()
        try:
            self.bind(deadline, Stop())
            self.questions.policy()  # remembered for a failure after which nobody answers
        except RpcRefused as e:
            if e.failure.reason is Reason.TRAINER_HELD:
                raise TrainerHeld(e.failure) from None
            if e.failure.reason is Reason.TRAINER_FENCED:
                self._over = e.failure
                raise TrainerFenced(e.failure) from None
            raise CallRefused(e.failure) from None
        except Unanswered as e:
            raise self.client.unreachable(e) from None

    def bind(self, deadline: float, stop: Stop) -> wt.InitTransferResponse:
        """One InitTransfer. Raises ``RpcRefused``, ``Unanswered``, or ``stop``'s reason."""
        try:
            answer = self._init_transfer(deadline, stop)
        except RpcRefused as e:
            if not self.generation or NEVER_GRANTED not in e.failure.message:
                raise
            log.warning("group %s: the control plane lost its store; asking for the hold anew", self.group)
            self.generation = 0
            answer = self._init_transfer(deadline, stop)
        hit("trainer.init.after")
        if answer.epoch != self.epoch:
            self._known.clear()  # another coordinator, or the same one restarted: it remembers no manifest
        self.epoch = answer.epoch
        self.ttl_s = answer.ttl_ms / 1000 or 3.0
        self.committed_step = answer.committed_step
        self.choices = tuple(answer.choices)
        self.pool.bind(answer.channels)
        for c in answer.choices:
            if not c.transport:
                why = "; ".join((c.reason, *(f"{r.transport}: {r.reason}" for r in c.refusals)))
                workers = ", ".join(map(str, c.workers))
                log.warning("group %s: replica %s, worker %s: %s", self.group, c.replica_id, workers, why)
        if answer.generation != self.generation:
            self.generation = answer.generation
            self._known.clear()
            self._start_watch()
        return answer

    def _init_transfer(self, deadline: float, stop: Stop) -> wt.InitTransferResponse:
        s = self.settings
        offers, refusals = offers_for(member_name(s.rank), self._device_kind)
        self.offers = offers
        request = wt.InitTransferRequest(
            request_id=uuid.uuid4().hex,
            group=s.group,
            trainer_id=s.trainer_id,
            incarnation=s.incarnation,
            rank=s.rank,
            world_size=s.world_size,
            generation=self.generation,
            takeover=s.takeover and not self.generation,
            host_id=host_id(),
            device_uuid=_device_uuid() if self._device_kind == "cuda" else "",
            offers=offers,
            refusals=refusals,
            transport=s.transport,
            bucket_bytes=s.bucket_bytes or self._most_at_once(),
        )
        if s.resume_step is not None:
            request.resume_step = s.resume_step
        answer: wt.InitTransferResponse = self.client.call("InitTransfer", request, deadline, stop)
        return answer

    def _most_at_once(self) -> int:
        """What a bucket may have where the trainer asked for nothing; 0: what suits each channel."""
        return _TRANSIENT_BUCKET if self.settings.transient and self._device_kind == "cuda" else 0

    def _start_watch(self) -> None:
        s = self.settings
        if self._watch is not None:
            self._watch.close()
        self._watch = Watch(
            self.client,
            s.group,
            s.incarnation,
            s.rank,
            self.generation,
            self._hear,
            helper=s.helper,
            told=self._told,
            says=self.says,
            welcomed=self.welcomed,
        )
        self._watch.start()

    def report(self) -> None:
        """Tell the coordinator what this rank retains now. Any thread."""
        watch = self._watch
        if watch is not None:
            watch.report()

    def plan(self, plan_id: str, manifest: Manifest, deadline: float) -> Plan:
        """A plan that is no update's of ours. Raises ``RpcRefused``, ``Unanswered``, ``PlanError``. Any thread."""
        return PlanCache().get(plan_id, manifest, self._pages(plan_id, deadline, None))

    def fetch(self, plan_id: str, deadline: float, stop: Stop) -> None:
        """A plan that the next update may come by, if its manifest is the last one's. Raises as ``plan``, or ``stop``'s
        reason."""
        if self.manifest is not None:
            self.plans.get(plan_id, self.manifest, self._pages(plan_id, deadline, stop))

    def _pages(self, plan_id: str, deadline: float, stop: Stop | None) -> Callable[[int], tensor_pb2.PlanPage]:
        def page(n: int) -> tensor_pb2.PlanPage:
            request = wt.GetPlanRequest(group=self.group, plan_id=plan_id, page=n)
            answer: wt.GetPlanResponse = self.client.call("GetPlan", request, deadline, stop)
            return answer.page

        return page

    def _told(self, message: agent_pb2.DesiredTrainer) -> None:
        for hear in self.told:
            hear(message)

    def _hear(self, notice: Notice) -> None:
        """The watch thread: fencing and the fate of updates."""
        with self._lock:
            listener, stop = self.listener, self._current
            if notice.over is not None and self._over is None:
                self._over = notice.over
        if notice.over is not None and stop is not None:
            stop.set(TrainerFenced(notice.over))
        elif notice.update is not None and listener is not None:
            listener(notice.update)

    def listen(self, listener: Callable[[update_pb2.UpdateInfo], None] | None, stop: Stop | None) -> None:
        """Hear of updates from now on; what was heard last is told at once."""
        with self._lock:
            self.listener, self._current = listener, stop
        watch = self._watch
        if watch is not None and listener is not None and stop is not None:
            if self._over is not None:
                stop.set(TrainerFenced(self._over))
            elif watch.latest.update is not None:
                listener(watch.latest.update)

    def place(self, manifest: Manifest, placement: Placement, deadline: float) -> None:
        """Say what this rank holds of a manifest that the coordinator knows. Raises ``RpcRefused``, ``Unanswered``. Any
        thread."""
        for part in placement_pages(placement, manifest, self.group, self.generation, self.settings.rank):
            self.client.call("PutPlacement", part, deadline)

    # --- manifests ---

    def announce(self, manifest: Manifest, source: Source, deadline: float, stop: Stop) -> None:
        """See that the coordinator knows the manifest and what this rank holds of it."""
        rank = self.settings.rank
        self.manifest = manifest
        placement = source.placement(rank)
        placed = self._known.get(manifest.id)
        if placed == placement.pieces:
            self._known.move_to_end(manifest.id)
            return
        if placed is None:
            for page in manifest_pages(manifest, self.group, self.generation):
                answer: wt.PutManifestResponse = self.client.call("PutManifest", page, deadline, stop)
                if answer.complete:
                    break
        for part in placement_pages(placement, manifest, self.group, self.generation, rank):
            self.client.call("PutPlacement", part, deadline, stop)
        self._known[manifest.id] = placement.pieces
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    def knows(self, manifest_id: str) -> bool:
        """Whether the coordinator was told of it."""
        return manifest_id in self._known

    def forget(self, manifest_id: str) -> None:
        """The coordinator does not know it (any more)."""
        self._known.pop(manifest_id, None)

    def rank(self) -> Rank:
        """This rank, for an attempt."""
        s = self.settings
        watch = self._watch
        return Rank(
            self.client,
            s.group,
            s.rank,
            s.world_size,
            self.generation,
            self.ttl_s,
            self.pool,
            self.plans,
            watch.progress if watch is not None else lambda n: None,
            self.request_ids,
        )

    def close(self) -> None:
        """Give up the hold. What fails here is logged: the lease ends by itself."""
        if self.telling is not None:
            self.telling.set(PublishError(Failure(Reason.ABORTED_BY_CALLER, "closed")))
        if self.bound and self._over is None:
            request = wt.CloseTransferRequest(
                request_id=uuid.uuid4().hex, group=self.group, generation=self.generation, rank=self.settings.rank
            )
            try:
                self.client.call("CloseTransfer", request, time.monotonic() + 2.0)
            except (RpcRefused, Unanswered) as e:
                log.info("group %s: the hold was not given up: %s", self.group, e)
        if self._watch is not None:
            self._watch.close()
        self.pool.close()
        self.client.close()
        grpc_tls.withdraw(self.settings.dial)


def _device_uuid() -> str:
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
