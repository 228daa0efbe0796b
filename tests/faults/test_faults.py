"""Some forty faults of the matrix, on one fleet of real processes over shared memory: the judge finds nothing wrong.

A case that fails leaves the fleet in doubt: the next gets a new one. The whole matrix is ``make chaos``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.case import Case
from tests.faults.cases import CASES
from tests.faults.fleet import FaultFleet
from tests.faults.run import Runner
from tests.faults.small import cannot

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.timeout(120)]

HERE = [c for c in CASES if c.ci]


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.runner: Runner | None = None

    def get(self, small: bool) -> Runner:
        if self.runner is not None and (self.runner.fleet.disks is not None) is not small:
            self.drop()
        if self.runner is None:
            self.number += 1
            folder = self.folder / str(self.number)
            folder.mkdir()
            fleet = FaultFleet(folder, small=small)
            try:
                fleet.launch()
            except BaseException:
                print(fleet.logs())
                fleet.__exit__()
                raise
            self.runner = Runner(fleet)
        return self.runner

    def drop(self) -> None:
        if self.runner is not None:
            self.runner.fleet.__exit__()
            self.runner = None


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("faults"))
    yield bench
    bench.drop()


@pytest.mark.parametrize("case", HERE, ids=[c.id for c in HERE])
def test_a_fault_ends_in_time_is_named_and_leaves_nothing_behind(case: Case, bench: Bench) -> None:
    if case.small and (why := cannot()):
        pytest.skip(why)
    runner = bench.get(case.small)
    try:
        row = runner.run(case)
        print(row)
        assert not row.violations
    except BaseException:
        print(runner.fleet.logs())
        bench.drop()
        raise
