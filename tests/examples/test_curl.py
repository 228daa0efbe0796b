"""examples/curl.md: every command of it, as it stands there, against a real control plane with two replicas."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.scripted import FAST, fleet, server
from weightplane.controlplane.server.app import ServerConfig
from weightplane.controlplane.store.memory import MemoryStore

PAGE = Path(__file__).parents[2] / "examples" / "curl.md"


def commands() -> list[str]:
    return re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(script: str, gateway: str) -> str:
    env = {**os.environ, "GATEWAY": f"http://{gateway}", "no_proxy": "*"}
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{script}"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{script}\nended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_every_command_of_the_page_works_and_says_what_the_page_says() -> None:
    config = ServerConfig(MemoryStore(), core=FAST, gateway="127.0.0.1:0")
    async with server(config) as running, fleet(running.address, 2) as (trainer, _):
        await trainer.publish()
        setup, *blocks = commands()
        said = [await asyncio.to_thread(run, setup + block, running.gateway) for block in blocks]
        groups, replicas, check, updates, watched, *_, policy, wrong = said
        assert json.loads(groups)["groups"][0]["committed"]["version"] == "1"
        assert [r["replica_id"] for r in json.loads(replicas)["replicas"]] == ["r0", "r1"]
        assert json.loads(check)["routable"] is True
        assert json.loads(updates)["updates"][0]["phase"] == "UPDATE_PHASE_COMMITTED"
        assert json.loads(watched.splitlines()[0])["full"] and "error" in json.loads(watched.splitlines()[-1])
        assert json.loads(policy)["group"]["policy"]["min_replicas"] == 2
        assert '"reason": "UNKNOWN_GROUP"' in wrong and wrong.strip().endswith("curl ended with 22")
        await trainer.publish()
