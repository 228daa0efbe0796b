"""The sender and the receivers of one case, loaded, and one round's sample of each way and each limit."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._common import GIB, MIB
from benchmarks._models import model_bytes
from benchmarks._process import Process, tell_all

__all__ = ["Fleet", "Layout", "Sample", "members"]

_SCRIPT = Path(__file__).resolve().parent / "_member.py"


class Sample(NamedTuple):
    """Bytes to each receiver; seconds of wall clock, and of CPU in the process that used most."""

    nbytes: float
    wall: float
    cpu: float


class Layout(NamedTuple):
    """``name``: cpu, across or colocated; ``devices``: the sender's, then each receiver's."""

    name: str
    devices: tuple[str, ...]

    @classmethod
    def of(cls, device: str, colocated: bool, receivers: int, cards: int) -> Layout:
        """Sender on GPU 0, receivers on the next ones; ``colocated``: all on GPU 0; on the CPU there is one place."""
        if device == "cpu":
            return cls("cpu", ("cpu",) * (1 + receivers))
        if colocated:
            return cls("colocated", ("cuda:0",) * (1 + receivers))
        if cards < 1 + receivers:
            raise SystemExit(
                f"{receivers} receivers and a sender need {1 + receivers} GPUs, {cards} are here: --colocated, or fewer"
            )
        return cls("across", tuple(f"cuda:{i}" for i in range(1 + receivers)))


def members(layout: Layout) -> tuple[Process, list[Process], list[str]]:
    """The processes, started: the sender, the receivers; and the UUIDs of their cards, the sender's first."""
    env = {"OMP_NUM_THREADS": "1"}
    names = ["rank/0", *(f"r{i}/0" for i in range(len(layout.devices) - 1))]
    sender, *receivers = (Process(n, _SCRIPT, [], env) for n in names)
    for p, device in zip([sender, *receivers], layout.devices, strict=True):
        p.tell("start", member=p.member, device=device, peer=layout.devices[0])
    cards = [p.answer() for p in (sender, *receivers)]
    return sender, receivers, cards if layout.name != "cpu" else []


def _sample(answers: Sequence[dict[str, Any]], go: float) -> Sample:
    return Sample(answers[0]["bytes"], max(a["end"] for a in answers) - go, max(a["cpu"] for a in answers))


class Fleet:
    """A model in the members' memory. Every method raises ``MemberFailed``."""

    def __init__(self, sender: Process, receivers: Sequence[Process], name: str, layout: Layout) -> None:
        self.sender, self.receivers, self.name, self.layout = sender, list(receivers), name, layout
        self.members = [*receivers, sender]
        self._numbers = count(1)
        total = model_bytes(name)
        scratch = min(total, GIB if len(self.receivers) == 1 else 256 * MIB)
        for p in self.members:
            p.tell(
                "load",
                name=name,
                sender=sender.member,
                receivers=[r.member for r in receivers],
                scratch=scratch if p is not sender else 1,
            )
        sizes = [p.answer() for p in self.members]
        self.nbytes = int(sizes[0])

    # --- transports

    def open(self, way: str, transport: str, bucket_bytes: int) -> None:
        """Open a channel on all members."""
        names = [r.member for r in self.receivers]
        spec = {
            "channel_id": f"bench-{secrets.token_hex(8)}",
            "group": "bench",
            "transport": transport,
            "key": secrets.token_hex(32),
            "senders": [self.sender.member],
            "receivers": names,
            "bucket_bytes": bucket_bytes,
            "offers": {p.member: p.call("offer", transport=transport) for p in self.members},
        }
        tell_all(self.members, "open", way=way, spec=spec)

    def wire(self, way: str, digests: bool, look: bool = False) -> Sample:
        """One update; the bytes that came are compared with those sent."""
        number = next(self._numbers)
        self.sender.call("mark", number=number)
        self.sender.call("arm", way=way, number=number)  # as the control plane does it: the sender first
        tell_all(self.receivers, "arm", way=way, number=number)
        answers = tell_all(self.members, "wire", way=way, digests=digests, look=look)
        tell_all(self.receivers, "check", number=number)
        if digests and len({a["digest"] for a in answers}) != 1:
            raise SystemExit(f"{way}: the receivers do not hold what was sent")
        return _sample(answers, answers[-1]["start"])

    def profile(self, way: str, digests: bool, rounds: int = 5) -> dict[str, list[str]]:
        """Where the members spend their time, over a few updates."""
        for _ in range(rounds):
            self.wire(way, digests, look=True)
        return {p.member: p.call("sampler.table") for p in self.members}

    # --- limits

    def connect(self) -> None:
        """The plain sockets' connections."""
        port = self.sender.call("sockets.listen")
        for r in self.receivers:
            r.call("sockets.connect", port=port)
        self.sender.call("sockets.accept", receivers=len(self.receivers))
        if len(self.receivers) == 1:
            self.sender.call("bare_grpc.connect", port=self.receivers[0].call("bare_grpc.listen"))

    def join(self) -> None:
        """The group of torch.distributed."""
        port = self.sender.call("broadcasts.host")
        world = len(self.members)
        ranked = [self.sender, *self.receivers]
        for rank, p in enumerate(ranked):
            p.tell("broadcasts.join", port=port, rank=rank, world=world)
        for p in ranked:
            p.answer()

    def together(self, op: str) -> Sample:
        """Every receiver does it at once, until the last is done."""
        answers = tell_all(self.receivers, op)
        return _sample(answers, min(a["start"] for a in answers))

    def alone(self, op: str) -> Sample:
        """The first receiver does it."""
        answer = self.receivers[0].call(op)
        return _sample([answer], answer["start"])

    def socket(self, by: str = "sockets") -> Sample:
        """Until every receiver has all by plain socket, or by what else has ``send`` and ``receive``."""
        for p in self.members:
            p.tell(f"{by}.send" if p is self.sender else f"{by}.receive")
        answers = [p.answer() for p in self.members]
        return _sample(answers, answers[-1]["start"])

    def broadcast(self, what: str) -> Sample:
        """torch.distributed, ``each`` tensor or one ``big`` buffer: until the last receiver has it."""
        answers = tell_all(self.members, f"broadcasts.{what}")
        return _sample(answers, answers[-1]["start"])

    def close(self) -> None:
        """Unload."""
        tell_all(self.members, "unload")
