"""Sources over a real gloo process group of four spawned ranks: FSDP2, HSDP, 2-D DTensors, gathers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer_agent.ranks import Ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return Ranks("tests.trainer_agent.rank_sources:everything", 4, folder).wait()


def test_fsdp2_shards_reach_a_full_receiver_without_a_gather(results: list[dict[str, Any]]) -> None:
    got = [r["fsdp"] for r in results]
    assert got[0]["aliases"] == {"head.weight": "embed.weight"}
    assert sum(r["sent"] for r in got) == got[0]["total"]
    assert max(r["sent"] for r in got) < got[0]["total"] / 2


def test_hsdp_replicas_share_the_work_and_send_each_byte_once(results: list[dict[str, Any]]) -> None:
    got = [r["hsdp"] for r in results]
    assert sum(r["sent"] for r in got) == got[0]["total"]
    assert all(r["sent"] for r in got)


def test_dtensors_cut_in_two_dimensions_or_twice_in_one(results: list[dict[str, Any]]) -> None:
    got = [r["tensor_parallel"] for r in results]
    assert sum(r["sent"] for r in got) == got[0]["total"]


def test_a_pending_sum_is_refused_by_name(results: list[dict[str, Any]]) -> None:
    assert all("tensor 'sum' is P" in r["refusals"] and "not done yet" in r["refusals"] for r in results)


def test_full_tensors_gathered_in_the_iterator(results: list[dict[str, Any]]) -> None:
    assert results[0]["gathered"] == results[1]["gathered"] and "head.weight" in results[0]["gathered"]
