"""Updates, trainers and policies as JSON: explicit fields, versioned, checked on the way in. No pickle.

A document is ``{"v": 3, <field>: …}``; the fields are those of the tables below, no more and no fewer. What only means
something to a living process (waiting callers, write ids, a trainer's channels) is left out: ``TRANSIENT`` names it.
A change of any table is a new version. All functions are pure and thread-safe.
"""

from __future__ import annotations

import json
from typing import Any

from ..core.model import Policy, Timings, Trainer
from ..core.reasons import Failure, Reason
from ..core.states import CachePolicy, Evidence, Mode, ParityPolicy, PauseMode, Phase, Stage, Verdict, Verify
from ..core.update_state import Call, Options, Parity, Part, PlanSummary, Update
from .kinds import CodecError, Kind, enum, floating, mapping, optional, plain, record, seq, struct

__all__ = [
    "TRANSIENT",
    "VERSION",
    "CodecError",
    "decode_policy",
    "decode_trainer",
    "decode_update",
    "dumps",
    "encode_policy",
    "encode_trainer",
    "encode_update",
    "loads",
]

VERSION = 4

#: Fields that are not stored, with the reason.
TRANSIENT: dict[type, dict[str, str]] = {
    Update: {"waiters": "callers of a former process", "write_id": "names a write of a former process"},
    Trainer: {
        "ranks": "leases and offers: each rank says them again",
        "channels": "bound anew",
        "choices": "bound anew",
        "placements": "put again",
        "waiters": "callers of a former process",
        "seed": "secret, of channels that are gone",
        "without": "found again by the next StartUpdate",
        "ahead": "of channels, which are bound anew",
        "durable": "what is stored is durable",
        "forced_transport": "said again at the next InitTransfer",
        "bucket_bytes": "said again at the next InitTransfer",
    },
}


_STR, _INT, _BOOL, _FLOAT = plain(str), plain(int), plain(bool), floating()


def _make_failure(reason: str, message: str, **rest: Any) -> Failure:
    # A reason that a later release added is only told to people: no ground to refuse a whole store.
    if reason in Reason.__members__:
        return Failure(Reason[reason], message, **rest)
    return Failure(Reason.INTERNAL, f"[{reason}] {message}", **rest)


_FAILURE_FIELDS = {
    "reason": Kind(lambda reason: reason.value, _STR.decode),
    "message": _STR,
    "member": _STR,
    "phase": _STR,
    "tensors": seq(_STR),
    "tensor_count": _INT,
}
_raw_failure = record(dict, _FAILURE_FIELDS)
_FAILURE = optional(Kind(_raw_failure.encode, lambda doc: _make_failure(**_raw_failure.decode(doc))))

_TIMINGS = record(Timings, {"wire_s": _FLOAT, "verify_s": _FLOAT, "pause_s": _FLOAT, "apply_s": _FLOAT}, row=True)

_OPTIONS = record(
    Options,
    {
        "manifest_id": _STR,
        "trainer_step": _INT,
        "selector": mapping(_STR),
        "exclude": seq(_STR),
        "at_least": _INT,
        "mode": enum(Mode),
        "pause": enum(PauseMode),
        "cache": enum(CachePolicy),
        "verify": enum(Verify),
    },
)
_PLAN = record(PlanSummary, {"plan_id": _STR, "buckets": _INT, "nbytes": _INT, "bytes_for": mapping(_INT)})
_CALL = record(Call, {"seq": _INT, "ranges": seq(struct(_STR, _INT, _INT)), "ranks": seq(_INT, frozenset, sorted)})
_PART = record(
    Part,
    {
        "replica_id": _STR,
        "incarnation": _STR,
        "mode": enum(Mode),
        "mode_reason": _STR,
        "channels": seq(_STR),
        "stage": enum(Stage),
        "armed_seq": _INT,
        "bytes_received": _INT,
        "drains": _INT,
        "verified": _BOOL,
        "voted": _BOOL,
        "excluded": _BOOL,
        "quiesced": _BOOL,
        "unquiesced": _BOOL,
        "dirty": _BOOL,
        "gone": _BOOL,
        "failure": _FAILURE,
        "evidence": enum(Evidence),
        "timings": _TIMINGS,
    },
    row=True,
)
_PARITY = record(
    Parity,
    {
        "replica_id": _STR,
        "version": _INT,
        "verdict": enum(Verdict),
        "tokens": _INT,
        "mean_abs": _FLOAT,
        "p99_abs": _FLOAT,
        "max_abs": _FLOAT,
        "kl": _FLOAT,
        "ess": _FLOAT,
        "clip_fraction": _FLOAT,
        "reason": _STR,
    },
    row=True,
)
_PARTS = seq(_PART, make=lambda parts: {p.replica_id: p for p in parts}, order=lambda parts: list(parts.values()))

