"""What the adapter asks of a vLLM, by whatever way it is reached. Every call has a time limit and says what failed."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightplane.controlplane.core.states import PauseMode

from ..base import EngineError
from .settings import EngineSettings

__all__ = ["Driver", "DriverError", "DriverTimeout", "Label", "labelled"]

#: vLLM's weight version after an update, asked for when its bytes were loaded or dropped; ``None`` leaves it as it is.
Label = Callable[[], str | None]


class DriverError(EngineError):
    """vLLM refused a call, or cannot be reached."""


class DriverTimeout(DriverError):
    """vLLM did not answer in time: whether it did what was asked is unknown."""


def labelled(finish: Callable[..., Any], label: Label) -> dict[str, Any]:
    """What ``finish_weight_update`` takes: vLLM's weight version, in releases that have one (0.26 has not)."""
    return {"weight_version": label()} if "weight_version" in inspect.signature(finish).parameters else {}


class Driver(ABC):
    """One vLLM: an instance, or several that are one replica (data parallel). Thread-safe; timeouts in seconds."""

    #: For people: how it is reached.
    name: str = "driver"
    #: Why it was not ``alive`` when it was asked last.
    trouble: str = ""
    #: A pause that clears the cache has done so when it returns (but one that drains): nothing is cached after it.
    clears_as_it_pauses = False

    @property
    @abstractmethod
    def instances(self) -> int:
        """How many engines; each has workers of its own."""

    @property
    @abstractmethod
    def pause_modes(self) -> tuple[PauseMode, ...]:
        """Those that work here."""

    @abstractmethod
    def alive(self, timeout: float) -> bool:
        """Whether every instance answers."""

    @abstractmethod
    def initialise(self, infos: Sequence[Mapping[str, Any]], timeout: float) -> None:
        """``init_weight_transfer_engine`` with one info per instance."""

    @abstractmethod
    def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """Returns once no forward pass runs. WAIT returns once the requests in flight are done."""

    @abstractmethod
    def resume(self, timeout: float) -> None:
        """Let generation go on."""

    @abstractmethod
    def is_paused(self, timeout: float) -> bool:
        """Whether every instance is paused."""

    def in_flight(self, timeout: float) -> int:
        """How many requests are not done. Default: it does not tell, which is 0."""
        return 0

    @abstractmethod
    def is_sleeping(self, timeout: float) -> bool:
        """Whether any instance sleeps."""

    @abstractmethod
    def sleep(self, level: int, timeout: float) -> None:
        """Release memory; requests in flight are kept. Called while it is paused."""

    @abstractmethod
    def wake(self, tags: Sequence[str], last: bool, timeout: float) -> None:
        """Bring ``tags`` back; with the ``last`` ones vLLM lets generation go on."""

    @abstractmethod
    def update(self, info: Mapping[str, Any], label: Label, timeout: float) -> None:
        """Start, update and finish, on every worker."""

    @abstractmethod
    def clear_cache(self, timeout: float) -> None:
        """Drop the prefix cache, that of requests in flight included."""

    def settings(self, timeout: float) -> Sequence[EngineSettings]:
        """What decides which log-probabilities each instance serves, as it is in force. Default: it cannot tell."""
        raise DriverError(f"{self.name}: this driver does not tell settings")

    def close(self) -> None:
        """Free what the driver holds. Default: nothing."""
        return None
