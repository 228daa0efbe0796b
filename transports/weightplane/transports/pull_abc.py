"""What a transport that pulls adds to the engine in ``pull``: how memory is exported, mapped and read.

The engine owns connections, fences, deadlines, aborts and who has read what. An ``Exporter`` turns spans of the sender
into *chunks* of *regions*; an ``Importer`` at each receiver reads chunks into spans of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from weightplane.controlplane.core.plan import Bucket
from weightplane.v1.transport_pb2 import PullRegion, PullWelcome

if TYPE_CHECKING:
    import torch

__all__ = ["Entry", "Exporter", "Importer", "Pull"]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Where one bucket's bytes lie at its sender: chunk after chunk, in the bucket's order.

    The three have one length: the id of each chunk's region, where it begins in the region and its size in bytes (at
    least 1). The same object means the same memory, so what was derived from it may be kept beside it.
    """

    regions: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Exporter(ABC):
    """The sender's memory, for one channel. Called from the channel's data thread unless said otherwise.

    Memory that a region covers is held (a strong reference) while the region is registered, and let go of only after.
    """

    @abstractmethod
    def welcome(self) -> PullWelcome:
        """What a receiver needs before it maps anything. The listener's thread; must not block."""

    @abstractmethod
    def export(self, bucket: Bucket, spans: Sequence[torch.Tensor]) -> Entry:
        """Make ``spans`` (as in ``SendChannel.send``) readable.

        Called when a bucket's list of spans is not the object that it was before. ``ValueError`` names a span that
        cannot be exported, before anything is told to a receiver. Chunks may not be longer than their regions.
        """

    @abstractmethod
    def region(self, region: int) -> PullRegion:
        """What a receiver is told of a region that an entry names."""

    def armed(self) -> None:
        """Called in each ``arm``, by the thread that arms; must not block."""
        return None

    def holds(self, entry: Entry) -> bool:
        """Whether the memory of an entry is still what it was, though its spans are the same objects. Cheap."""
        return True

    def publish(self, bucket: Bucket, entry: Entry) -> None:
        """Called in each ``send``, right before receivers are told that the bucket may be read (record events here)."""
        return None

    @abstractmethod
    def settle(self, entries: Collection[Entry]) -> Collection[int]:
        """Nobody reads now, and only ``entries`` are sure to come again: let go of memory that nobody else holds.

        Returns the regions that are gone. Their ids never come again; entries that name them are forgotten.
        """

    def pace(self, serving: bool) -> float | None:
        """How often ``serve`` is to be called, seconds, while a receiver connects or, if ``serving``, reads.

        ``serving``: a receiver said that this side's processor takes part in its reads. The listener's thread.
        """
        return None

    def serve(self) -> None:
        """Work for the receivers; short, and never raises. The listener's thread."""
        return None

    def details(self) -> Mapping[str, str]:
        """What ``doctor`` and logs may show of how bytes move. Any thread."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Bounded; idempotent; never raises. After the last receiver's connection has ended."""


@dataclass(frozen=True, slots=True)
class Pull:
    """One bucket to read. ``check`` and ``landed`` are the engine's; both may raise, and the importer lets that pass.

    An importer calls ``check()`` every few milliseconds, while it waits too; when it raises, what is in flight must be
    stopped, or have ended, before ``pull`` is left. ``landed(nbytes)`` counts bytes that are in place, at most 2 MiB at
    a time on the CPU (it passes a failpoint).
    """

    bucket: Bucket
    entry: Entry
    spans: Sequence[torch.Tensor]
    check: Callable[[], None]
    landed: Callable[[int], None]


class Importer(ABC):
    """The receiver's half, for one channel and all its senders. The channel's data thread; see ``maps``."""

    #: ``ask_serve(sender, on)``, set by the engine: the sender's processor takes part in the reads (``PullServe``).
    ask_serve: Callable[[str, bool], None]
    #: Whether regions are mapped, so that they must be unmapped as soon as they are gone, between updates too. Then
    #: ``map``, ``unmap`` and ``quiet`` are also called by a thread of the engine's, while the data thread is elsewhere.
    maps: ClassVar[bool] = False

    @property
    def broken(self) -> str:
        """Why this channel can read no more and a new one must be bound, or nothing."""
        return ""

    def details(self) -> Mapping[str, str]:
        """What ``doctor`` and logs may show of how bytes move. Any thread."""
        return {}

    @abstractmethod
    def attach(self, sender: str, welcome: PullWelcome, check: Callable[[], None]) -> None:
        """A connection to ``sender`` is new: get to where nothing local can fail any more.

        May raise, and may wait as long as it calls ``check``. An earlier connection to that sender was detached before.
        """

    @abstractmethod
    def map(self, sender: str, regions: Sequence[PullRegion]) -> None:
        """Regions of ``sender`` that may be read from now on. ``TransportError`` if they cannot."""

    @abstractmethod
    def unmap(self, sender: str, regions: Collection[int]) -> None:
        """Regions that must not be read any more; nothing reads now."""

    @abstractmethod
    def pull(self, sender: str, pull: Pull) -> None:
        """Fill the spans; returns when every byte is in place and visible (to every stream of the device).

        The sizes of entry and spans agree. The very list object of an earlier call for the bucket means the same
        memory. Raises ``PeerLost`` when the sender cannot be read any more.
        """

    def begin(self, sender: str, pull: Pull) -> None:
        """``pull`` will be called for this bucket, with the same entry and spans: what can start at once may start.

        Comes before or while (from ``check``) another bucket is pulled. Must not wait, and calls neither ``check`` nor
        ``landed``.
        """
        return None

    def quiet(self) -> None:
        """Nothing that was begun may land any more. Bounded; never raises; not while ``pull`` runs."""
        return None

    @abstractmethod
    def detach(self, sender: str) -> None:
        """The connection to ``sender`` is over: unmap its regions, disconnect. Bounded; never raises."""

    @abstractmethod
    def close(self) -> None:
        """Detach everybody and let go of everything. Bounded; idempotent; never raises."""
