"""The fleet that faults strike: control plane, trainer (1 or 4 ranks), replicas r0, r1 (one worker), r2 (two).

Everyone dials the control plane through a byte-level link of its own; the trainer's and r1's calls pass a relay too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.faults.relay import Relay
from tests.faults.resources import segments
from tests.faults.small import SmallDisks
from tests.faults.tcp import Link
from tests.loop import Loop
from tests.process.harness import GROUP, Fleet, Trainer, eventually

__all__ = ["NAMES", "ON_A_CARD", "FaultFleet", "here"]

NAMES = ("r0", "r1", "r2")
WORKERS = {"r0": 1, "r1": 1, "r2": 2}
RELAYED = ("trainer", "r1")
ON_A_CARD = ("cuda_ipc",)  # transports whose fleet has trainer and replicas on one card


class FaultFleet(Fleet):
    """A context; ``defects``: by replica, one that its engine has planted. ``small``: the control plane's store, what
    r1 retains and shared memory lie on mounts that can be filled."""

    def __init__(
        self,
        folder: Path,
        *,
        transport: str = "shm",
        ranks: int = 1,
        beat_s: float = 0.2,
        ttl_s: float = 1.5,
        defects: dict[str, str] | None = None,
        small: bool = False,
    ) -> None:
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
        self.shm = Path(tempfile.mkdtemp(prefix="wpf-", dir=base))  # of this fleet alone: what is left there is its own
        env = {"WEIGHTPLANE_SHM_DIR": str(self.shm), "WEIGHTPLANE_TEST_IDLE": "1"}
        if transport in ON_A_CARD:
            env["WEIGHTPLANE_TEST_DEVICE"] = "cuda:0"
        super().__init__(
            folder,
            "tests.faults.engine:make",
            transport=transport,
            env=env,
            spares=1,  # a restart must not wait for an interpreter
            beat_s=beat_s,
            ttl_s=ttl_s,
        )
        self.ranks, self.defects = ranks, defects or {}
        self.step = 0
        self._stack = ExitStack()
        self.disk, self.kept = folder / "disk", folder / "kept"
        self.disks: SmallDisks | None = None
        if small:
            self.disk.mkdir()
            self.kept.mkdir()
            self.disks = SmallDisks({self.disk: 16 << 10, self.kept: 1 << 10, self.shm: 96 << 10})
            self._stack.callback(self.disks.close)
            self.prefix, self.store = self.disks.prefix, self.disk / "store.db"
        self.links: dict[str, Link] = {}
        self.relays: dict[str, Relay] = {}
        self.others: list[Trainer] = []

    def launch(self) -> None:
        self.loop = self._stack.enter_context(Loop())
        self.start_plane()
        for name in (*NAMES, "trainer"):
            target = self.address
            if name in RELAYED:
                relay = self.relays[name] = Relay(self.loop, target)
                target = relay.start()
                self._stack.callback(relay.close)
            self.links[name] = Link(self.loop, target)
            self._stack.callback(self.links[name].close)
        for name in NAMES:
            self.begin(name)
        self.start_trainer()
        for name in NAMES:
            self.await_replica(name)
        self.trainer.ask(do="wait", count=len(NAMES))
        self.all_publish(self.next(), mode="in_place")  # what a wire opens once for each mode is open from here on

    def __exit__(self, *exc: object) -> None:
        for child in self._all:  # one that is stopped cannot be asked to end, and holds nothing up
            if child.process.poll() is None:
                child.process.kill()
        self._stack.close()
        super().__exit__(*exc)
        shutil.rmtree(self.shm, ignore_errors=True)

    def link(self, name: str) -> str:
        link = self.links.get(name)
        return link.address if link is not None else self.address

    def begin(self, name: str) -> None:
        options = [f"folder={self.folder}", f"replica={name}", f"workers={WORKERS[name]}"]
        if name in self.defects:
            options.append(f"defect={self.defects[name]}")
        retain = self.disks is not None and name == "r1"
        self.begin_replica(name, options=tuple(options), argv=("--retain", str(self.kept)) if retain else ())

    def restart(self, name: str) -> None:
        """Start a killed one anew; the trainer with all of its ranks."""
        if name == "plane":
            self.start_plane()
        elif name.startswith("trainer"):
            for child in (self.trainer, *self.others):
                if child.process.poll() is None:
                    child.kill()
            self.start_trainer()
            self.trainer.ask(do="wait", count=1)
        else:
            self.begin(name)
            self.await_replica(name)

    def start_trainer(self) -> Trainer:
        """Every rank; the first is ``trainer``, the others ``trainer-1`` and so on."""
        self.trainers += 1
        job = f"trainer-{self.trainers}"
        self.others = []
        for rank in range(self.ranks):
            child: Trainer = self._take(Trainer)
            name = "trainer" if rank == 0 else f"trainer-{rank}"
            argv = ["trainer", self.link("trainer"), job, self.transport, str(self.bucket_bytes)]
            child.become(name, [*argv, str(rank), str(self.ranks), "yes"])
            self.children[name] = child
            if rank:
                self.others.append(child)
        return self.trainer

    def second(self, takeover: bool) -> Trainer:
        """Another trainer of the same group."""
        child: Trainer = self._take(Trainer)
        argv = ["trainer", self.address, f"another-{len(self._all)}", self.transport, str(self.bucket_bytes)]
        child.become("another", [*argv, "0", "1", "yes" if takeover else "no"])
        return child

    # --- publishing, all ranks together

    def next(self) -> int:
        self.step += 1
        return self.step

    def begin_publish(self, step: int, **options: Any) -> None:
        for child in (self.trainer, *self.others):
            child.begin(step, **options)

    def answers(self, timeout: float = 60.0) -> list[dict[str, Any] | None]:
        """Rank by rank; None: it died."""
        return [child.heard(timeout) for child in (self.trainer, *self.others)]

    def all_publish(self, step: int, **options: Any) -> dict[str, Any] | None:
        self.begin_publish(step, **options)
        return self.answers()[0]

    def together(self, timeout: float = 30.0) -> dict[str, Any]:
        """An update that every replica takes; its receipt."""
        said: list[Any] = [None]

        def publish() -> dict[str, Any] | None:
            said[0] = receipt = self.all_publish(self.next())
            taken = receipt is not None and receipt["ok"] and sorted(receipt["ready"]) == list(NAMES)
            return receipt if taken else None

        try:
            receipt = eventually(publish, "an update that all take", timeout)
        except AssertionError as e:
            raise AssertionError(f"{e}; last: {said[0]}") from None
        assert receipt is not None
        return receipt

    def segments(self) -> list[str]:
        """What lies in shared memory."""
        return segments(self.shm if self.disks is None else self.disks.outside(self.shm))

    # --- what is told of a struck process

    def struck(self, name: str, timeout: float = 20.0) -> None:
        eventually(lambda: self.fired(name), f"the fault strikes {name}", timeout)

    def go_on(self, name: str) -> None:
        """Let a process go that waits at its failpoint."""
        (self.folder / f"{name}.fired").unlink()

    def disarm(self) -> None:
        for path in (*self.folder.glob("*.arm"), *self.folder.glob("*.fired")):
            path.unlink(missing_ok=True)

    @property
    def group(self) -> str:
        return GROUP


def here(transport: str) -> str:
    """Why a transport cannot be used here; empty if it can."""
    from weightplane.transports import registry

    probe: Callable[[], Any] = registry.get(transport).probe
    found = probe()
    return "" if found.ok else str(found.reason)


def commit_of(root: Path) -> str:
    """The commit that is run, from git or from ``WEIGHTPLANE_COMMIT`` where there is none."""
    given = os.environ.get("WEIGHTPLANE_COMMIT", "")
    if given:
        return given
    command = ["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
