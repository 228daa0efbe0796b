"""Plumbing for the markers gpu and large (pyproject.toml says what they mean) and for Ctrl-C; no fixtures live here."""

import signal

import pytest

# A shell starts background jobs with SIGINT ignored, and children inherit that: then nothing here could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-large", action="store_true", help="run the tests marked large (many GiB of memory)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-large"):
        skip(items, "large", "needs many GiB of memory: pass --run-large")
    if any(item.get_closest_marker("gpu") for item in items) and not has_cuda():
        skip(items, "gpu", "needs a CUDA device")


def skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def has_cuda() -> bool:
    """Whether torch sees a CUDA device. Asked only when a gpu test is collected: importing torch takes seconds."""
    import torch

    return torch.cuda.is_available()
