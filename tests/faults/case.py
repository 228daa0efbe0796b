"""A fault as data: where it strikes (member, phase, n-th bucket), what it does, and how the publish must end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["PHASES", "Case", "Row", "kind_of"]

#: Failpoint of a phase, by kind of member. A bucket is counted where a phase has many.
PHASES: dict[str, dict[str, str]] = {
    "replica": {
        "idle": "idle",
        "start": "replica.check.before",
        "arm": "replica.arm.before",
        "update": "replica.receive.inside",
        "verify": "replica.prepare.before",
        "voted": "replica.prepare.after",
        "decided": "replica.apply.before",
        "applying": "replica.apply.inside",
    },
    "trainer": {
        "idle": "idle",
        "start": "trainer.start.after",
        "arm": "trainer.update.armed",
        "update": "trainer.send.bucket",
        "finish": "trainer.finish.before",
        "decided": "trainer.finish.after",
    },
    "engine": {
        "update": "{wire}.receive.inside",
        "applying": "vllm.load.inside",
        "applying as bytes come": "vllm.stream.inside",
    },
    "plane": {
        "idle": "idle",
        "start": "server.start.received",
        "start, before the write": "server.start.before_write",
        "start, after the write": "server.start.after_write",
        "arm": "server.update.received",
        "update": "server.update.armed",
        "finish": "server.finish.received",
        "decide, before the write": "server.decide.before_write",
        "decide, after the write": "server.decide.after_write",
        "close, before the write": "server.close.before_write",
        "close, after the write": "server.close.after_write",
        "freeze, in the store": "store.freeze.before",
        "freeze, store unknown": "store.freeze.after",
        "decide, in the store": "store.decide.before",
        "decide, store unknown": "store.decide.after",
    },
}


def kind_of(member: str) -> str:
    """trainer, plane, engine (of a vLLM, behind its agent) or replica."""
    if member.endswith("-engine"):
        return "engine"
    return "trainer" if member.startswith("trainer") else "plane" if member == "plane" else "replica"


@dataclass(frozen=True)
class Case:
    """``action``: what the member's process does at the failpoint (``launch.py``); with ``outside`` it waits there
    while the harness does that. ``outcome``: COMMITTED, ABORTED, NONE (no update), several by ``|``. ``reasons`` and
    ``blamed`` (members by the part before ``/``) are those that may be named if the trainer's call fails; for one that
    commits without somebody, ``left`` names them. ``after``: the deadline is ``timeout`` seconds after the call.
    """

    fault: str
    member: str
    phase: str
    action: str
    outcome: str
    reasons: tuple[str, ...] = ()
    blamed: tuple[str, ...] = ()
    nth: int = 1
    outside: str = ""
    left: tuple[str, ...] = ()
    dies: bool = False
    mode: str = "staged"
    timeout: float = 8.0
    ranks: tuple[int, ...] = (1,)
    wires: tuple[str, ...] = ()  # empty: each
    ci: bool = False
    small: bool = False  # on a fleet whose disks can be filled
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def point(self) -> str:
        return PHASES[kind_of(self.member)][self.phase]

    @property
    def id(self) -> str:
        parts = [self.fault, self.member, self.phase, *(["in place"] if self.mode == "in_place" else [])]
        return "-".join(parts).replace(" ", "_").replace(",", "")


@dataclass
class Row:
    """What was seen of one case."""

    case: str
    fault: str
    member: str
    phase: str
    mode: str
    transport: str
    ranks: int
    outcome: str = ""
    trainer: str = ""
    router: str = ""
    end_s: float = 0.0
    good_s: float = 0.0
    wall_s: float = 0.0
    engine: str = "torch_module"
    violations: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
