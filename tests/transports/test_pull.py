"""The engine of transports that pull, with readers in the same process (``pull_memory``)."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.transports.pull_memory import MemoryTransport
from weightplane.controlplane.core.plan import Bucket, Segment
from weightplane.transports.base import ArmToken, ChannelSpec

KEY = bytes(range(32))
TOKEN = ArmToken("u", 1, 1)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of shared memory of its own, empty again after the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="wp-test-") as made:
        monkeypatch.setenv("WEIGHTPLANE_SHM_DIR", made)
        yield Path(made)
        assert os.listdir(made) == []


@pytest.fixture
def transport(home: Path) -> Iterator[MemoryTransport]:
    made = MemoryTransport()
    yield made
    made.shutdown()


def spec(transport: MemoryTransport, receivers: int = 1, **changes: Any) -> ChannelSpec:
    """A channel from ``s`` to ``r0..``."""
    given: dict[str, Any] = {
        "channel_id": f"c-{os.getpid()}",
        "group": "g",
        "transport": "pull_memory",
        "key": KEY,
        "senders": ("s",),
        "receivers": tuple(f"r{i}" for i in range(receivers)),
        "bucket_bytes": 1000,
        "offers": {"s": transport.offer("s")},
    }
    return ChannelSpec(**(given | changes))


def bucket(index: int, nbytes: int = 1000, receivers: tuple[str, ...] = ("r0",)) -> Bucket:
    return Bucket(index, "s", receivers, (Segment(0, index * nbytes, nbytes),), nbytes)


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds


def full(value: int, n: int = 1000) -> torch.Tensor:
    return torch.full((n,), value, dtype=torch.uint8)


def test_bytes_arrive_update_after_update(transport: MemoryTransport) -> None:
    made = spec(transport, 2)
    sender = transport.open_sender(made, "s")
    receivers = [transport.open_receiver(made, m) for m in made.receivers]
    both = bucket(0, receivers=made.receivers)
    source = full(0)
    spans = [source[:400], source[400:]]
    targets = [torch.zeros(1000, dtype=torch.uint8) for _ in receivers]
    for update in range(1, 4):
        token = ArmToken(f"u{update}", 1, 1)
        source.fill_(update)
        sender.arm(token, [both], soon())
        threads = []
        for receiver, target in zip(receivers, targets, strict=True):
            receiver.arm(token, [both], soon())
            threads.append(threading.Thread(target=receiver.receive, args=(both, [target])))
            threads[-1].start()
        sender.send(both, spans)
        sender.flush()
        for thread, target in zip(threads, targets, strict=True):
            thread.join(5)
            assert bool((target == update).all())
    for receiver in receivers:
        receiver.close()
    sender.close()
