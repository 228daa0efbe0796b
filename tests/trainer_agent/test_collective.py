"""Publishes by four ranks together: real FSDP2 over gloo, spawned processes, a real control plane and replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_agent.fleet import Fleet, eventually, fleet
from tests.trainer_agent.rank_publish import Net, digests, whole
from tests.trainer_agent.ranks import Ranks
from weightplane.controlplane.core.model import Config
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine

PATIENT = Config(beat_s=0.5, ttl_s=2.5, quiesce_s=2.0)  # two cores, and four ranks that import torch
pytestmark = [pytest.mark.timeout(240), pytest.mark.alone]  # it counts a second across four ranks on two cores


def check(f: Fleet, step: int, replicas: tuple[str, ...], ranks: Ranks | None = None) -> None:
    want = digests(whole(step))
    for name in replicas:
        told = ranks.log(0) if ranks is not None else ""
        assert digests(f.engines[name].modules[0]) == want, f"{name} at step {step}\n{told}"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every scenario, once: what each rank saw. The fleet's side is asserted here."""
    folder = tmp_path_factory.mktemp("collective")
    with fleet(PATIENT) as f:
        for name in ("r0", "r1"):
            f.replica(name, TorchModuleEngine(Net()))
        arguments = {"address": f.address, "folder": str(folder)}
        ranks = Ranks("tests.trainer_agent.rank_publish:collective", 4, folder, arguments)
        try:
            for step in (1, 2, 3, 4):
                heard(ranks, folder, f"published{step}")
                check(f, step, ("r0", "r1"), ranks)
                (folder / f"checked{step}").touch()
            heard(ranks, folder, "kill")
            f.agents["r1"].stop(leave=False)
            (folder / "killed").touch()
            heard(ranks, folder, "published14")
            check(f, 14, ("r0",), ranks)
            (folder / "checked14").touch()
            yield ranks.wait(60)
        finally:
            ranks.kill()


def heard(ranks: Ranks, folder: Path, word: str) -> None:
    def look() -> bool:
        for rank, process in enumerate(ranks.processes):
            assert process.poll() in (None, 0), f"rank {rank} ended:\n{ranks.log(rank)}"
        return (folder / word).exists()

    eventually(look, timeout=90, what=word)


def test_local_shards_without_a_gather(results: list[dict[str, Any]]) -> None:
    for step in ("shards1", "shards2", "in_place"):
        assert all(r[step].get("ready") == ["r0", "r1"] for r in results), [r[step] for r in results]
        assert len({r[step]["version"] for r in results}) == 1


def test_full_tensors_gathered_by_the_users_collectives(results: list[dict[str, Any]]) -> None:
    for step in ("gathers3", "gathers4"):
        assert all(r[step].get("ready") == ["r0", "r1"] for r in results), [r[step] for r in results]


def test_one_ranks_error_is_raised_on_all_within_a_second(results: list[dict[str, Any]]) -> None:
    got = [r["source_breaks"] for r in results]
    assert got[2]["error"] == "ArithmeticError" and "lost a shard" in got[2]["text"]
    for r in (got[0], got[1], got[3]):
        assert r["error"] == "UpdateFailed" and r["reason"] == "PEER_RANK_FAILED", r
        assert "rank/2" in r["failures"] and "rank 2 lost a shard" in r["text"], r
        assert r["at"] - results[2]["broke_at"] < 1.0


def test_an_error_before_the_start_is_raised_on_all(results: list[dict[str, Any]]) -> None:
    got = [r["before_start"] for r in results]
    assert got[1]["error"] == "ArithmeticError" and got[1]["at"] - results[1]["mute_at"] < 1.0
    for r in (got[0], got[2], got[3]):
        assert r["error"].startswith("Update") and r["at"] - results[1]["mute_at"] < 1.5, r
    assert all(not r["after_that"]["error"] for r in results), [r["after_that"] for r in results]


def test_ranks_that_disagree_are_told_so(results: list[dict[str, Any]]) -> None:
    got = [r["disagree"] for r in results]
    assert all(r["error"].startswith("Update") for r in got), got
    assert max(r["at"] for r in got) - min(r["at"] for r in got) < 2.0
    assert all("the same calls of publish" in r["text"] for r in got), got
    assert all(not r["agree"]["error"] for r in results), [r["agree"] for r in results]


def test_ranks_stuck_in_a_collective_are_named_and_the_fleet_is_freed(results: list[dict[str, Any]]) -> None:
    got = [r["stuck"] for r in results]
    for r in got:
        assert r["error"] == "UpdateFailed" and "stuck in the source's iterator after tensor" in r["text"], r
        assert any(m.startswith("rank/") for m in r["failures"]), r
    assert all(4.0 < r["stuck_for"] < 8.0 for r in results)  # raised when the collective returned, not before
    assert all(not r["unstuck"]["error"] for r in results), [r["unstuck"] for r in results]


def test_a_dead_replica_leaves_nobody_in_a_collective_and_a_retry_goes_on(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert r["retried"].get("ready") == ["r0"] and r["retried"]["retries"] == 1, r["retried"]


@pytest.mark.chaos
@pytest.mark.parametrize("heartbeat", ["stream", "helper"])
def test_a_rank_that_is_killed_is_named_to_the_others(tmp_path: Path, heartbeat: str) -> None:
    with fleet(PATIENT) as f:
        f.replica("r0", TorchModuleEngine(Net()))
        arguments = {"address": f.address, "folder": str(tmp_path), "heartbeat": heartbeat}
        ranks = Ranks("tests.trainer_agent.rank_publish:killed", 2, tmp_path, arguments)
        try:
            assert ranks.processes[1].wait(90) == -9, ranks.log(1)
            assert ranks.processes[0].wait(30) == 0, ranks.log(0)
        finally:
            ranks.kill()
        got = json.loads((tmp_path / "rank0.json").read_text())
        died = json.loads((tmp_path / "rank1.json").read_text())
        assert got["error"] == "UpdateFailed" and "rank/1" in got["failures"], got
        # InitTransfer itself gives a lease of 2 TTL, which a stream that ends does not cut short
        within = 2 * PATIENT.ttl_s if heartbeat == "stream" else PATIENT.beat_s
        assert got["reason"] == "MEMBER_LOST" and got["at"] - died < within + 1.5, got
        # a successor takes over at once
        module = whole(21)
        f.publisher(module, takeover=True, incarnation="job-3").publish(21)
        check(f, 21, ("r0",))
