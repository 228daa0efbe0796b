"""What the replica's state machine takes in (events) and gives out (effects): see ``replica``."""

from __future__ import annotations

from dataclasses import dataclass

from .desired import DesiredReplica
from .model import Held, Retained, SleepOrder, Timings
from .reasons import Failure
from .states import Mode, PauseMode

__all__ = [
    "Applied",
    "Apply",
    "Arm",
    "Armed",
    "Check",
    "Checked",
    "Desired",
    "Drained",
    "Drop",
    "Effect",
    "EngineHeld",
    "Failed",
    "Kept",
    "Pause",
    "Paused",
    "Prepare",
    "Prepared",
    "Received",
    "Resume",
    "Resumed",
    "SendReport",
    "ServeFailed",
    "Sleep",
    "SleepDone",
    "Tick",
]


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Desired:
    """The coordinator's newest desired state."""

    desired: DesiredReplica


@dataclass(frozen=True, slots=True)
class Checked:
    """The manifest fits the engine, and the placements are sent."""

    update_id: str


@dataclass(frozen=True, slots=True)
class Armed:
    """Every worker is armed for call ``seq``."""

    update_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Received:
    """Every byte of call ``seq`` is in place on every worker."""

    update_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Receipts are delivered; staged: apply pre-validated, memory held; in place: applied, verified, still fenced."""

    update_id: str
    timings: Timings = Timings()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class Applied:
    """Every worker acknowledged apply and cache handling; ``held`` is read from the workers."""

    update_id: str
    held: tuple[Held, ...]
    timings: Timings = Timings()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class Failed:
    """An operation failed. ``dirty``: live memory may hold a mix."""

    update_id: str
    failure: Failure
    dirty: bool = False


@dataclass(frozen=True, slots=True)
class Drained:
    """The dropped update can touch nothing any more. ``wrote``: bytes of it reached live memory."""

    update_id: str
    wrote: bool


@dataclass(frozen=True, slots=True)
class Paused:
    """Generation stands still for ``holder`` (and for WAIT: nothing is in flight)."""

    holder: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The engine let go of ``holder``'s pause."""

    holder: str


@dataclass(frozen=True, slots=True)
class EngineHeld:
    """What the workers hold, read from them: at start, after an engine restart, after a reconnect. ``why`` dirty."""

    held: tuple[Held, ...]
    dirty: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class SleepDone:
    """An order to sleep or to wake was carried out, or given up for ``failure``. ``asleep``: what is released now.
    Order 0: nobody ordered it, the engine was found so.

    ``lost``: why live memory no longer holds what it did (its weights were dropped).
    """

    order: int
    asleep: tuple[str, ...]
    held: tuple[Held, ...]
    failure: Failure | None = None
    lost: Failure | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy of what the workers hold was taken for others to be caught up from; ``None``: there is none any more."""

    retained: Retained | None


@dataclass(frozen=True, slots=True)
class ServeFailed:
    """A catch-up that was to be sent from the copy could not be."""

    catch_up_id: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """Fetch the manifest, compare it with the engine, send placements."""

    update_id: str
    manifest_id: str
    mode: Mode


@dataclass(frozen=True, slots=True)
class Arm:
    """Open the channel if need be and arm every worker for one call; then receive it (``Armed``, then ``Received``)."""

    update_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Everything is in place: hash, send receipts, validate (staged) or apply (in place). Ends as Prepared."""

    update_id: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Decided: staged: write live parameters; in place: set the version. Then handle caches. Ends as Applied."""

    update_id: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Abort the channel out of band and forget the update. Ends as Drained."""

    update_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop generation for ``holder``. Ends as Paused."""

    holder: str
    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Resume:
    """Remove ``holder``'s pause, also one still on its way: after ``Resumed`` no earlier ``Paused`` of it comes.

    Generation runs once no holder is left. Ends as Resumed.
    """

    holder: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """Carry out an order to sleep or to wake: no update is being taken meanwhile. Ends as SleepDone."""

    order: SleepOrder


@dataclass(frozen=True, slots=True)
class SendReport:
    """Tell the coordinator (``report_of``)."""


Effect = Check | Arm | Prepare | Apply | Drop | Pause | Resume | Sleep | SendReport
