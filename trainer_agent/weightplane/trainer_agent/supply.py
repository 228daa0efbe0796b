"""Where the sending threads get their tensors: straight from the source, or from an iterator that gathers them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from weightplane.controlplane.core.plan import Bucket, Plan
from weightplane.transports.identity import MemoryWatch

from . import replay as replays
from .naming import SourceError
from .sources import Local, Source
from .stop import Stop

__all__ = ["DirectSupply", "GatherSupply", "Supply", "Work"]

#: What one lane sends: a plan and its buckets of this rank, in plan order.
Work = tuple[Plan, Sequence[Bucket]]

_FOREVER = 1e12


def needs(plan: Plan, bucket: Bucket) -> set[int]:
    """Roots that a bucket takes bytes from."""
    return {plan.regions[s.region].tensor for s in bucket.segments}


class Supply(ABC):
    """Gives each lane the tensors of its next bucket. ``take`` and ``done`` come in bucket order, a thread per lane.

    A lane does not ask for buckets that it replays: ``watch`` has looked at the tensors of ``source`` for this update,
    if they stay from update to update.
    """

    transient: bool
    source: Source
    watch: MemoryWatch | None = None
    #: The kinds of device (``"cpu"``, ``"cuda"``) that tensors may lie on.
    device_kinds: frozenset[str]

    @abstractmethod
    def take(self, lane: int, bucket: Bucket) -> Mapping[int, Local | Sequence[Local]]:
        """The locals that a bucket needs, by root index; may block. Raises the publish's reason to stop."""

    @abstractmethod
    def done(self, lane: int, bucket: Bucket) -> None:
        """The lane needs the tensors for this bucket no more."""

    def leave(self, lane: int) -> None:
        """The lane asks for nothing any more, finished or not."""
        return None


class DirectSupply(Supply):
    """A source that has its tensors at hand. What a cast makes is kept per lane until its last bucket."""

    def __init__(self, source: Source, work: Sequence[Work], *, replay: bool = True) -> None:
        """``replay`` off: nothing of the source is kept from update to update."""
        self.source, self._work = source, work
        self.transient = source.transient
        self.watch = replays.watch(source) if replay else None
        kinds = self.watch.device_kinds if self.watch is not None else {"cpu", source.device_kind}
        self.device_kinds = frozenset(kinds)
        self._cast: list[dict[int, Local | Sequence[Local]]] = [{} for _ in work]
        self._last: list[dict[int, int]] = [{} for _ in work]
        if self.transient:
            for lane, (plan, buckets) in enumerate(work):
                for bucket in buckets:
                    self._last[lane].update(dict.fromkeys(needs(plan, bucket), bucket.index))

    def take(self, lane: int, bucket: Bucket) -> Mapping[int, Local | Sequence[Local]]:
        """See ``Supply``."""
        wanted = needs(self._work[lane][0], bucket)
        if not self.transient:
            return {i: self.source.tensor(i) for i in wanted}
        held = self._cast[lane]
        for i in wanted - held.keys():
            held[i] = self.source.tensor(i)
        return {i: held[i] for i in wanted}

    def done(self, lane: int, bucket: Bucket) -> None:
        """See ``Supply``."""
        held, last = self._cast[lane], self._last[lane]
        for i in [i for i in held if last[i] <= bucket.index]:
            del held[i]

    def leave(self, lane: int) -> None:
        """See ``Supply``."""
        self._cast[lane].clear()


class GatherSupply(Supply):
    """Between an iterator that yields tensors in manifest order and the lanes that send them.

    The iterating thread calls ``offer`` for each tensor and then ``wait_wanted``, which returns when the next one is
    wanted: when every lane that still sends waits for it, or (``room`` > 0) when the window holds fewer bytes than
    ``room``. With ``room`` 0 nothing is gathered while a lane moves bytes. A tensor stays in the window until the last
    bucket of any lane that needs it is done.
    """

    def __init__(self, work: Sequence[Work], stop: Stop, room: int, device_kind: str = "cpu") -> None:
        self.transient = True
        self.device_kinds = frozenset({"cpu", device_kind})
        self._work, self._stop, self._room = work, stop, room
        self._lock = threading.Lock()
        self._uses: list[dict[int, int]] = []  # by lane: root -> buckets that still need it
        for plan, buckets in work:
            uses: dict[int, int] = {}
            for bucket in buckets:
                for i in needs(plan, bucket):
                    uses[i] = uses.get(i, 0) + 1
            self._uses.append(uses)
        self._window: dict[int, Local] = {}
        self._bytes = 0
        self._reached = -1  # the highest root offered
        self._wants: dict[int, int] = {}  # lanes that wait: the highest root they need
        self._sending = {lane for lane, (_, buckets) in enumerate(work) if buckets}
        self._exhausted = False

    # --- the iterating thread ---

    def offer(self, index: int, local: Local) -> None:
        """The next root is here."""
        with self._lock:
            self._reached = index
            if any(uses.get(index) for uses in self._uses):
                self._window[index] = local
                self._bytes += local[0].nbytes
        self._stop.poke()

    def exhaust(self) -> None:
        """The iterator is at its end: who still waits for a tensor is told that it will not come."""
        self._exhausted = True
        self._stop.poke()

    def wait_wanted(self, deadline: float) -> bool:
        """Wait until the next root is wanted; False at the deadline. Raises the reason to stop."""
        return self._stop.wait(self._wanted, deadline)

    def _wanted(self) -> bool:
        with self._lock:
            starving = all(self._wants.get(lane, -1) > self._reached for lane in self._sending)
            return starving or self._bytes < self._room

    # --- the lanes ---

    def take(self, lane: int, bucket: Bucket) -> Mapping[int, Local]:
        """See ``Supply``."""
        wanted = needs(self._work[lane][0], bucket)
        with self._lock:
            self._wants[lane] = max(wanted)
        self._stop.poke()
        self._stop.wait(lambda: self._exhausted or all(i in self._window for i in wanted), _FOREVER)
        with self._lock:
            del self._wants[lane]
            missing = sorted(wanted - self._window.keys())
            if missing:
                raise SourceError(f"the plan has this rank send manifest entries {missing[:5]}, which it was not given")
            return {i: self._window[i] for i in wanted}

    def done(self, lane: int, bucket: Bucket) -> None:
        """See ``Supply``."""
        with self._lock:
            uses = self._uses[lane]
            for i in needs(self._work[lane][0], bucket):
                uses[i] -= 1
                if not uses[i]:
                    del uses[i]
            self._shrink()
        self._stop.poke()

    def leave(self, lane: int) -> None:
        """See ``Supply``."""
        with self._lock:
            self._uses[lane].clear()
            self._wants.pop(lane, None)
            self._sending.discard(lane)
            self._shrink()
        self._stop.poke()

    def _shrink(self) -> None:
        for i in [i for i in self._window if not any(uses.get(i) for uses in self._uses)]:
            self._bytes -= self._window.pop(i)[0].nbytes
