"""Updates, trainers and policies as JSON: explicit fields, versioned, checked on the way in. No pickle.

A document is ``{"v": 1, <field>: …}``; the fields are those of the tables below, no more and no fewer. What only means
something to a living process (waiting callers, write ids, a trainer's channels) is left out: ``TRANSIENT`` names it.
A change of any table is a new version. All functions are pure and thread-safe.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..core import model as m
from ..core.reasons import Failure, Reason
from .base import StoreError

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

VERSION = 1

#: Fields that are not stored, with the reason.
TRANSIENT: dict[type, dict[str, str]] = {
    m.Update: {"waiters": "callers of a former process", "write_id": "names a write of a former process"},
    m.Trainer: {
        "ranks": "leases and offers: each rank says them again",
        "channels": "bound anew",
        "choices": "bound anew",
        "placements": "put again",
        "waiters": "callers of a former process",
        "seed": "secret, of channels that are gone",
        "durable": "what is stored is durable",
        "forced_transport": "said again at the next InitTransfer",
        "bucket_bytes": "said again at the next InitTransfer",
    },
}


class CodecError(StoreError):
    """A document is not what this release writes: another version, a missing or foreign field, a wrong type."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How values of one type are written and read. ``encode`` None: as they are."""

    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any]


def _plain(*types: type) -> _Kind:
    def decode(doc: Any) -> Any:
        if type(doc) not in types:
            raise CodecError(f"expected {types[0].__name__}, found {type(doc).__name__} {str(doc)[:60]!r}")
        return doc

    return _Kind(None, decode)


def _float() -> _Kind:
    number = _plain(float, int)
    return _Kind(None, lambda doc: float(number.decode(doc)))


def _enum(cls: type[Enum]) -> _Kind:
    values = {member.value: member for member in cls}

    def decode(doc: Any) -> Any:
        if isinstance(doc, (str, int)) and doc in values:
            return values[doc]
        raise CodecError(f"no {cls.__name__} is called {str(doc)[:60]!r}")

    return _Kind(lambda value: value.value, decode)


def _seq(item: _Kind, make: Callable[[Any], Any] = tuple, order: Callable[[Any], Any] = list) -> _Kind:
    listed = _plain(list)
    one = item.encode
    encode = order if one is None else lambda values: [one(v) for v in order(values)]
    return _Kind(encode, lambda doc: make(item.decode(v) for v in listed.decode(doc)))


def _struct(*items: _Kind) -> _Kind:
    """A tuple of fixed length."""
    listed = _plain(list)

    def encode(value: Any) -> Any:
        return [v if k.encode is None else k.encode(v) for k, v in zip(items, value, strict=True)]

    def decode(doc: Any) -> Any:
        if len(listed.decode(doc)) != len(items):
            raise CodecError(f"expected {len(items)} values, found {len(doc)}")
        return tuple(k.decode(v) for k, v in zip(items, doc, strict=True))

    return _Kind(encode, decode)


def _map(item: _Kind) -> _Kind:
    """A mapping from strings."""
    mapped = _plain(dict)
    one = item.encode
    encode = dict if one is None else lambda value: {k: one(v) for k, v in value.items()}
    return _Kind(encode, lambda doc: {k: item.decode(v) for k, v in mapped.decode(doc).items()})


def _optional(item: _Kind) -> _Kind:
    one = item.encode
    return _Kind(
        lambda value: None if value is None else value if one is None else one(value),
        lambda doc: None if doc is None else item.decode(doc),
    )


def _record(cls: type[Any], fields: dict[str, _Kind], row: bool = False) -> _Kind:
    """A dataclass, by name; as a ``row``, by position: for what comes in thousands."""
    kinds = list(fields.items())
    shape = _plain(list if row else dict)

    def values(value: Any) -> list[Any]:
        return [getattr(value, n) if k.encode is None else k.encode(getattr(value, n)) for n, k in kinds]

    def decode(doc: Any) -> Any:
        shape.decode(doc)
        if row and len(doc) != len(kinds):
            raise CodecError(f"{cls.__name__}: expected {len(kinds)} values, found {len(doc)}")
        if not row and doc.keys() != fields.keys():
            odd = sorted(doc.keys() ^ fields.keys())
            raise CodecError(f"{cls.__name__}: fields missing or foreign: {odd[:5]}")
        got = {}
        for i, (name, kind) in enumerate(kinds):
            try:
                got[name] = kind.decode(doc[i if row else name])
            except CodecError as e:
                raise CodecError(f"{cls.__name__}.{name}: {e}") from None
        return cls(**got)

    return _Kind(values if row else lambda value: dict(zip(fields, values(value), strict=True)), decode)


_STR, _INT, _BOOL, _FLOAT = _plain(str), _plain(int), _plain(bool), _float()


def _make_failure(reason: str, message: str, **rest: Any) -> Failure:
    # A reason that a later release added is only told to people: no ground to refuse a whole store.
    if reason in Reason.__members__:
        return Failure(Reason[reason], message, **rest)
    return Failure(Reason.INTERNAL, f"[{reason}] {message}", **rest)


