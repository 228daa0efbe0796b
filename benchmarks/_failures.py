"""A pytest plug-in: what failed is written at once, so that a run that is cut off has told what it found.

``python -m pytest -p benchmarks._failures`` with ``FAILURES=PATH`` in the environment.
"""

from __future__ import annotations

import os

import pytest

__all__ = ["pytest_runtest_logreport"]

_MOST = 6000  # characters of one failure: its end says what it was


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a failure of any phase to the file."""
    path = os.environ.get("FAILURES", "")
    if path and report.failed:
        with open(path, "a", encoding="utf-8") as out:
            out.write(
                f"=== {report.nodeid} ({report.when}, {report.duration:.1f} s)\n{report.longreprtext[-_MOST:]}\n\n"
            )
