"""Plumbing for the markers gpu, large and alone (see pyproject.toml) and for Ctrl-C; no fixtures live here."""

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest

# A shell starts background jobs with SIGINT ignored, and children inherit that: then nothing here could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: The files that take longest, a minute of processes and more: they begin first, so that at the end no process is left
#: alone with one.
LONGEST = (
    "tests/cases/test_cards.py",
    "tests/clients/test_conformance.py",
    "tests/clients/test_cpp.py",
    "tests/cases/test_cases.py",
    "tests/clients/test_node.py",
    "tests/transports/test_ucx.py",
    "tests/transports/test_after_faults.py",
    "tests/transports/test_conformance.py",
    "tests/transports/test_grpc.py",
    "tests/transports/test_shm.py",
    "tests/transports/test_nccl_logic.py",
    "tests/trainer_agent/test_publisher_failures.py",
    "tests/trainer_agent/test_collective.py",
    "tests/trainer_agent/test_spread.py",
    "tests/trainer_agent/test_publisher_embedding.py",
    "tests/transports/test_cuda_ipc_on_host.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-large", action="store_true", help="run the tests marked large (much memory or time)")
    parts = ("all", "shared", "alone")
    parser.addoption("--part", choices=parts, default="all", help="shared: what is not marked alone; alone: what is")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-large"):
        skip(items, "large", "needs much memory or time: pass --run-large")
    if any(item.get_closest_marker("gpu") for item in items) and not has_cuda():
        skip(items, "gpu", "needs a CUDA device")
    part = config.getoption("--part")
    if part == "shared":
        rank = {name: i for i, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))
    if part != "all":
        chosen: list[pytest.Item] = []
        others: list[pytest.Item] = []
        for item in items:
            alone = item.get_closest_marker("alone") is not None
            (chosen if alone is (part == "alone") else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a test of bad input logged may be no UTF-8: under xdist it would end the whole run, not the test."""
    return sendable((yield))


def sendable(value: Any) -> Any:
    """With lone surrogates written as escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {sendable(k): sendable(v) for k, v in value.items()}
    return type(value)(map(sendable, value)) if isinstance(value, list | tuple) else value


def skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def has_cuda() -> bool:
    """Whether torch sees a CUDA device. Asked only when a gpu test is collected: importing torch takes seconds."""
    # By NVML: CUDA's own count leaves a process whose forks (vLLM's engine, say) may use no card.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return torch.cuda.is_available()
