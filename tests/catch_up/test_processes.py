"""Catch-up as a user sees it: real processes, the command line, SIGKILL."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.checkpoints import tiny
from tests.cli.fleet import Launched
from tests.cli.site import GROUP, Site, engine_of


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    launched = Launched(tmp_path)
    plane = ["controlplane", "--listen", "127.0.0.1:0", "--store", "memory:", "--beat", "0.5", "--ttl", "3"]
    address = launched.start("plane", *plane)["address"]
    yield Site(launched, address, tiny(tmp_path / "one.safetensors", 1.0))
    launched.stop()


def replica(site: Site, name: str, *options: str) -> None:
    (site.launched.folder / f"{name}.json").unlink(missing_ok=True)
    words = ["inference-agent", "-a", site.address, "-g", GROUP, "--replica-id", name, *options]
    site.launched.start(name, *words, *engine_of(site.checkpoint))


def wait_ready(site: Site, name: str, version: int, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        told: dict[str, Any] = {r["replica_id"]: r for r in site.json("status", "-g", GROUP)["replicas"]}
        r = told.get(name, {})
        if r.get("weights", "").endswith("READY") and r.get("held", {}).get("version") == str(version):
            return
        assert time.monotonic() < end, f"{r}\n{site.launched.log('plane')}\n{site.launched.log(name)}"


def test_one_that_was_killed_is_back_at_the_committed_version_while_no_trainer_lives(site: Site) -> None:
    replica(site, "a", "--retain", "memory")
    replica(site, "b")
    site.run("publish", str(site.checkpoint), "-g", GROUP, "--step", "7")  # the trainer is gone with the command
    replica(site, "late")
    wait_ready(site, "late", 1)
    site.launched.processes["b"].kill()
    site.launched.processes["b"].wait()
    replica(site, "b")
    wait_ready(site, "b", 1)


def test_a_folder_is_as_good_and_leaves_nothing_in_it_whoever_dies(site: Site, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    replica(site, "a", "--retain", str(kept), "--transport", "grpc")
    site.run("publish", str(site.checkpoint), "-g", GROUP, "--step", "7")
    replica(site, "b", "--transport", "grpc")
    wait_ready(site, "b", 1)
    site.launched.processes["a"].kill()
    site.launched.processes["a"].wait()
    assert os.listdir(kept) == []


def test_what_cannot_be_retained_is_said_before_anything_starts(site: Site) -> None:
    nowhere = site.launched.folder / "nowhere"
    words = ["inference-agent", "-g", GROUP, "--replica-id", "a", "--retain", str(nowhere)]
    told = site.run(*words, *engine_of(site.checkpoint), code=2)
    assert f"retain: expected 'memory' or a folder, found '{nowhere}'" in " ".join(told.split())
