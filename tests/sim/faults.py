"""What goes wrong, and when: a schedule drawn from the seed, so that a run can be repeated with less of it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

__all__ = ["Fault", "Profile", "draw"]


@dataclass(frozen=True)
class Profile:
    """The shape of one run."""

    replicas: int = 3
    workers: int = 2
    trainers: int = 1
    duration: float = 60.0
    loss: float = 0.01
    dup: float = 0.02
    faults: int = 25
    plan_fails: bool = True


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong at ``at``, for ``length`` seconds where that means something."""

    at: float
    kind: str
    target: str = ""
    length: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:7.3f} {self.kind} {self.target} {self.length:.2f}"


#: Kind -> weight. The first word says whose: r = a replica, t = a trainer, c = the coordinator, s = the store, o = an
#: operator.
KINDS = {
    "r.partition": 5,
    "r.break": 5,
    "r.kill": 4,
    "r.agent_kill": 4,
    "r.engine_restart": 3,
    "r.stop": 4,
    "r.stop_all": 3,
    "r.slow": 4,
    "r.fail_check": 1,
    "r.fail_arm": 2,
    "r.fail_wire": 3,
    "r.fail_prepare": 2,
    "r.fail_apply": 3,
    "r.fail_apply-half": 3,
    "r.fail_apply-part": 2,
    "r.corrupt": 3,
    "r.suddenly": 3,
    "r.reread": 3,
    "r.leave": 1,
    "r.fail_sleep": 1,
    "r.hand_sleep": 2,
    "r.hand_wake": 2,
    "t.kill": 3,
    "t.partition": 2,
    "t.stop": 2,
    "t.takeover": 3,
    "t.abort": 2,
    "t.close": 1,
    "s.slow": 3,
    "s.lost": 4,
    "s.written": 4,
    "c.crash": 3,
    "c.rival": 2,
    "o.pause": 4,
    "o.resume": 5,
    "o.drain": 2,
    "o.pin": 2,
    "o.activate": 4,
    "o.quarantine": 1,
    "o.abort": 2,
    "o.policy": 1,
    "o.sleep": 6,
    "o.wake_weights": 5,
    "o.wake": 6,
}


def draw(
    seed: int, profile: Profile, replicas: list[str], trainers: list[str], boost: tuple[str, ...] = ()
) -> list[Fault]:
    """The schedule of one seed, with twelve more of each kind in ``boost``."""
    rng = Random(f"{seed}/faults")
    kinds, weights = list(KINDS), list(KINDS.values())
    out: list[Fault] = []
    for i in range(profile.faults + 12 * len(boost)):
        at = rng.uniform(1.0, profile.duration * 0.9)
        kind = rng.choices(kinds, weights)[0] if i < profile.faults else boost[i % len(boost)]
        target = {"r": replicas, "o": replicas, "t": trainers}.get(kind[0], [""])
        length = rng.choice((0.3, 1.0, 2.5, 4.5, 9.0)) * rng.uniform(0.7, 1.3)
        out.append(Fault(round(at, 3), kind, rng.choice(target), round(length, 2)))
    return sorted(out, key=lambda f: f.at)
