"""One vLLM worker as a worker of a replica: what it holds, its staging memory, its end of the transports' channels.

Three threads meet here. The *session* thread (``session.py``) answers the agent and never blocks: it only aborts. The
*data* thread runs everything else that the agent asks, in order (here, and ``opening``). vLLM's *main* thread calls
``survey``, ``apply`` and ``stream`` (``applying``) from inside vLLM's own calls, while the data thread waits for its
next order, or receives what the main thread waits for: the agent asks one thing at a time.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from weightplane.controlplane.core.states import Verify
from weightplane.inference_agent.engines.base import EngineError, WorkerDevice
from weightplane.inference_agent.hello import enabled_transports, worker_offers
from weightplane.transports import registry
from weightplane.transports.base import ArmToken, TransportError

from .applying import Applying
from .held import Update
from .opening import DirectWorker
from .running import Run
from .stream import StreamWorker
from .wire import manifest_from

__all__ = ["WorkerReplica"]

log = logging.getLogger("weightplane.vllm")

_LATE_S = 2.0  # beyond the deadline that the agent keeps
_LEAVE_S = 4.0


class WorkerReplica(Applying):
    """See the module text. Here: what the agent asks, on the data thread."""

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
        mine = WorkerDevice(self._device.type)  # which one: this thread's (``_on_card``)
        offers, failed = worker_offers(m["member"], mine, usable)
        why.update({n: r for n, r in refused.items() if n in known})
        return {"offers": [o.SerializeToString().hex() for o in offers], "why": {**why, **failed}}

    # --- what a manifest is

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
            "indirect": found.indirect,
        }

    # --- an update

    def _do_arm(self, m: dict[str, Any]) -> Any:
        u, r = self._open(m["update_id"]), self._receiver(m["update_id"])
        u.run = None
        wanted = set(m["buckets"])
        r.armed_buckets = [b for b in r.share.buckets if b.index in wanted]
        if u.stream is not None:
            u.stream.deadline = time.monotonic() + m["remaining_s"] + _LATE_S
        token = ArmToken(m["update_id"], m["epoch"], m["generation"])
        r.channel.arm(token, r.armed_buckets, time.monotonic() + m["remaining_s"])
        u.run = Run(r, self._data.submit, lambda run: self._update is u and u.run is run)
        return {}

    def _do_take(self, m: dict[str, Any]) -> Any:
        """``done``: this bucket and those after it that are in place already, which need no order."""
        u, r = self._open(m["update_id"]), self._receiver(m["update_id"])
        if u.run is None:
            raise EngineError(f"update {u.update_id}: nothing is armed in this worker")
        try:
            done = u.run.order(m["bucket"])
        except TransportError:
            self._raise_load_error(m["update_id"])
            raise
        return {"landed": r.landed, "done": done}

    def _raise_load_error(self, update_id: str) -> None:
        """In place a load that failed is what ended the wait for it: that is the cause to tell."""
        u = self._open(update_id)
        if u.direct is None and u.stream is not None and u.outcome is not None and u.outcome["error"]:
            raise EngineError(u.outcome["error"], u.outcome["tensors"])

    def _do_receipt(self, m: dict[str, Any]) -> Any:
        """``digests`` is None as long as they are still to be read from live memory."""
        u, r = self._open(m["update_id"]), self._receiver(m["update_id"])
        later = isinstance(r, DirectWorker) and not u.looked
        digests = None if later else list(r.packed())
        return {"missing": r.missing(), "elements": r.elements(), "digests": digests, "landed": r.landed}

    def _do_streaming(self, m: dict[str, Any]) -> Any:
        """In place: answered once vLLM's main thread waits for what comes."""
        u = self._open(m["update_id"])
        if u.stream is None:
            raise EngineError(f"update {u.update_id} is not in place here")
        u.stream.wait_entered(m["timeout_s"])
        return {}

    def _do_streamed(self, m: dict[str, Any]) -> Any:
        """In place: everything came; vLLM's main thread finishes the load and leaves, or leaves."""
        u, r = self._open(m["update_id"]), self._receiver(m["update_id"])
        if u.direct is None:
            assert isinstance(r, StreamWorker)
            r.finish()
            return {"read_back": False}
        assert u.stream is not None
        self._read_back(u, u.direct)
        u.looked = True
        u.stream.end()
        return {"read_back": u.verify is not Verify.OFF}

    def _do_applied(self, m: dict[str, Any]) -> Any:
        """How the load went, which vLLM's main thread ran meanwhile. The first time live memory is looked at."""
        u = self._open(m["update_id"])
        if u.outcome is None:
            raise EngineError(f"update {u.update_id} was not loaded here: did vLLM pass the call on?")
        if u.outcome["error"]:
            raise EngineError(u.outcome["error"], u.outcome["tensors"])
        if not u.looked:
            if u.direct is not None:
                self._read_back(u, u.direct)
            else:
                self._prove(u)
            u.looked = True
        u.outcome["read_back"] = u.direct is not None and u.verify is not Verify.OFF
        return u.outcome

    def _do_commit(self, m: dict[str, Any]) -> Any:
        u = self._open(m["update_id"])
        self._do_applied(m)
        self._tell(version=u.version, update_id=m["holds"], mixed="")
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

    # --- beside updates

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

    def agent_gone(self) -> None:
        """The agent's connection ended: nothing more comes. Data thread."""
        for channels in self._channels.values():
            channels.close()
        self._channels.clear()
        self._opened.clear()
        u: Update | None = self._update
        if u is not None and u.stream is not None:
            u.stream.abort("the agent is gone")
            u.stream.wait_over(_LEAVE_S)
        self._update = None
        if u is not None:
            if u.before is not None:
                self._settle(u, "the agent is gone")
            self._orphaned(u)