_FAILURE_FIELDS = {
    "reason": _STR,
    "message": _STR,
    "member": _STR,
    "phase": _STR,
    "tensors": _seq(_STR),
    "tensor_count": _INT,
}
_raw_failure = _record(dict, _FAILURE_FIELDS)
_FAILURE = _optional(_Kind(_raw_failure.encode, lambda doc: _make_failure(**_raw_failure.decode(doc))))

_TIMINGS = _record(m.Timings, {"wire_s": _FLOAT, "verify_s": _FLOAT, "pause_s": _FLOAT, "apply_s": _FLOAT}, row=True)

_OPTIONS = _record(
    m.Options,
    {
        "manifest_id": _STR,
        "trainer_step": _INT,
        "selector": _map(_STR),
        "exclude": _seq(_STR),
        "at_least": _INT,
        "mode": _enum(m.Mode),
        "pause": _enum(m.PauseMode),
        "cache": _enum(m.CachePolicy),
        "verify": _enum(m.Verify),
    },
)
_PLAN = _record(m.PlanSummary, {"plan_id": _STR, "buckets": _INT, "nbytes": _INT, "bytes_for": _map(_INT)})
_CALL = _record(
    m.Call, {"seq": _INT, "ranges": _seq(_struct(_STR, _INT, _INT)), "ranks": _seq(_INT, frozenset, sorted)}
)
_PART = _record(
    m.Part,
    {
        "replica_id": _STR,
        "incarnation": _STR,
        "mode": _enum(m.Mode),
        "mode_reason": _STR,
        "channel_id": _STR,
        "stage": _enum(m.Stage),
        "armed_seq": _INT,
        "bytes_received": _INT,
        "verified": _BOOL,
        "voted": _BOOL,
        "excluded": _BOOL,
        "quiesced": _BOOL,
        "unquiesced": _BOOL,
        "dirty": _BOOL,
        "gone": _BOOL,
        "failure": _FAILURE,
        "evidence": _enum(m.Evidence),
        "timings": _TIMINGS,
    },
    row=True,
)
_PARTS = _seq(_PART, make=lambda parts: {p.replica_id: p for p in parts}, order=lambda parts: list(parts.values()))

_UPDATE = _record(
    m.Update,
    {
        "update_id": _STR,
        "version": _INT,
        "lineage": _STR,
        "generation": _INT,
        "epoch": _INT,
        "request_id": _STR,
        "fingerprint": _STR,
        "options": _OPTIONS,
        "phase": _enum(m.Phase),
        "parts": _PARTS,
        "absent": _seq(_struct(_STR, _STR)),
        "channels": _seq(_STR),
        "started_at": _FLOAT,
        "deadline": _FLOAT,
        "prepare_deadline": _FLOAT,
        "started_unix_ms": _INT,
        "frozen": _BOOL,
        "plans": _map(_PLAN),
        "planning": _BOOL,
        "calls": _seq(_CALL),
        "digests_in": _seq(_struct(_STR, _INT), frozenset, sorted),
        "finished_ranks": _seq(_INT, frozenset, sorted),
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
    },
)
_TRAINER = _record(
    m.Trainer,
    {
        "trainer_id": _STR,
        "incarnation": _STR,
        "generation": _INT,
        "world_size": _INT,
        "lineage": _STR,
        "closed": _BOOL,
    },
)
_POLICY = _record(
    m.Policy,
    {
        "min_replicas": _INT,
        "at_least": _INT,
        "cache": _enum(m.CachePolicy),
        "pause": _enum(m.PauseMode),
        "failure": _STR,
        "max_stale_versions": _INT,
        "verify": _enum(m.Verify),
        "update_timeout_s": _FLOAT,
    },
)


def _wrap(kind: _Kind, value: object) -> dict[str, Any]:
    assert kind.encode is not None
    return {"v": VERSION, **kind.encode(value)}


def _unwrap(kind: _Kind, doc: object) -> Any:
    if not isinstance(doc, dict) or type(doc.get("v")) is not int:
        raise CodecError(f"expected a document with a version, found {str(doc)[:60]!r}")
    if doc["v"] != VERSION:
        raise CodecError(
            f"document version {doc['v']}: this release reads version {VERSION}. Use the one that wrote it"
        )
    return kind.decode({k: v for k, v in doc.items() if k != "v"})


def encode_update(update: m.Update) -> dict[str, Any]:
    """An update as a JSON object, without what ``TRANSIENT`` names."""
    return _wrap(_UPDATE, update)


def decode_update(doc: object) -> m.Update:
    """The update of a JSON object. Raises ``CodecError``."""
    got: m.Update = _unwrap(_UPDATE, doc)
    return got


def encode_trainer(trainer: m.Trainer) -> dict[str, Any]:
    """What of a trainer outlives the coordinator, as a JSON object."""
    return _wrap(_TRAINER, trainer)


def decode_trainer(doc: object) -> m.Trainer:
    """The trainer of a JSON object, without ranks or channels. Raises ``CodecError``."""
    got: m.Trainer = _unwrap(_TRAINER, doc)
    return got


def encode_policy(policy: m.Policy) -> dict[str, Any]:
    """A group's policies as a JSON object."""
    return _wrap(_POLICY, policy)


def decode_policy(doc: object) -> m.Policy:
    """The policies of a JSON object. Raises ``CodecError``."""
    got: m.Policy = _unwrap(_POLICY, doc)
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
