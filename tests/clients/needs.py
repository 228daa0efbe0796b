"""Whether the clients in other languages are built here: what a test of them asks before it begins.

Without them a test is skipped, with the reason. ``WEIGHTPLANE_NEEDS_CLIENTS`` names those that must be there (``cpp``,
``node``; ``1``: all): their tests fail instead. CI sets it, so that a build that went missing cannot pass for green.
``WEIGHTPLANE_CPP_PROGRAM`` is another ``publish_checkpoint`` to test, the portable one say.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from tests.cli.fleet import ROOT

__all__ = ["BUILT", "NODE", "PORTABLE", "PROGRAM", "missing", "need", "with_nccl"]

BUILT = ROOT / ".build-cpp"
PROGRAM = Path(os.environ.get("WEIGHTPLANE_CPP_PROGRAM") or BUILT / "publish_checkpoint")
#: The same without Debian's libraries: for a GPU host.
PORTABLE = ROOT / ".build-cpp-portable" / "publish_checkpoint"
NODE = ROOT / "clients" / "node"


def with_nccl() -> dict[str, str]:
    """For the environment of a C++ trainer: where torch's NCCL is, if that came as a package."""
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = [str(Path(at) / "lib") for at in (spec.submodule_search_locations or ())] if spec else []
    before = os.environ.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [*folders, before]))} if folders else {}


def missing(client: str) -> str:
    """What is not there, and what makes it; empty if all is."""
    if client == "cpp":
        return "" if PROGRAM.exists() else "the C++ client is not built: make clients-cpp says what it lacks"
    assert client == "node", client
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "Node and npm are not installed"
    there = (NODE / "node_modules" / ".stamp").exists()
    return "" if there else "clients/node has no modules: make clients/node/node_modules/.stamp"


def need(client: str) -> None:
    """Go on where the client is there; else skip, or fail where it must be."""
    why = missing(client)
    if not why:
        return
    asked = os.environ.get("WEIGHTPLANE_NEEDS_CLIENTS", "").replace(",", " ").split()
    if "1" in asked or client in asked:
        pytest.fail(f"{why}; WEIGHTPLANE_NEEDS_CLIENTS asks for it", pytrace=False)
    pytest.skip(why)
