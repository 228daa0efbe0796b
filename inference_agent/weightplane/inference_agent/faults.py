"""What went wrong on a replica, in the core's words. Pure."""

from __future__ import annotations

import errno

from weightplane.controlplane.core.manifest import ManifestError
from weightplane.controlplane.core.plan import PlanError
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.transports.base import ChannelTimeout, TransportError
from weightplane.transports.buckets import SpanError

from .engines.base import EngineError
from .rpc import CallFailed

__all__ = ["Refusal", "failure_of"]

_NO_ROOM = {errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EDQUOT}


class Refusal(Exception):
    """The replica cannot go on; ``failure`` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def failure_of(error: BaseException, replica_id: str, doing: str) -> Failure:
    """The failure that an exception amounts to, naming the replica, what it was doing and the error's class."""
    if isinstance(error, CallFailed | Refusal):
        return error.failure
    text = f"{doing}: {type(error).__name__}: {error}"
    if isinstance(error, TransportError):
        peers = f" (peers: {', '.join(error.peers)})" if error.peers else ""
        reason = Reason.DEADLINE if isinstance(error, ChannelTimeout) else Reason.TRANSPORT
        return Failure(reason, f"{text}{peers}", replica_id, "", error.tensors[:5], len(error.tensors))
    if isinstance(error, EngineError):
        return Failure(Reason.ENGINE, text, replica_id, "", error.tensors[:5], len(error.tensors))
    if isinstance(error, ManifestError):
        return Failure(Reason.MANIFEST_MISMATCH, text, replica_id)
    if isinstance(error, PlanError | SpanError):
        return Failure(Reason.PLACEMENT_MISMATCH, text, replica_id)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        return Failure(Reason.RESOURCE, text, replica_id)
    return Failure(Reason.ENGINE, text, replica_id)
