"""What a whole update must reach. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MEMORY_GB", "TARGETS", "Target"]

#: Device memory that an update in place may take beyond what was held before, at its peak.
MEMORY_GB = 0.5


@dataclass(frozen=True)
class Target:
    """One update in place to one replica takes at most ``seconds``, or reaches ``share`` of the copy limit."""

    transport: str
    layout: str
    model: str
    verify: str
    share: float = 0.0
    seconds: float = 0.0

    def judges(self, details: Mapping[str, Any]) -> bool:
        """Whether a result is about this."""
        wanted = {
            "transport": self.transport,
            "layout": self.layout,
            "model": self.model,
            "verify": self.verify,
            "mode": "in_place",
            "receivers": 1,
        }
        return "memory" not in details and all(details.get(k) == v for k, v in wanted.items())

    def met(self, value: float, ratio: float) -> tuple[bool, str]:
        """Whether a median (seconds) and its share meet it, and in words."""
        good = bool(self.share and ratio >= self.share) or bool(self.seconds and value <= self.seconds)
        words = [f"≥ {self.share} of the limit"] * bool(self.share) + [f"≤ {self.seconds} s"] * bool(self.seconds)
        return good, f"target {' or '.join(words)}: {'met' if good else 'MISSED'}"


#: The seconds are those of an H200 pair; across, the share holds whatever the card.
TARGETS = (
    Target("cuda_ipc", "across", "dense", "default", share=0.80),
    Target("cuda_ipc", "across", "moe", "default", share=0.80),
    Target("cuda_ipc", "colocated", "dense", "sampled", seconds=0.018),
    Target("cuda_ipc", "colocated", "moe", "sampled", seconds=0.018),
)
