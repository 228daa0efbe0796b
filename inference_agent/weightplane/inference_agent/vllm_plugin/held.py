"""What a vLLM worker holds: its state, its model, its data thread, the update under way. See ``worker``."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any

import torch

from weightplane.controlplane.core.manifest import Manifest
from weightplane.controlplane.core.states import Verify
from weightplane.inference_agent.caches import Newest
from weightplane.inference_agent.engines.base import EngineError
from weightplane.inference_agent.threads import WorkThread
from weightplane.inference_agent.transfer import Worker

from .directly import DirectMap
from .running import Run
from .stream import Stream
from .wire import State

__all__ = ["KEPT", "UNDER_WAY", "Holder", "Update"]

log = logging.getLogger("weightplane.vllm")

KEPT = 4
UNDER_WAY = ("is being applied", "comes in place")  # how a mix is named until it is known what came of it


class Update:
    """The update under way here. ``direct``: the way past vLLM's loaders if it goes there, else ``why`` not."""

    def __init__(self, update_id: str, version: int, manifest: Manifest) -> None:
        self.update_id, self.version, self.manifest = update_id, version, manifest
        self.verify = Verify.OFF
        self.receiver: Worker | None = None
        self.run: Run | None = None  # what is armed
        self.stream: Stream | None = None  # in place
        self.outcome: dict[str, Any] | None = None  # of the load
        self.direct: DirectMap | None = None
        self.why = ""
        self.before: State | None = None  # in place and direct: what it was before the first byte could come
        self.proves = False  # in place by the loaders: all that comes is hashed, to be compared with live memory
        self.looked = False  # live memory was looked at after the load


class Holder:
    """``model``: the live model and its config, asked anew each time (vLLM may retarget)."""

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
        self._lock = threading.Lock()
        self._manifests, self._plans, self._surveys = Newest(KEPT), Newest(KEPT), Newest(KEPT)
        self._slept = False  # live memory was released, and may be back at the same addresses
        self._data = WorkThread("weightplane-data")
        if device.type == "cuda":
            self._data.submit(self._on_card)
        self._update: Update | None = None

    def _on_card(self) -> None:
        """The data thread makes its tensors on a stream of its own: what vLLM's thread let go of on its stream, with
        kernels that still read it in the queue, is no memory to receive into."""
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    # --- any thread

    @property
    def landed(self) -> int:
        """Payload bytes of the update under way that are in place."""
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

    def leave(self, update_id: str, reason: str) -> None:
        """The update is about to be dropped: end what is received without an order. Returns at once."""
        u = self._update
        if u is not None and u.run is not None and u.run.going:
            self.abort(update_id, reason)

    def submit(self, work: Callable[[], None]) -> None:
        """Run on the data thread."""
        self._data.submit(work)

    def _tell(self, **changes: Any) -> None:
        with self._lock:
            self.state = State.of({**self.state.json(), **changes})
            state = self.state
            self._slept = self._slept or (bool(state.asleep) and self._device.type == "cuda")
        self.on_state(state)

    # --- the data thread

    def _open(self, update_id: str) -> Update:
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
        if u is None:
            return
        if u.stream is not None:
            u.stream.abort(reason)
        if u.receiver is not None and u.outcome is None:
            log.debug("update %s ends here: %s", u.update_id, reason)
        if u.before is not None and self.state.held.update_id != u.update_id:
            self._settle(u, reason)

    def _settle(self, u: Update, reason: str) -> None:
        """In place and direct, and it ends before it is confirmed: live memory is a mix, unless not one byte came."""
        before, u.before = u.before, None
        assert before is not None
        if u.receiver is not None and not u.receiver.landed:
            self._tell(version=before.version, update_id=before.update_id, mixed=before.mixed)
        else:
            self._spoil(f"update {u.update_id} ended in place: {reason}")

    def _spoil(self, reason: str) -> None:
        was = self.state.mixed
        self._tell(version=0, update_id="", mixed=reason if not was or was.endswith(UNDER_WAY) else was)

    def _orphaned(self, u: Update) -> None:
        """Loaded, and nobody is left to confirm it: what it waited for does not come. Whoever sees it last says so."""
        if u.outcome is not None and self._update is not u and self.state.held.update_id != u.update_id:
            self._spoil(f"update {u.update_id} was loaded and never confirmed: its agent is gone")
