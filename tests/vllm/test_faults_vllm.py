"""Faults of a fleet with a real vLLM, as ``make chaos`` injects them: those that end no engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.case import Case
from tests.faults.vllm_cases import VLLM_CASES

HERE = [c for c in VLLM_CASES if c.ci]


@pytest.fixture(scope="module")
def runner(
    golden: Mapping[str, list[list[int]]], folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[object]:
    from tests.faults.vllm import Engine, fleet

    with ExitStack() as stack:
        engine = stack.enter_context(Engine(tmp_path_factory.mktemp("faults"), folders["A"].parent))
        yield fleet(stack, engine, "shm", golden)


@pytest.mark.parametrize("case", HERE, ids=[c.id for c in HERE])
def test_a_fault_ends_in_time_is_named_and_leaves_nothing_behind(case: Case, runner: object) -> None:
    from tests.faults.vllm import VllmRunner

    assert isinstance(runner, VllmRunner)
    try:
        row = runner.run(case)
        print(row)
        assert not row.violations
    except BaseException:
        print(runner.fleet.logs())
        raise
