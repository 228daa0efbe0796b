"""What vLLM's main thread does for an update, from inside vLLM's own calls: survey a manifest, apply a slot, stand by.

Nothing here raises into vLLM, which would call the engine broken: how it went is kept for the agent's question.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch

from weightplane.controlplane import failpoints

from .directly import DirectMap
from .held import UNDER_WAY, Update
from .loading import load
from .opening import Opening
from .restoring import restore
from .stream import Stream
from .surveying import Survey, survey

__all__ = ["Applying"]

log = logging.getLogger("weightplane.vllm")


class Applying(Opening):
    """See the module text."""

    def survey(self, manifest_id: str) -> None:
        """Find out where the manifest goes; kept for ``surveyed``."""
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
        """Load the staged bytes into the live model; the outcome is kept for ``applied``."""
        u = self._update
        if u is None or u.update_id != update_id or self._slot is None:
            log.error("update %s is not staged here: nothing was loaded", update_id)
            return
        self._tell(mixed=self.state.mixed or f"update {update_id} {UNDER_WAY[0]}")
        if u.direct is not None:
            u.why = self._unusable(u, u.direct)
            if not u.why:
                self._copy(u, u.direct)
                return
            u.direct = None
        self._load(u, self._weights(u))

    def stream(self, update_id: str) -> None:
        """In place: be here while bytes come, so that no pass runs; unless they go past the loaders, load them.

        Until it ends or is aborted; the outcome is kept for ``applied``.
        """
        u = self._update
        stream = u.stream if u is not None and u.update_id == update_id else None
        if u is None or stream is None:
            log.error("update %s does not come in place here (any more): nothing was loaded", update_id)
            return
        if u.direct is not None and (why := self._unusable(u, u.direct)):
            stream.abort(f"{why}: nothing was written; the next update goes through vLLM's loaders")
        if not stream.enter():
            log.error("update %s was aborted: nothing was loaded", update_id)
            return
        try:
            if u.direct is not None:
                self._stand_by(u, stream, u.direct)
            else:
                self._load(u, self._soiling(u, stream))
        finally:
            stream.leave()

    def _unusable(self, u: Update, found: DirectMap) -> str:
        """Why live memory cannot be written past vLLM's loaders after all. The device has nothing to do afterwards."""
        try:
            model, _ = self._model()
            restore(model)  # another client's load that was left half done: live tensors come back
            moved = found.moved()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except Exception as e:
            log.exception("update %s: live memory could not be looked at", u.update_id)
            return f"live memory could not be looked at: {type(e).__name__}: {e}"
        if not moved:
            return ""
        why = f"{moved} was replaced or moved since the manifest was looked at"
        self._distrust(self._surveys.get(u.manifest.id), why)
        return why

    def _stand_by(self, u: Update, stream: Stream, found: DirectMap) -> None:
        start = time.monotonic()
        try:
            for name, _ in stream:
                raise RuntimeError(f"{name!r} was handed over, and this update goes past the loaders")
            found.fill()
            self._finish()
            u.outcome = _done(found.elements, start, "direct")
            self._orphaned(u)
        except Exception as e:  # whoever receives is told; what came of live memory is found out once it has left
            u.outcome = {"error": f"{type(e).__name__}: {e}", "tensors": []}
            self.abort(u.update_id, str(e))
            log.info("update %s ended before it was whole: %s", u.update_id, e)

    def _copy(self, u: Update, found: DirectMap) -> None:
        assert self._slot is not None
        start = time.monotonic()
        try:
            for _ in found.copies_from(self._slot[2]).steps():
                failpoints.hit("vllm.load.inside")
            found.fill()
            self._finish()
            u.outcome = _done(found.elements, start, "direct")
            self._orphaned(u)
        except Exception as e:
            self._failed(u, e)

    def _load(self, u: Update, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        model, config = self._model()
        start = time.monotonic()
        try:
            where = "vllm.load.inside" if u.stream is None else "vllm.stream.inside"
            written = load(model, config, self._device, weights, self._surveys[u.manifest.id], where)
            self._finish()
            u.outcome = {**_done(written, start, "loaders"), "why": u.why}
            self._orphaned(u)
        except Exception as e:
            self._failed(u, e)

    def _finish(self) -> None:
        """What failed on the card shows here, and the time of the load is all of it."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _failed(self, u: Update, e: Exception) -> None:
        u.outcome = {"error": f"{type(e).__name__}: {e}", "tensors": list(getattr(e, "tensors", ()))}
        self.abort(u.update_id, f"vLLM's loader failed: {e}")  # whoever receives for it
        if u.stream is not None and not u.stream.taken:
            log.info("update %s ended before the first tensor: %s", u.update_id, e)
            return
        log.exception("update %s could not be loaded; the engine holds a mix", u.update_id)
        self._spoil(f"update {u.update_id} could not be loaded: {type(e).__name__}: {str(e)[:300]}")

    def _soiling(self, u: Update, stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        """What comes; with the first tensor the live memory counts as mixed."""
        for n, item in enumerate(stream):
            if not n:
                self._tell(version=0, update_id="", mixed=self.state.mixed or f"update {u.update_id} {UNDER_WAY[1]}")
            yield item

    def _weights(self, u: Update) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._slot is not None
        found: Survey = self._surveys[u.manifest.id]
        for i, t in enumerate(u.manifest):
            if t.name in found.taken:
                yield t.name, self._slot[2][i][0]


def _done(elements: int, start: float, way: str) -> dict[str, Any]:
    return {
        "error": "",
        "tensors": [],
        "elements": elements,
        "load_s": time.monotonic() - start,
        "way": way,
        "why": "",
        "read_back": False,
    }
