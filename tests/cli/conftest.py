"""The processes that the commands of one test file are run against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .checkpoints import tiny
from .fleet import Launched
from .site import GROUP, Site, engine_of


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    launched = Launched(folder)
    store = f"sqlite:{folder / 'store.db'}"
    timing = ["--beat", "0.5", "--ttl", "3"]
    address = launched.start("plane", "controlplane", "--listen", "127.0.0.1:0", "--store", store, *timing)["address"]
    checkpoint = tiny(folder / "one.safetensors", 1.0)
    launched.start(
        "a",
        "inference-agent",
        *("-a", address, "-g", GROUP, "--replica-id", "a", "--label", "zone=x"),
        *engine_of(checkpoint),
    )
    made = Site(launched, address, checkpoint)
    made.run("publish", str(checkpoint), "-g", GROUP, "--step", "7")
    yield made
    launched.stop()
