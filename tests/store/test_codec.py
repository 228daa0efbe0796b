"""JSON of updates, trainers and policies: every field comes back, and nothing unknown is taken."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.helpers import trainer, update
from weightplane.controlplane.core.model import Policy, Rank, Timings, Trainer, Waiter
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.update_state import Call, Options, Parity, Part, PlanSummary, Update
from weightplane.controlplane.store import StoreError, codec

_FLOATS = st.floats(allow_nan=False)


def every(cls: type[Any], **given_: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances of a dataclass with every field drawn, those with defaults too."""
    hints = typing.get_type_hints(cls)
    drawn = {n: _FLOATS if hint is float else st.from_type(hint) for n, hint in hints.items()}
    names = [f.name for f in dataclasses.fields(cls)]
    return st.builds(cls, **{n: given_[n] if n in given_ else drawn[n] for n in names})


failures = every(Failure)
parts = every(Part, failure=st.none() | failures, timings=every(Timings))
updates = every(
    Update,
    options=every(Options),
    parts=st.lists(parts, max_size=3).map(lambda ps: {p.replica_id: p for p in ps}),
    plans=st.dictionaries(st.text(), every(PlanSummary), max_size=2),
    calls=st.lists(every(Call), max_size=2).map(tuple),
    failure=st.none() | failures,
    parity=st.lists(every(Parity), max_size=2).map(tuple),
    waiters=st.just(()),
    write_id=st.just(""),
)
policies = every(Policy)
trainers = st.builds(
    Trainer, st.text(), st.text(), st.integers(), st.integers(), st.text(), closed=st.booleans()
)  # the other fields are transient
relaxed = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)


@relaxed
@given(updates)
def test_an_update_comes_back_whole(u: Update) -> None:
    back = codec.decode_update(codec.loads(codec.dumps(codec.encode_update(u))))
    assert back == u
    assert list(back.parts) == list(u.parts)
    assert list(back.plans) == list(u.plans)


@relaxed
@given(policies, trainers)
def test_policies_and_trainers_come_back_whole(policy: Policy, t: Trainer) -> None:
    assert codec.decode_policy(codec.loads(codec.dumps(codec.encode_policy(policy)))) == policy
    assert codec.decode_trainer(codec.loads(codec.dumps(codec.encode_trainer(t)))) == t


@pytest.mark.parametrize(
    "cls, doc",
    [
        (Update, codec.encode_update(update(1))),
        (Trainer, codec.encode_trainer(trainer())),
        (Policy, codec.encode_policy(Policy())),
        (Options, codec.encode_update(update(1))["options"]),
        (PlanSummary, codec.encode_update(dataclasses.replace(update(1), plans={"c": PlanSummary("p", 1, 1, {})}))),
        (Call, codec.encode_update(dataclasses.replace(update(1), calls=(Call(1, (), frozenset()),)))),
        (Failure, codec.encode_update(dataclasses.replace(update(1), failure=Failure(Reason.DEADLINE, "x")))),
    ],
)
def test_each_field_of_the_core_is_stored_or_named_transient(cls: type[Any], doc: dict[str, Any]) -> None:
    if cls is PlanSummary:
        doc = doc["plans"]["c"]
    elif cls is Call:
        doc = doc["calls"][0]
    elif cls is Failure:
        doc = doc["failure"]
    fields = {f.name for f in dataclasses.fields(cls)}
    assert set(doc) - {"v"} == fields - set(codec.TRANSIENT.get(cls, {}))


def test_a_row_holds_each_field_of_a_part() -> None:
    u = update(1)
    (row, *_) = codec.encode_update(u)["parts"]
    names = [f.name for f in dataclasses.fields(Part)]
    part = next(iter(u.parts.values()))
    assert len(row) == len(names)
    for name, value in zip(names, row, strict=True):
        wanted = getattr(part, name)
        plain = {"timings": [0.0, 0.0, 0.0, 0.0], "channels": ["c0", "c1"]}
        assert value == plain.get(name, wanted), name


def test_transient_fields_are_left_out() -> None:
    u = dataclasses.replace(update(1), waiters=(Waiter("c1", "start"),), write_id="w1")
    assert codec.decode_update(codec.encode_update(u)) == dataclasses.replace(u, waiters=(), write_id="")
    t = dataclasses.replace(trainer(), ranks={0: Rank(0)}, seed=b"secret", durable=True)
    assert codec.decode_trainer(codec.encode_trainer(t)) == trainer()
    assert "secret" not in json.dumps(codec.encode_trainer(t))


def test_nan_and_infinity_reported_by_a_member_do_not_stop_a_decision() -> None:
    part = dataclasses.replace(update(1).parts["r0"], timings=Timings(math.nan, math.inf))
    u = dataclasses.replace(update(1), parts={"r0": part})
    back = codec.decode_update(codec.loads(codec.dumps(codec.encode_update(u)))).parts["r0"].timings
    assert math.isnan(back.wire_s) and back.verify_s == math.inf


def test_a_reason_of_a_later_release_is_kept_as_text() -> None:
    doc = codec.encode_update(dataclasses.replace(update(1), failure=Failure(Reason.DEADLINE, "x")))
    doc["failure"]["reason"] = "SOLAR_FLARE"
    assert codec.decode_update(doc).failure == Failure(Reason.INTERNAL, "[SOLAR_FLARE] x")


def _broken(**changes: Any) -> dict[str, Any]:
    return {**codec.encode_update(update(1)), **changes}


@pytest.mark.parametrize(
    "doc, message",
    [
        (_broken(v=2), "version 2"),
        (_broken(v=5), "version 5"),
        (_broken(v=True), "with a version"),
        ({}, "with a version"),
        ([], "with a version"),
        (None, "with a version"),
        (_broken(extra=1), "foreign.*extra"),
        ({k: v for k, v in _broken().items() if k != "closed"}, "missing.*closed"),
        (_broken(version="1"), "Update.version: expected int, found str"),
        (_broken(version=True), "Update.version: expected int, found bool"),
        (_broken(version=1.0), "Update.version: expected int, found float"),
        (_broken(lineage=None), "Update.lineage: expected str"),
        (_broken(phase="DONE"), "Update.phase: no Phase is called 'DONE'"),
        (_broken(parts=[[1]]), "Update.parts: Part: expected 19 values, found 1"),
        (_broken(parts={}), "Update.parts: expected list"),
        (_broken(absent=[["r9"]]), "Update.absent: expected 2 values"),
        (_broken(digests_in=[["c", "0"]]), "Update.digests_in: expected int"),
        (_broken(options={}), "Update.options: Options: fields missing"),
        (_broken(failure={"reason": "DEADLINE"}), "Update.failure"),
    ],
)
def test_what_this_release_does_not_write_is_refused_by_name(doc: object, message: str) -> None:
    with pytest.raises(codec.CodecError, match=message):
        codec.decode_update(doc)


def test_a_codec_error_is_a_store_error() -> None:
    with pytest.raises(StoreError):
        codec.loads("{")
    with pytest.raises(StoreError):
        codec.dumps({"x": object()})
