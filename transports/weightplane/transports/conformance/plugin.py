"""Pytest plug-in: fixtures ``transport_name``, ``pool`` and ``fleet`` for the kit's cases.

A module names its transport in ``TRANSPORT``; else ``--transport NAME`` does (repeatable). Where members' tensors live
it says in ``DEVICES`` (one, or a tuple), else ``--device`` does (repeatable): ``cpu`` (the default), ``cuda`` (senders
on GPU 0, receivers on the others; of a collective transport every member has its own) or ``cuda:0`` (all on that one).
Cases on a GPU are marked ``gpu``. Cases that need much memory are marked ``large`` and run with ``--large``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--transport``, ``--device`` and ``--large``."""
    group = parser.getgroup("weightplane transports")
    group.addoption("--transport", action="append", default=[], help="transport to run the conformance kit against")
    group.addoption("--device", action="append", default=[], help="where tensors live: cpu, cuda or cuda:N")
    group.addoption("--large", action="store_true", default=False, help="run cases that need many GiB of memory")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")
    config.addinivalue_line("markers", f"large: {_large(config)}")
    config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, where that is installed")


def _large(config: pytest.Config) -> str:
    """What ``large`` means, by the option that is there; ours is not where a test module is what loads the plug-in."""
    weightplane_s_own = config.getoption("--run-large", default=None) is not None
    return f"needs many GiB of memory; run with {'--run-large' if weightplane_s_own else f'-p {__name__} --large'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is large unless asked for (``--run-large`` is Weightplane's own word for it), and what has no GPU."""
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("--large", default=False) and not config.getoption("--run-large", default=False):
        for item in items:
            if item.get_closest_marker("large"):
                item.add_marker(pytest.mark.skip(reason=_large(config)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each case for the module's transport, or for those of the command line."""
    if "transport_name" in metafunc.fixturenames and not _has_its_own(metafunc):
        named = getattr(metafunc.module, "TRANSPORT", None)
        names = [named] if named else metafunc.config.getoption("--transport", default=[]) or []
        metafunc.parametrize("transport_name", names, scope="session")
        where: str | tuple[str, ...] = getattr(metafunc.module, "DEVICES", ())
        devices = [where] if isinstance(where, str) else list(where)
        devices = devices or metafunc.config.getoption("--device", default=[]) or []
        if devices:  # else the ids stay without it
            marked = [pytest.param(d, marks=pytest.mark.gpu if d.startswith("cuda") else ()) for d in devices]
            metafunc.parametrize("member_device", marked, scope="session")


def _has_its_own(metafunc: pytest.Metafunc) -> bool:
    """Whether a test is none of ours, and has ``transport_name`` for a parameter."""
    marks = metafunc.definition.iter_markers("parametrize")
    names = [n for m in marks for n in (m.args[0].split(",") if isinstance(m.args[0], str) else m.args[0])]
    return "transport_name" in [n.strip() for n in names]


@pytest.fixture(scope="session")
def member_device() -> str:
    """Where members' tensors live."""
    return "cpu"


@pytest.fixture(scope="session")
def pool(transport_name: str, member_device: str) -> Iterator[Any]:
    """Peers of the transport under test, shared by its cases."""
    from .harness import Pool

    made = Pool(transport_name, member_device)
    yield made
    made.close()


@pytest.fixture
def fleet(pool: Any) -> Iterator[Callable[..., Any]]:
    """Makes a ``harness.Fleet``; its peers are given back after the test."""
    from .harness import Fleet, NotHere

    made: list[Fleet] = []

    def make(model: str, **options: Any) -> Fleet:
        try:
            made.append(Fleet(pool, model, **options))
        except NotHere as e:
            pytest.skip(str(e))
        return made[-1]

    yield make
    for one in made:
        one.close()
