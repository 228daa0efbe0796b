"""Whoever lies about bytes is caught, by name: loader, transport, live memory, source. Real processes; the liars are
third-party plug-ins (``tests.process.liar``) under the real server, agents and Publisher.

Replica r0 is honest, r1 lies. Each defect is planted in both modes. Where the lie can be known before the vote, finish
fails and names tensor and replica; what becomes of staged bytes after the decision makes that replica DIRTY and named.
With ``verify="off"`` the same defects go through: they are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.coded import LAYERS
from tests.process.harness import Fleet, eventually
from tests.process.liar import TENSOR, install

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

ALL = {f"layers.{i}" for i in range(LAYERS)}
#: defect -> the tensors that it spoils
LOADERS = {"drop": {TENSOR}, "half": {TENSOR}, "flip": {TENSOR}}
WIRES = {"zeros": ALL, "counted": ALL, "stale": ALL}
MODES = ("staged", "in_place")


class Liars:
    def __init__(self, folder: Path) -> None:
        self.defects = folder / "defects"
        env = install(self.defects)
        self.fleet = f = Fleet(folder, transport="liar", bucket_bytes=64 << 10, env=env, spares=0)
        self.step = 0
        f.start_plane()
        for name in ("r0", "r1"):
            f.begin_replica(name, engine="tests.process.liar:make", options=(f"replica={name}",))
        for name in ("r0", "r1"):
            f.await_replica(name)
        f.start_trainer().ask(do="wait", count=2)

    def publish(self, defect: str = "", **options: Any) -> dict[str, Any]:
        self.step += 1
        (self.defects / "r1.defect").write_text(defect)
        answer = self.fleet.trainer.publish(self.step, **options)
        assert answer is not None
        return answer

    def honest(self) -> None:
        """An update without a lie: everyone takes it, bit for bit."""
        receipt = self.publish()
        assert receipt["ok"] and receipt["ready"] == ["r0", "r1"], receipt
        expected = self.fleet.trainer.ask(do="digests")
        assert all(self.fleet.digests(r) == expected for r in ("r0", "r1"))

    def wrong(self, replica: str) -> set[str]:
        """Tensors that a replica holds otherwise than the trainer."""
        expected, found = self.fleet.trainer.ask(do="digests"), self.fleet.digests(replica)
        return {n for n in expected if found[n] != expected[n]}

    def routable(self, replica: str, want: bool) -> None:
        eventually(
            lambda: (said := self.fleet.check(replica)) is not None and said.routable is want,
            f"{replica} is {'' if want else 'not '}routable",
        )

    def undone(self, mode: str, old: int) -> None:
        """After a finish that failed: staged replicas serve on what they had; those written in place are fenced."""
        for replica in ("r0", "r1"):
            self.routable(replica, mode == "staged")
            status, answer = self.fleet.generate(replica)
            if mode == "staged":
                assert self.fleet.holds(replica)["version"] == old and status == 200
            else:
                assert status == 503 and "DIRTY" in answer["error"]


@pytest.fixture(scope="module")
def liars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Liars]:
    liars = Liars(tmp_path_factory.mktemp("lies"))
    with liars.fleet:
        yield liars


@pytest.fixture(autouse=True)
def base(liars: Liars, request: pytest.FixtureRequest) -> Iterator[int]:
    """Before and after each lie an honest update goes through: no process is restarted, in the whole module."""
    lives = liars.fleet.lives()
    liars.honest()
    yield liars.fleet.holds("r1")["version"]
    liars.honest()
    assert liars.fleet.lives() == lives


def named(answer: dict[str, Any], reason: str, tensors: set[str]) -> None:
    """Finish failed; reason, replica and tensors are named."""
    assert not answer["ok"] and answer["error"] == "UpdateFailed", answer
    failure = answer["failure"]
    assert failure["reason"] == reason and failure["member"].partition("/")[0] == "r1", answer
    assert set(failure["tensors"]) <= tensors and len(failure["tensors"]) == min(5, len(tensors)), answer
    assert "r1" in answer["text"] and all(t in answer["text"] for t in failure["tensors"]), answer
    assert list(answer["failures"]) == ["r1"], answer


@pytest.mark.parametrize("defect", LOADERS)
def test_a_loader_in_place_fails_finish(defect: str, liars: Liars, base: int) -> None:
    """LIVE evidence is read back before the vote: a dropped tensor, half of one, one bit flipped after the apply."""
    named(liars.publish(defect, mode="in_place"), "DIGEST_MISMATCH", LOADERS[defect])
    liars.undone("in_place", base)


@pytest.mark.parametrize("defect", LOADERS)
def test_a_loader_after_the_decision_makes_its_replica_dirty(defect: str, liars: Liars, base: int) -> None:
    answer = liars.publish(defect, mode="staged")
    assert answer["ok"] and answer["committed"] and answer["ready"] == ["r0"], answer
    r1 = answer["replicas"]["r1"]
    assert r1["state"] == "DIRTY" and r1["failure"]["member"] == "r1", answer
    assert set(r1["failure"]["tensors"]) == LOADERS[defect] and TENSOR in r1["failure"]["message"], answer
    liars.routable("r0", True)
    liars.routable("r1", False)
    status, said = liars.fleet.generate("r1")
    assert status == 503 and "DIRTY" in said["error"]
    assert liars.wrong("r0") == set()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("defect", WIRES)
def test_a_transport_fails_finish(defect: str, mode: str, liars: Liars, base: int) -> None:
    """Zeros; OK and nothing moved, with the bytes counted as landed; the bytes of the update before."""
    named(liars.publish(defect, mode=mode), "DIGEST_MISMATCH", WIRES[defect])
    liars.undone(mode, base)


@pytest.mark.parametrize("mode", MODES)
def test_a_transport_that_counts_no_byte_is_incomplete_at_any_level(mode: str, liars: Liars, base: int) -> None:
    answer = liars.publish("silent", mode=mode, verify="off")
    named(answer, "INCOMPLETE", set())
    assert "expected 262144 payload bytes, the transport put 0 in place" in answer["text"], answer


@pytest.mark.parametrize("mode", MODES)
def test_a_source_byte_that_changes_after_hashing_fails_finish(mode: str, liars: Liars, base: int) -> None:
    answer = liars.publish("", mutate=True, mode=mode)
    assert not answer["ok"] and answer["failure"]["reason"] == "DIGEST_MISMATCH", answer
    assert answer["failure"]["tensors"] == [TENSOR] and TENSOR in answer["text"], answer
    assert answer["failure"]["member"].partition("/")[0] in ("r0", "r1"), answer
    liars.undone(mode, base)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("defect", [*LOADERS, *WIRES])
def test_without_verification_the_same_defects_go_through(defect: str, mode: str, liars: Liars, base: int) -> None:
    """The control: it is the evidence that catches them, and nothing else."""
    answer = liars.publish(defect, mode=mode, verify="off")
    assert answer["ok"] and answer["ready"] == ["r0", "r1"], answer
    assert liars.wrong("r1") == {**LOADERS, **WIRES}[defect] and liars.wrong("r0") == set()
