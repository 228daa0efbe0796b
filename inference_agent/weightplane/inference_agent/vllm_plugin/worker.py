"""One vLLM worker as a worker of a replica: what it holds, its staging memory, its end of the transports' channels.

What comes waits where the model lies: in host memory, or on the worker's GPU (in place over a transport that writes no
device memory: in host memory).

Three threads meet here. The *session* thread (``session.py``) answers the agent and never blocks: it only aborts. The
*data* thread runs everything else that the agent asks, in order. vLLM's *main* thread calls ``survey`` and ``apply``
from inside vLLM's own calls, while the data thread waits for its next order: the agent asks one thing at a time.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.model import Verify
from weightplane.controlplane.core.placement import full_box
from weightplane.controlplane.core.plan import Plan
from weightplane.inference_agent.caches import Newest
from weightplane.inference_agent.engines.arena import Arena, available_bytes, staging_room
from weightplane.inference_agent.engines.base import EngineError, LocalTensors
from weightplane.inference_agent.hello import enabled_transports, worker_offers
from weightplane.inference_agent.receipts import Ledger, Sink, WorkerPlan
from weightplane.inference_agent.threads import WorkThread
from weightplane.inference_agent.transfer import Channels, LocalWorker, Worker
from weightplane.transports import registry
from weightplane.transports.base import ArmToken, ReceiveChannel, Transport, TransportError
from weightplane.transports.dtypes import dtype_of

from .landing import Landing
from .loading import load
from .stream import Stream, StreamWorker, loaded_names, window_bytes
from .surveying import checkpoint_bytes, survey
from .wire import State, channel_from, manifest_from, plan_from

__all__ = ["WorkerReplica"]

log = logging.getLogger("weightplane.vllm")

_KEPT = 4
_LATE_S = 2.0  # beyond the deadline that the agent keeps
_LEAVE_S = 4.0
_UNDER_WAY = ("is being applied", "comes in place")  # how a mix is named until it is known what came of it


class _Update:
    """The update under way here."""

    def __init__(self, update_id: str, version: int, manifest: Manifest) -> None:
        self.update_id, self.version, self.manifest = update_id, version, manifest
        self.receiver: Worker | None = None
        self.stream: Stream | None = None  # in place
        self.outcome: dict[str, Any] | None = None  # of the load


class WorkerReplica:
    """See the module text. ``model``: the live model and its config, asked anew each time (vLLM may retarget)."""

    def __init__(
        self,
        model: Callable[[], tuple[torch.nn.Module, Any]],
        device: torch.device,
        *,
        quantized: bool,
    ) -> None:
        self.life = uuid.uuid4().hex
        self.state = State()
        self.on_state: Callable[[State], None] = lambda _: None
        self._model, self._device = model, device
        self._quantized = quantized
        self._most_host: int | None = None
        self._lock = threading.Lock()
        self._manifests, self._plans, self._surveys = Newest(_KEPT), Newest(_KEPT), Newest(_KEPT)
        self._shares = Newest(2 * _KEPT)
        self._slot: tuple[str, Arena, LocalTensors] | None = None
        self._channels: dict[str, Channels] = {}
        self._transports: Mapping[str, Transport] = {}  # those that worked here when an agent asked last
        self._opened: dict[tuple[str, str], tuple[Channels, ReceiveChannel]] = {}
        self._landing = Landing(device) if device.type == "cuda" else None
        self._data = WorkThread("weightplane-data")
        if device.type == "cuda":
            self._data.submit(self._on_card)
        self._update: _Update | None = None

    def _on_card(self) -> None:
        """The data thread makes its tensors on a stream of its own: what vLLM's thread let go of on its stream, with
        kernels that still read it in the queue, is no memory to receive into."""
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    # --- any thread

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

    @property
    def landed(self) -> int:
        """Payload bytes of the update under way that are in the slot."""
        u = self._update
        return u.receiver.landed if u is not None and u.receiver is not None else 0

    def abort(self, update_id: str, reason: str) -> None:
        """Make whatever blocks in the channel leave. Returns at once."""
        u = self._update
        if u is None or update_id not in ("", u.update_id):
            return
        if u.stream is not None:
            u.stream.abort(reason)
        if u.receiver is not None:
            u.receiver.channel.abort(reason)

    def submit(self, work: Callable[[], None]) -> None:
        """Run on the data thread."""
        self._data.submit(work)

    def _tell(self, **changes: Any) -> None:
        with self._lock:
            self.state = State.of({**self.state.json(), **changes})
            state = self.state
        self.on_state(state)

    # --- the data thread: what the agent asks

    def do(self, what: str, m: dict[str, Any]) -> Any:
        """Answer one question. Raises what its work raises."""
        handler = getattr(self, f"_do_{what}", None)
        if handler is None:
            raise EngineError(f"this worker knows no {what!r}")
        return handler(m)

    def _do_offers(self, m: dict[str, Any]) -> Any:
        known = [n for n in m["transports"] if n in registry.names()]
        why = {n: "not installed beside vLLM" for n in m["transports"] if n not in known}
        self._transports, refused = enabled_transports(None)
        transports = self._transports
        usable = {n: t for n, t in transports.items() if n in known}
        offers, failed = worker_offers(m["member"], self._device.type, usable)
        why.update({n: r for n, r in refused.items() if n in known})
        return {"offers": [o.SerializeToString().hex() for o in offers], "why": {**why, **failed}}

    def _do_knows(self, m: dict[str, Any]) -> Any:
        """Whether a manifest was sent and surveyed, or a plan was sent; only the newest few are kept."""
        if "plan_id" in m:
            return {"known": m["plan_id"] in self._plans}
        return {"known": m["manifest_id"] in self._manifests and m["manifest_id"] in self._surveys}

    def _do_manifest(self, m: dict[str, Any]) -> Any:
        manifest = manifest_from(m["manifest"])
        self._manifests.pop(manifest.id, None)
        self._manifests.keep(manifest.id, manifest)
        return {}

    def _do_surveyed(self, m: dict[str, Any]) -> Any:
        """What ``survey`` found, run meanwhile by vLLM's main thread."""
        found = self._surveys.get(m["manifest_id"])
        if found is None:
            raise EngineError(f"manifest {m['manifest_id']} was not surveyed here: did vLLM pass the call on?")
        if isinstance(found, str):
            raise EngineError(found)
        manifest = self._manifests[m["manifest_id"]]
        return {
            "taken": [i for i, t in enumerate(manifest) if t.name in found.taken],
            "problems": found.problems,
            "untaken": found.untaken,
            "dropped": found.dropped,
        }

    def _do_begin(self, m: dict[str, Any]) -> Any:
        manifest = self._manifests.get(m["manifest_id"])
        if manifest is None:
            raise EngineError(f"manifest {m['manifest_id']} is not known here")
        self._forget("another update begins")
        u = _Update(m["update_id"], m["version"], manifest)
        if m["in_place"]:
            self._slot = None  # the room is for the tensors on their way
            u.stream = Stream(window_bytes(manifest, self._most_host))
        else:
            self._reserve(manifest)
        self._update = u
        return {"staging_bytes": self._slot[1].nbytes if self._slot else 0}

    def _reserve(self, manifest: Manifest) -> None:
        """Memory for every tensor that this worker takes; kept for as long as the manifest stays."""
        if self._slot is not None and self._slot[0] == manifest.id:
            return
        self._slot = None
        self._shares.clear()
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

    def _do_open(self, m: dict[str, Any]) -> Any:
        u = self._open(m["update_id"])
        plan = self._plan(m)
        member, channel = m["member"], channel_from(m["channel"])
        channels = self._channels.setdefault(m["group"], Channels(m["group"], self._transports))
        opened = channels.get(channel, member)
        self._opened[channel.channel_id, member] = (channels, opened)
        base, verify, early = opened.bytes_landed, Verify(m["verify"]), bool(m["as_they_come"])
        kinds = channels.device_kinds(channel.transport)
        if u.stream is not None:
            share = WorkerPlan(plan, u.manifest, member)
            landing = self._landing if self._device.type in kinds else None
            if landing is not None:
                u.stream.copies = True
                landing.begin(share)
            ledger = Ledger(share, u.update_id, verify, early)
            names = loaded_names(u.manifest, self._surveys[u.manifest.id].taken)
            u.receiver = StreamWorker(
                member,
                self._data,
                opened,
                share,
                base,
                ledger,
                u.stream,
                names,
                channel_id=channel.channel_id,
                landing=landing,
            )
            return {}
        assert self._slot is not None
        key = (plan.id, member, kinds)
        if key not in self._shares:
            fresh = WorkerPlan(plan, u.manifest, member)
            self._shares.keep(key, (fresh, Sink(fresh, self._slot[2], kinds)))
        share, sink = self._shares[key]
        ledger = Ledger(share, u.update_id, verify, early, sink)
        u.receiver = LocalWorker(member, self._data, opened, share, base, sink, ledger, channel_id=channel.channel_id)
        return {}

    def _plan(self, m: dict[str, Any]) -> Plan:
        if "plan" in m:
            plan = plan_from(m["plan"])
            self._plans.keep(plan.id, plan)
        found: Plan | None = self._plans.get(m["plan_id"])
        if found is None:
            raise EngineError(f"plan {m['plan_id']} is not known here")
        return found

    def _do_arm(self, m: dict[str, Any]) -> Any:
        r = self._receiver(m["update_id"])
        wanted = set(m["buckets"])
        r.armed_buckets = [b for b in r.share.buckets if b.index in wanted]
        if (stream := self._open(m["update_id"]).stream) is not None:
            stream.deadline = time.monotonic() + m["remaining_s"] + _LATE_S
        token = ArmToken(m["update_id"], m["epoch"], m["generation"])
        r.channel.arm(token, r.armed_buckets, time.monotonic() + m["remaining_s"])
        return {}

    def _do_take(self, m: dict[str, Any]) -> Any:
        r = self._receiver(m["update_id"])
        bucket = next(b for b in r.armed_buckets if b.index == m["bucket"])
        try:
            r.take(bucket)
        except TransportError:
            self._raise_load_error(m["update_id"])
            raise
        return {"landed": r.landed}

    def _raise_load_error(self, update_id: str) -> None:
        """In place a load that failed is what ended the wait for it: that is the cause to tell."""
        u = self._open(update_id)
        if u.stream is not None and u.outcome is not None and u.outcome["error"]:
            raise EngineError(u.outcome["error"], u.outcome["tensors"])

    def _do_receipt(self, m: dict[str, Any]) -> Any:
        r = self._receiver(m["update_id"])
        return {"missing": r.missing(), "elements": r.elements(), "digests": list(r.packed()), "landed": r.landed}

    def _do_streaming(self, m: dict[str, Any]) -> Any:
        """In place: answered once vLLM's main thread waits for what comes."""
        u = self._open(m["update_id"])
        if u.stream is None:
            raise EngineError(f"update {u.update_id} is not in place here")
        u.stream.wait_entered(m["timeout_s"])
        return {}

    def _do_streamed(self, m: dict[str, Any]) -> Any:
        """In place: everything came; vLLM's main thread finishes the load and leaves."""
        r = self._receiver(m["update_id"])
        assert isinstance(r, StreamWorker)
        r.finish()
        return {}

    def _do_applied(self, m: dict[str, Any]) -> Any:
        """How the load went, which vLLM's main thread ran meanwhile."""
        u = self._open(m["update_id"])
        if u.outcome is None:
            raise EngineError(f"update {u.update_id} was not loaded here: did vLLM pass the call on?")
        if u.outcome["error"]:
            raise EngineError(u.outcome["error"], u.outcome["tensors"])
        return u.outcome

    def _do_commit(self, m: dict[str, Any]) -> Any:
        u = self._open(m["update_id"])
        self._do_applied(m)
        self._tell(version=u.version, update_id=u.update_id, mixed="")
        self._update = None
        return {}

    def _do_drop(self, m: dict[str, Any]) -> Any:
        u = self._update
        if u is not None and m["update_id"] in ("", u.update_id):
            self._forget(m["reason"])
            if u.stream is not None and not u.stream.wait_over(_LEAVE_S):
                raise EngineError(f"vLLM's loaders did not leave update {u.update_id} within {_LEAVE_S} s")
        if m["wrote"]:
            self._spoil(m["reason"])
        return {}

    def _do_close_channel(self, m: dict[str, Any]) -> Any:
        """The channel of an update that ended badly: closed, not to be used again."""
        channels, channel = self._opened.pop((m["channel_id"], m["member"]), (None, None))
        if channels is not None and channel is not None:
            channels.discard([channel])
        return {}

    def _do_paused_by(self, m: dict[str, Any]) -> Any:
        self._tell(paused_by=m["holders"])
        return {}

    def _do_asleep(self, m: dict[str, Any]) -> Any:
        """What of vLLM's memory is released from now on; ``lost``: why the weights go with it. Said before it is so:
        who comes after us must never take weights that are gone for the version that they were."""
        if m["lost"]:
            self._spoil(m["lost"])
        self._tell(asleep=m["asleep"])
        return {}

    def _open(self, update_id: str) -> _Update:
        u = self._update
        if u is None or u.update_id != update_id:
            raise EngineError(f"update {update_id!r} is not open in this worker (open: {u.update_id if u else 'none'})")
        return u

    def _receiver(self, update_id: str) -> Worker:
        r = self._open(update_id).receiver
        if r is None:
            raise EngineError(f"update {update_id!r} has no channel open in this worker")
        return r

    def _forget(self, reason: str) -> None:
        u = self._update
        self._update = None
        if u is not None and u.stream is not None:
            u.stream.abort(reason)
        if u is not None and u.receiver is not None and u.outcome is None:
            log.debug("update %s ends here: %s", u.update_id, reason)

    def _spoil(self, reason: str) -> None:
        was = self.state.mixed
        self._tell(version=0, update_id="", mixed=reason if not was or was.endswith(_UNDER_WAY) else was)

    def agent_gone(self) -> None:
        """The agent's connection ended: nothing more comes. Data thread."""
        for channels in self._channels.values():
            channels.close()
        self._channels.clear()
        self._opened.clear()
        u = self._update
        if u is not None and u.stream is not None:
            u.stream.abort("the agent is gone")
            u.stream.wait_over(_LEAVE_S)
        self._update = None
        if u is not None:
            self._orphaned(u)

    def _orphaned(self, u: _Update) -> None:
        """Loaded, and nobody is left to confirm it: what it waited for does not come. Whoever sees it last says so."""
        if u.outcome is not None and self._update is not u and self.state.held.update_id != u.update_id:
            self._spoil(f"update {u.update_id} was loaded and never confirmed: its agent is gone")

    # --- vLLM's main thread

    def survey(self, manifest_id: str) -> None:
        """Find out where the manifest goes; kept for ``surveyed``. Never raises: vLLM would call the engine broken."""
        manifest = self._manifests.get(manifest_id)
        if manifest is None or manifest_id in self._surveys:
            return
        model, _ = self._model()
        try:
            found: Any = survey(model, manifest, self._device, self._quantized)
        except Exception as e:
            log.exception("manifest %s could not be surveyed", manifest_id)
            found = f"vLLM's loader could not be followed: {type(e).__name__}: {e}"
        self._surveys.keep(manifest_id, found)

    def apply(self, update_id: str) -> None:
        """Load the staged bytes into the live model; the outcome is kept for ``applied``. Never raises."""
        u = self._update
        if u is None or u.update_id != update_id or self._slot is None:
            log.error("update %s is not staged here: nothing was loaded", update_id)
            return
        self._tell(mixed=self.state.mixed or f"update {update_id} {_UNDER_WAY[0]}")
        self._load(u, self._weights(u))

    def stream(self, update_id: str) -> None:
        """In place: load what comes, until it ends or is aborted; the outcome is kept for ``applied``. Never raises."""
        u = self._update
        if u is None or u.update_id != update_id or u.stream is None or not u.stream.enter():
            log.error("update %s does not come in place here (any more): nothing was loaded", update_id)
            return
        try:
            self._load(u, self._soiling(u, u.stream))
        finally:
            u.stream.leave()

    def _soiling(self, u: _Update, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        """What comes; with the first tensor the live memory counts as mixed."""
        for n, item in enumerate(stream):
            if not n:
                self._tell(version=0, update_id="", mixed=self.state.mixed or f"update {u.update_id} {_UNDER_WAY[1]}")
            yield item

    def _load(self, u: _Update, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        model, config = self._model()
        start = time.monotonic()
        try:
            where = "vllm.load.inside" if u.stream is None else "vllm.stream.inside"
            written = load(model, config, self._device, weights, self._surveys[u.manifest.id], where)
            if self._device.type == "cuda":  # what failed on the card shows here, and the time is all of it
                torch.cuda.current_stream(self._device).synchronize()
            u.outcome = {"error": "", "tensors": [], "elements": written, "load_s": time.monotonic() - start}
            self._orphaned(u)
        except Exception as e:
            names = list(getattr(e, "tensors", ()))
            u.outcome = {"error": f"{type(e).__name__}: {e}", "tensors": names}
            self.abort(u.update_id, f"vLLM's loader failed: {e}")  # whoever receives for it
            if u.stream is not None and not u.stream.taken:
                log.info("update %s ended before the first tensor: %s", u.update_id, e)
                return
            log.exception("update %s could not be loaded; the engine holds a mix", u.update_id)
            self._spoil(f"update {u.update_id} could not be loaded: {type(e).__name__}: {str(e)[:300]}")

    def _weights(self, u: _Update) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._slot is not None
        taken = self._surveys[u.manifest.id].taken
        for i, t in enumerate(u.manifest):
            if t.name in taken:
                yield t.name, self._slot[2][i][0]
