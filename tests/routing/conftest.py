"""Shows what went through the routers after the run."""

from __future__ import annotations

from typing import Any

from tests.routing.routed import TEXTS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for title, text in TEXTS:
        terminalreporter.section(title)
        terminalreporter.write_line(text)
