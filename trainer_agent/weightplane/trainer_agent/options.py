"""What a publish asks for. Plain words in, the contract's enums out; a word that is not known is refused at once."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from weightplane.v1 import common_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

__all__ = ["FailurePolicy", "PublishOptions", "checked_step"]


def checked_step(step: Any) -> int:
    """A trainer step as the contract carries it. ``TypeError`` or ``ValueError`` for what is none: protobuf would take
    ``None`` for 0."""
    try:
        number = operator.index(step) if not isinstance(step, bool) else None
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"step: expected the trainer's step, an integer, found {step!r}")
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"step: expected a number of 64 bits, found {number}")
    return number


class FailurePolicy(StrEnum):
    """What ``publish`` does when an update does not commit."""

    #: As the group's policy says, with its ``max_stale_versions``.
    GROUP = ""
    #: Once more, without the replicas that failed, inside the same deadline; then raise.
    RETRY = "retry"
    #: Return a receipt that says so, at most ``max_stale_versions`` times in a row; then raise.
    CONTINUE_STALE = "continue_stale"
    #: Raise.
    RAISE = "raise"


_MODES = {
    "": common_pb2.MODE_UNSPECIFIED,
    "staged": common_pb2.MODE_STAGED,
    "in_place": common_pb2.MODE_IN_PLACE,
}
_PAUSES = {
    "": common_pb2.PAUSE_MODE_UNSPECIFIED,
    "keep": common_pb2.PAUSE_MODE_KEEP,
    "wait": common_pb2.PAUSE_MODE_WAIT,
    "abort": common_pb2.PAUSE_MODE_ABORT,
}
_CACHES = {
    "": common_pb2.CACHE_POLICY_UNSPECIFIED,
    "clear": common_pb2.CACHE_POLICY_CLEAR,
    "keep": common_pb2.CACHE_POLICY_KEEP,
    "salt": common_pb2.CACHE_POLICY_SALT,
}
_VERIFY = {
    "": common_pb2.VERIFY_LEVEL_UNSPECIFIED,
    "off": common_pb2.VERIFY_LEVEL_OFF,
    "sampled": common_pb2.VERIFY_LEVEL_SAMPLED,
    "full": common_pb2.VERIFY_LEVEL_FULL,
}
_BUSY = {
    "refuse": common_pb2.ON_BUSY_REFUSE,
    "wait": common_pb2.ON_BUSY_WAIT,
    "supersede": common_pb2.ON_BUSY_SUPERSEDE,
}


@dataclass(frozen=True)
class PublishOptions:
    """Options of a publish; on several ranks they must be equal on all. Empty = the group's default.

    ``mode``: staged | in_place (a preference; the receipt names each replica's). ``pause``: keep | wait | abort.
    ``cache``: clear | keep | salt. ``verify``: off | sampled | full. ``commit_policy``: "all", or the least number of
    replicas. ``on_busy``: refuse | wait | supersede. ``update_timeout``: seconds for the whole update, also of a retry;
    0 = the group's. ``prepare_timeout``: until every replica must have voted; 0 = a second less. ``failure``: see
    ``FailurePolicy``; ``continue_stale`` needs a ``max_stale_versions``.
    """

    mode: str = ""
    pause: str = ""
    cache: str = ""
    verify: str = ""
    commit_policy: str | int = ""
    on_busy: str = "wait"
    replica_selector: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    failure: FailurePolicy = FailurePolicy.GROUP
    max_stale_versions: int = 0
    update_timeout: float = 0.0
    prepare_timeout: float = 0.0

    def __post_init__(self) -> None:
        for name, words in (
            ("mode", _MODES),
            ("pause", _PAUSES),
            ("cache", _CACHES),
            ("verify", _VERIFY),
            ("on_busy", _BUSY),
        ):
            word = getattr(self, name)
            if word not in words:
                raise ValueError(f"{name}: expected one of {[w for w in words if w]}, found {word!r}")
        policy = self.commit_policy
        if not (policy in ("", "all") if isinstance(policy, str) else type(policy) is int and policy >= 1):
            raise ValueError(f"commit_policy: expected 'all' or a number of replicas, at least 1, found {policy!r}")
        object.__setattr__(self, "failure", FailurePolicy(self.failure))
        object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.update_timeout and not 0.05 <= self.update_timeout <= 86400:
            raise ValueError(f"update_timeout: expected 0.05..86400 seconds or 0, found {self.update_timeout}")
        if not 0 <= self.prepare_timeout <= (self.update_timeout or 86400):
            raise ValueError(
                f"prepare_timeout: expected 0..{self.update_timeout} seconds, found {self.prepare_timeout}"
            )
        if self.max_stale_versions < 0:
            raise ValueError(f"max_stale_versions: expected 0 or more, found {self.max_stale_versions}")
        if self.failure is FailurePolicy.CONTINUE_STALE and not self.max_stale_versions:
            raise ValueError("max_stale_versions: expected at least 1 with failure='continue_stale', found 0")

    def override(self, overrides: Mapping[str, Any]) -> PublishOptions:
        """These options with some changed. ``TypeError`` names an unknown one."""
        unknown = sorted(set(overrides) - set(self.__dataclass_fields__))
        if unknown:
            raise TypeError(f"unknown publish option(s) {unknown}; known: {sorted(self.__dataclass_fields__)}")
        return replace(self, **overrides) if overrides else self

    def fill(self, request: wt.StartUpdateRequest) -> None:
        """Put the options into a StartUpdate. Equal options give equal bytes: ranks repeat one another's call."""
        request.mode = _MODES[self.mode]
        request.pause_mode = _PAUSES[self.pause]
        request.cache_policy = _CACHES[self.cache]
        request.verify = _VERIFY[self.verify]
        request.on_busy = _BUSY[self.on_busy]
        request.replica_selector.update(self.replica_selector)
        request.exclude.extend(sorted(self.exclude))
        request.update_timeout_ms = int(self.update_timeout * 1000)
        request.prepare_timeout_ms = int(self.prepare_timeout * 1000)
        if self.commit_policy == "all":
            request.commit_policy.all = True
        elif isinstance(self.commit_policy, int):
            request.commit_policy.at_least = self.commit_policy
