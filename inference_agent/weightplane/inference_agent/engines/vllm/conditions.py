"""The conditions of a replica of vLLM: the audit of its settings against what its group declares."""

from __future__ import annotations

from dataclasses import replace

from weightplane.controlplane.core.model import Condition, Declaration

from .audit import audit
from .drivers import Driver, DriverError
from .settings import Declared, EngineSettings, declared_from

__all__ = ["conditions_of"]

_WORST = ("False", "Unknown", "True")
#: Judged as the replica joins, it would name a version that the next update replaces.
_ANY_VERSION = Condition("WeightVersion", "True", "NothingDeclared", "any version of its weights will do")


def conditions_of(
    driver: Driver, declaration: Declaration, version: int | None, timeout: float
) -> tuple[Condition, ...]:
    """Each condition once, of several instances the worst; ``Audit`` says whether they could be judged. ``version``: of
    the weights, as its workers say; an engine in this process labels none."""
    wanted, why = Declared(), ""
    try:
        wanted = declared_from(f"{name}={value}" for name, value in declaration.values.items())
    except ValueError as e:
        why = f"what the group declares is not understood, the defaults count: {e}"
    found: tuple[EngineSettings, ...] = (EngineSettings(),)
    try:
        found = tuple(driver.settings(timeout))
    except DriverError as e:
        why = why or f"the engine cannot be asked: {e}"
    updates = {"cache_policy": declaration.cache.lower(), "pause_mode": declaration.pause.lower()}
    found = tuple(replace(s, weight_version=version) if s.weight_version is None else s for s in found)
    judged = [audit(replace(s, **updates), wanted) for s in found]  # type: ignore[arg-type] # words, both
    merged = tuple(min(same, key=lambda c: _WORST.index(c.status)) for same in zip(*judged, strict=True))
    if wanted.weight_version is None:
        merged = tuple(_ANY_VERSION if c.type == _ANY_VERSION.type else c for c in merged)
    if why:
        return (Condition("Audit", "Unknown", "NotJudged", why, "UpdateGroup, or VLLM_SERVER_DEV_MODE=1"), *merged)
    return (Condition("Audit", "True", "Judged", f"{len(found)} instance(s) judged"), *merged)
