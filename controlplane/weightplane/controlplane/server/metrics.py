"""``GET /metrics`` of the probes' port: gauges in Prometheus' text format, of the groups that the caller may see."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.members import routable
from weightplane.controlplane.core.parity import newest
from weightplane.controlplane.core.states import Verdict

__all__ = ["CONTENT_TYPE", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Name after ``weightplane_``, and what it is.
_GAUGES = {
    "committed_version": "Version that the group committed last.",
    "replicas": "Replicas known.",
    "replicas_routable": "Replicas routable at the committed version.",
    "replica_version": "Version that the replica holds; 0 = none.",
    "replica_routable": "1 = routable at the committed version.",
    "replica_condition": "1 = a setting of its engine is as the group declares, 0 = it is not, NaN = it does not tell.",
    "parity_version": "Version of the replica's newest parity check.",
    "parity_ok": "1 = engine and trainer were at parity, 0 = they were not, NaN = nothing was measured.",
    "parity_tokens": "Tokens compared.",
    "parity_mean_abs": "Mean of |trainer - engine| log-probability, nats.",
    "parity_p99_abs": "Its 99th percentile, nats.",
    "parity_max_abs": "The largest, nats.",
    "parity_kl": "KL(engine || trainer) per token, nats.",
    "parity_ess": "Effective sample size of the importance weights over the number of tokens.",
    "parity_clip_fraction": "Share of tokens whose importance weight is more than 0.2 from 1.",
}
_STATUS = {"True": 1.0, "False": 0.0}
_OK = {Verdict.AT_PARITY: 1.0, Verdict.NOT_AT_PARITY: 0.0, Verdict.NOT_MEASURED: math.nan}


def exposition(states: Iterable[GroupState]) -> str:
    """The whole page: each gauge with its help, then a line for each group or replica."""
    lines: dict[str, list[str]] = {name: [] for name in _GAUGES}
    for state in states:
        for name, labels, value in _samples(state):
            said = ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())
            lines[name].append(f"weightplane_{name}{{{said}}} {_number(value)}")
    page = []
    for name, text in _GAUGES.items():
        page += [f"# HELP weightplane_{name} {text}", f"# TYPE weightplane_{name} gauge", *lines[name]]
    return "\n".join(page) + "\n"


def _samples(state: GroupState) -> Iterator[tuple[str, dict[str, str], float]]:
    group = {"group": state.group}
    checks = newest(state)
    ready = {rid: routable(state, r)[2] for rid, r in state.replicas.items()}
    yield "committed_version", group, state.committed.version
    yield "replicas", group, len(ready)
    yield "replicas_routable", group, sum(ready.values())
    for rid, r in sorted(state.replicas.items()):
        replica = {**group, "replica": rid}
        yield "replica_version", replica, r.held.version
        yield "replica_routable", replica, ready[rid]
        for c in r.conditions:
            yield "replica_condition", {**replica, "type": c.type}, _STATUS.get(c.status, math.nan)
        check = checks.get(rid)
        if check is None:
            continue
        yield "parity_ok", replica, _OK[check.verdict]
        for name in ("version", "tokens", "mean_abs", "p99_abs", "max_abs", "kl", "ess", "clip_fraction"):
            yield f"parity_{name}", replica, getattr(check, name)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