_UPDATE = record(
    Update,
    {
        "update_id": _STR,
        "version": _INT,
        "lineage": _STR,
        "generation": _INT,
        "epoch": _INT,
        "request_id": _STR,
        "fingerprint": _STR,
        "options": _OPTIONS,
        "phase": enum(Phase),
        "parts": _PARTS,
        "absent": seq(struct(_STR, _STR)),
        "channels": seq(_STR),
        "started_at": _FLOAT,
        "deadline": _FLOAT,
        "prepare_deadline": _FLOAT,
        "started_unix_ms": _INT,
        "frozen": _BOOL,
        "plans": mapping(_PLAN),
        "planning": _BOOL,
        "calls": seq(_CALL),
        "digests_in": seq(struct(_STR, _INT), frozenset, sorted),
        "finished_ranks": seq(_INT, frozenset, sorted),
        "failure": _FAILURE,
        "aborting_until": _FLOAT,
        "deciding_until": _FLOAT,
        "gather_s": _FLOAT,
        "ready_at": _FLOAT,
        "armed_at": _FLOAT,
        "received_at": _FLOAT,
        "verify_at": _FLOAT,
        "decide_at": _FLOAT,
        "decided_at": _FLOAT,
        "ended_at": _FLOAT,
        "closed": _BOOL,
        "parity": seq(_PARITY),
    },
)
_TRAINER = record(
    Trainer,
    {
        "trainer_id": _STR,
        "incarnation": _STR,
        "generation": _INT,
        "world_size": _INT,
        "lineage": _STR,
        "closed": _BOOL,
        "resume_step": optional(_INT),
    },
)
_POLICY = record(
    Policy,
    {
        "min_replicas": _INT,
        "at_least": _INT,
        "cache": enum(CachePolicy),
        "pause": enum(PauseMode),
        "failure": _STR,
        "max_stale_versions": _INT,
        "verify": enum(Verify),
        "update_timeout_s": _FLOAT,
        "parity": enum(ParityPolicy),
        "declared": mapping(_STR),
        "blocking": seq(_STR),
    },
)


def _wrap(kind: Kind, value: object) -> dict[str, Any]:
    assert kind.encode is not None
    return {"v": VERSION, **kind.encode(value)}


def _unwrap(kind: Kind, doc: object) -> Any:
    if not isinstance(doc, dict) or type(doc.get("v")) is not int:
        raise CodecError(f"expected a document with a version, found {str(doc)[:60]!r}")
    if doc["v"] != VERSION:
        raise CodecError(
            f"document version {doc['v']}: this release reads version {VERSION}. Use the one that wrote it"
        )
    return kind.decode({k: v for k, v in doc.items() if k != "v"})


def encode_update(update: Update) -> dict[str, Any]:
    """An update as a JSON object, without what ``TRANSIENT`` names."""
    return _wrap(_UPDATE, update)


def decode_update(doc: object) -> Update:
    """The update of a JSON object. Raises ``CodecError``."""
    got: Update = _unwrap(_UPDATE, doc)
    return got


def encode_trainer(trainer: Trainer) -> dict[str, Any]:
    """What of a trainer outlives the coordinator, as a JSON object."""
    return _wrap(_TRAINER, trainer)


def decode_trainer(doc: object) -> Trainer:
    """The trainer of a JSON object, without ranks or channels. Raises ``CodecError``."""
    got: Trainer = _unwrap(_TRAINER, doc)
    return got


def encode_policy(policy: Policy) -> dict[str, Any]:
    """A group's policies as a JSON object."""
    return _wrap(_POLICY, policy)


def decode_policy(doc: object) -> Policy:
    """The policies of a JSON object. Raises ``CodecError``."""
    got: Policy = _unwrap(_POLICY, doc)
    return got


def dumps(doc: dict[str, Any]) -> str:
    """JSON text, ASCII. NaN and infinities pass (a member may report one), as Python's JSON writes them."""
    try:
        return json.dumps(doc, separators=(",", ":"))
    except (TypeError, ValueError) as e:
        raise CodecError(f"cannot be written as JSON: {e}") from e


def loads(text: str) -> Any:
    """The document of a JSON text. Raises ``CodecError``."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as e:
        raise CodecError(f"not JSON: {e}") from e
