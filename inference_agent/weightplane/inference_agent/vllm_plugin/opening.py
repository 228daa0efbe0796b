"""Where an update's bytes go in a vLLM worker, and its end of the transports' channels. Runs on the data thread.

Staged: to a slot where the model lies: in host memory, or on the worker's GPU. In place: straight into live memory
where the way past vLLM's loaders is known (``directly``), else tensor by tensor to those loaders (``stream``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import Channel
from weightplane.controlplane.core.placement import full_box
from weightplane.controlplane.core.plan import Bucket, Plan
from weightplane.controlplane.core.states import Verify
from weightplane.inference_agent.caches import Newest
from weightplane.inference_agent.engines.arena import Arena, available_bytes, staging_room
from weightplane.inference_agent.engines.base import EngineError, LocalTensors
from weightplane.inference_agent.receipts import Ledger, RegionMemory, WorkerPlan
from weightplane.inference_agent.shares import Shares
from weightplane.inference_agent.transfer import Channels, LocalWorker, Worker
from weightplane.transports.base import ReceiveChannel, Transport
from weightplane.transports.dtypes import dtype_of

from .directly import DirectMap
from .held import KEPT, UNDER_WAY, Holder, Update
from .landing import Landing
from .stream import Stream, StreamWorker, loaded_names, window_bytes
from .surveying import Survey, checkpoint_bytes
from .wire import channel_from, plan_from

__all__ = ["DirectWorker", "Opening"]

log = logging.getLogger("weightplane.vllm")


@dataclass
class DirectWorker(LocalWorker):
    """Receives into live memory, which counts as mixed before the first byte can come. ``soil`` says so."""

    soil: Callable[[], None] = field(kw_only=True)

    def take(self, bucket: Bucket) -> None:
        """See ``Worker``."""
        self.soil()
        super().take(bucket)

    def ahead(self, bucket: Bucket) -> None:
        """See ``Worker``."""
        self.soil()
        super().ahead(bucket)


class Opening(Holder):
    """See the module text."""

    def __init__(
        self,
        model: Callable[[], tuple[torch.nn.Module, Any]],
        device: torch.device,
        *,
        quantized: bool,
    ) -> None:
        super().__init__(model, device, quantized=quantized)
        self._most_host: int | None = None
        self._shares, self._live = Shares(2 * KEPT), Newest(2 * KEPT)
        self._slot: tuple[str, Arena, LocalTensors] | None = None
        self._channels: dict[str, Channels] = {}
        self._transports: Mapping[str, Transport] = {}  # those that worked here when an agent asked last
        self._opened: dict[tuple[str, str], tuple[Channels, ReceiveChannel]] = {}
        self._landing = Landing(device) if device.type == "cuda" else None

    # --- memory

    def limit_host(self, nbytes: int | None) -> None:
        """The most host memory that staging may take."""
        self._most_host = nbytes

    def staging_refusal(self) -> str:
        """Why there is no room for a copy of the model, as far as can be said before a manifest is known."""
        model, _ = self._model()
        need = checkpoint_bytes(model)
        if self._device.type == "cuda":
            room = staging_room(self._device)
            if self._slot is None and need > room:
                return f"staging needs about {need} bytes of {self._device}, {room} are left to it"
            return ""
        if self._most_host is not None and need > self._most_host:
            return f"staging needs about {need} bytes of host memory, the limit is {self._most_host}"
        free = available_bytes()
        if free is not None and need > free:
            return f"staging needs about {need} bytes of host memory, {free} are available"
        return ""

    def _do_begin(self, m: dict[str, Any]) -> Any:
        manifest = self._manifests.get(m["manifest_id"])
        if manifest is None:
            raise EngineError(f"manifest {m['manifest_id']} is not known here")
        self._forget("another update begins")
        u = Update(m["update_id"], m["version"], manifest)
        u.direct, u.why = self._way(manifest, m["in_place"], m.get("direct", True))
        if m["in_place"]:
            self._drop_slot()  # the room is for the tensors on their way
            u.stream = Stream(window_bytes(manifest, None if u.direct is not None else self._most_host))
        else:
            self._reserve(manifest)
        self._update = u
        return {"direct": u.direct is not None, "why": u.why}

    def _way(self, manifest: Manifest, in_place: bool, wanted: bool) -> tuple[DirectMap | None, str]:
        """The way past vLLM's loaders, or why it is not taken."""
        found: Survey | None = self._surveys.get(manifest.id)
        if found is None or isinstance(found, str):
            return None, "it was not surveyed"
        if found.direct is None or not wanted:
            return None, found.indirect if wanted else "direct=false"
        if not found.direct.proven:
            return None, "the first full load of a manifest shows that the recorded map is right"
        if in_place and found.direct.in_place_refusal:
            return None, found.direct.in_place_refusal
        if in_place and self._slept:
            return None, "its memory slept: what a transport knows of it may be stale"
        return found.direct, ""

    def _drop_slot(self) -> None:
        if self._slot is None:
            return
        self._slot = None
        self._shares.clear()
        for found in self._surveys.values():
            if isinstance(found, Survey) and found.direct is not None:
                found.direct.forget_slot()

    def _reserve(self, manifest: Manifest) -> None:
        """Memory for every tensor that this worker takes; kept for as long as the manifest stays."""
        if self._slot is not None and self._slot[0] == manifest.id:
            return
        self._drop_slot()
        found = self._surveys[manifest.id]
        roots = {manifest.root(i) for i, t in enumerate(manifest) if t.name in found.taken}
        like = {
            i: torch.empty(1, dtype=dtype_of(manifest.tensors[i].dtype), device=self._device) for i in sorted(roots)
        }
        shapes = [like[i].as_strided(manifest.tensors[i].shape, [0] * len(manifest.tensors[i].shape)) for i in like]
        arena = Arena(shapes, self._most_host if self._device.type == "cpu" else None)
        at = dict(zip(like, arena.staged, strict=True))
        targets = {
            i: (at[manifest.root(i)], full_box(t.shape)) for i, t in enumerate(manifest) if manifest.root(i) in at
        }
        self._slot = (manifest.id, arena, targets)

    # --- channels

    def _do_open(self, m: dict[str, Any]) -> Any:
        u = self._open(m["update_id"])
        plan = self._plan(m)
        member, channel = m["member"], channel_from(m["channel"])
        channels = self._channels.setdefault(m["group"], Channels(m["group"], self._transports))
        opened = channels.get(channel, member)
        self._opened[channel.channel_id, member] = (channels, opened)
        u.verify = Verify(m["verify"])
        kinds = channels.device_kinds(channel.transport)
        if u.stream is not None and u.direct is None:
            u.receiver = self._streaming(u, u.stream, plan, member, channel, opened, kinds, bool(m["as_they_come"]))
        else:
            u.receiver = self._landing_in(u, plan, member, channel, opened, kinds, bool(m["as_they_come"]))
        return {}

    def _streaming(
        self,
        u: Update,
        stream: Stream,
        plan: Plan,
        member: str,
        channel: Channel,
        opened: ReceiveChannel,
        kinds: frozenset[str],
        early: bool,
    ) -> Worker:
        """In place by vLLM's loaders."""
        share = WorkerPlan(plan, u.manifest, member)
        landing = self._landing if self._device.type in kinds else None
        if landing is not None:
            stream.copies = True
            landing.begin(share)
        found: Survey = self._surveys[u.manifest.id]
        asked = share.hashed(u.update_id, u.verify) if u.verify is not Verify.FULL else None
        if found.direct is not None and not found.direct.proven and not found.direct.in_place_refusal:
            ledger, u.proves = Ledger(share, u.update_id, Verify.FULL, True), True  # whatever level is asked
        else:
            ledger, asked = Ledger(share, u.update_id, u.verify, early), None
        names = loaded_names(u.manifest, found.taken)
        at, base = channel.channel_id, opened.bytes_landed
        return StreamWorker(
            member, self._data, opened, share, base, ledger, stream, names, channel_id=at, landing=landing, asked=asked
        )

    def _landing_in(
        self,
        u: Update,
        plan: Plan,
        member: str,
        channel: Channel,
        opened: ReceiveChannel,
        kinds: frozenset[str],
        early: bool,
    ) -> Worker:
        """Into the slot, or (in place) into live memory."""
        in_place = u.stream is not None

        def targets() -> LocalTensors:
            if in_place:
                assert u.direct is not None
                return u.direct.live
            assert self._slot is not None
            return self._slot[2]

        where = u.direct if in_place else None
        share, sink = self._shares.get(plan, u.manifest, member, kinds, where, targets)
        ledger = Ledger(share, u.update_id, u.verify, early, sink, untouched=in_place)
        at, base = channel.channel_id, opened.bytes_landed
        if not in_place:
            return LocalWorker(member, self._data, opened, share, base, sink, ledger, channel_id=at)
        return DirectWorker(
            member, self._data, opened, share, base, sink, ledger, channel_id=at, soil=lambda: self._soil(u)
        )

    def _soil(self, u: Update) -> None:
        if u.before is None:
            u.before = self.state
            self._tell(version=0, update_id="", mixed=self.state.mixed or f"update {u.update_id} {UNDER_WAY[1]}")

    def _plan(self, m: dict[str, Any]) -> Plan:
        if "plan" in m:
            plan = plan_from(m["plan"])
            self._plans.keep(plan.id, plan)
        found: Plan | None = self._plans.get(m["plan_id"])
        if found is None:
            raise EngineError(f"plan {m['plan_id']} is not known here")
        return found

    def _do_close_channel(self, m: dict[str, Any]) -> Any:
        """The channel of an update that ended badly: closed, not to be used again."""
        channels, channel = self._opened.pop((m["channel_id"], m["member"]), (None, None))
        if channels is not None and channel is not None:
            channels.discard([channel])
        return {}

    # --- what live memory shows

    def _read_back(self, u: Update, found: DirectMap) -> None:
        """LIVE evidence: live memory, hashed, against what came. ``EngineError`` names what differs."""
        if u.verify is Verify.OFF:
            return
        r = u.receiver
        assert isinstance(r, LocalWorker)
        cut = found.cut
        if cut and self._slot is not None:
            wrong = found.differs(self._slot[2])
            if wrong:
                text = f"live memory is not what was received, in {len(wrong)} tensor(s): {', '.join(wrong[:5])}"
                raise EngineError(text, wrong)
            return
        r.ledger.read_back(self._regions(r.share, found))

    def _regions(self, share: WorkerPlan, found: DirectMap) -> RegionMemory:
        key = (share.reception, share.member)
        known = self._live.get(key)
        if known is None or known[0] is not found:
            known = (found, RegionMemory(share, found.live))
            self._live.keep(key, known)
        return known[1]

    def _prove(self, u: Update) -> None:
        """vLLM's loaders have run: is live memory what the recorded map says? If not, the map is never used."""
        survey = self._surveys.get(u.manifest.id)
        found = survey.direct if isinstance(survey, Survey) else None
        if found is None or found.proven:
            return
        try:
            wrong = self._compared(u, found)
        except Exception as e:  # it was loaded by vLLM: that stands
            log.exception("live memory could not be compared with what was received")
            wrong = [f"it could not be looked at ({type(e).__name__}: {e}): something"]
        if wrong:
            self._distrust(survey, f"{wrong[0]} is not in live memory as it was recorded to be loaded")
        elif wrong is not None:
            found.proven = True
            log.info("manifest %s: from now on past vLLM's loaders", u.manifest.id)

    def _compared(self, u: Update, found: DirectMap) -> list[str] | None:
        """What is not in live memory as the map says; None where the bytes to compare with are not at hand."""
        if u.stream is None:
            return found.differs(self._slot[2]) if self._slot is not None else None
        r = u.receiver
        if not isinstance(r, StreamWorker) or not u.proves:
            return None
        try:
            r.ledger.read_back(self._regions(r.share, found))
        except EngineError as e:
            return list(e.tensors)
        return found.unfilled()

    def _distrust(self, survey: Any, why: str) -> None:
        """Never use a map again; all goes through vLLM's loaders."""
        log.warning("weightplane: past vLLM's loaders no more: %s", why)
        if isinstance(survey, Survey):
            survey.direct, survey.indirect = None, why
        self._live.clear()
        self._shares.clear()
