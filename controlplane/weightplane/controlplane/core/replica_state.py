"""What one life of a replica knows, and what it tells of it: see ``replica``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .desired import DesiredReplica, DesiredUpdate
from .events import Report
from .model import NONE_HELD, Held, Retained, Timings
from .reasons import Failure
from .replica_events import Effect, SendReport
from .states import PauseMode, Stage

__all__ = ["ReplicaState", "Taking", "Tx", "fenced", "report_of"]


@dataclass(frozen=True, slots=True)
class Taking:
    """The update being taken. ``busy`` names the operation in flight, ``pause`` how generation must stand still for it
    (None: it need not)."""

    want: DesiredUpdate
    epoch: int
    deadline: float
    stage: Stage = Stage.NONE
    armed_seq: int = 0
    received_seq: int = 0
    busy: str = ""
    decision: str = ""
    dropping: bool = False
    pause: PauseMode | None = None
    failure: Failure | None = None
    timings: Timings = Timings()  # noqa: RUF009 - frozen

    @property
    def held(self) -> Held:
        """What every worker holds once the update is applied."""
        return self.want.holds or Held(self.want.version, self.want.update_id)

    @property
    def voted(self) -> bool:
        """Whether this replica may no longer abort by itself."""
        return self.stage is Stage.PREPARED

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self.stage in (Stage.APPLIED, Stage.ABORTED, Stage.FAILED)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One life of a replica.

    ``paused``: holders in force; ``pausing`` and ``resuming``: asked of the engine and not confirmed. ``newest`` is the
    last desired state, of ``newest_at``: what it asks for is taken up once the update before it is over.
    ``asleep``: what the engine has released; ``sleep_begun`` and ``sleep_done`` number the last orders about it.
    ``retained``: the copy kept for others; ``serve_failures``: catch-ups (id, why) that it could not be sent in.
    """

    replica_id: str
    incarnation: str
    workers: int = 1
    cluster_id: str = ""
    epoch: int = 0
    held: tuple[Held, ...] = ()
    dirty: bool = False
    dirty_reason: Failure | None = None
    taking: Taking | None = None
    paused: frozenset[str] = frozenset()
    pausing: frozenset[str] = frozenset()
    resuming: frozenset[str] = frozenset()
    wanted: tuple[tuple[str, PauseMode], ...] = ()
    sequence: int = 0
    updates_since_start: int = 0
    leaving: bool = False
    newest: DesiredReplica | None = None
    newest_at: float = 0.0
    asleep: tuple[str, ...] = ()
    sleep_begun: int = 0
    sleep_done: int = 0
    sleep_failure: Failure | None = None
    retained: Retained | None = None
    serve_failures: tuple[tuple[str, Failure], ...] = ()


class Tx:
    """One step: the state as it becomes, and what is to be done."""

    def __init__(self, state: ReplicaState, now: float) -> None:
        self.state, self.now = state, now
        self.effects: list[Effect] = []
        self.reason = "nothing to do"

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def take(self, **changes: Any) -> None:
        assert self.state.taking is not None
        self.set(taking=replace(self.state.taking, **changes))

    def report(self, reason: str) -> None:
        self.reason = reason
        if not any(isinstance(x, SendReport) for x in self.effects):
            self.set(sequence=self.state.sequence + 1)
            self.effects.append(SendReport())


def fenced(state: ReplicaState) -> bool:
    """Whether generation must stand still."""
    return bool(state.paused or state.pausing or state.dirty or state.asleep)


def report_of(state: ReplicaState, bytes_received: int = 0, running_requests: int = 0) -> Report:
    """The report that describes ``state``."""
    t = state.taking
    holders = state.paused | state.resuming | ({"dirty"} if state.dirty else set())
    holders |= {"sleep"} if state.asleep else set()
    return Report(
        replica_id=state.replica_id,
        incarnation=state.incarnation,
        sequence=state.sequence,
        held=state.held or (NONE_HELD,) * state.workers,
        epoch=state.epoch,
        dirty=state.dirty,
        dirty_reason=state.dirty_reason,
        update_id=t.want.update_id if t is not None else "",
        stage=t.stage if t is not None else Stage.NONE,
        armed_seq=t.armed_seq if t is not None else 0,
        bytes_received=bytes_received,
        failure=t.failure if t is not None else None,
        timings=t.timings if t is not None else Timings(),
        pause_holders=tuple(sorted(holders)),
        updates_since_start=state.updates_since_start,
        leaving=state.leaving,
        running_requests=running_requests,
        asleep=state.asleep,
        sleep_order=state.sleep_done,
        sleep_failure=state.sleep_failure,
        retained=state.retained,
        serve_failures=state.serve_failures,
    )


# --- desired state --------------------------------------------------------------------------------------------------
