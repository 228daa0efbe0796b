"""No thread of ours is inside gRPC when the interpreter ends, however little its user closed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cases.base import site

_THREADS = """
import atexit, sys, threading

def left():  # registered first, so called last
    names = [t.name for t in threading.enumerate() if t.name.startswith(("weightplane-watch", "weightplane-session"))]
    print("left", names, flush=True)

atexit.register(left)
"""

TRAINER = (
    _THREADS
    + """
from tests.cases.base import Small
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource

publisher = Publisher(sys.argv[1], "g", ModuleSource(Small(1)), transport="grpc")
print(publisher.publish(1).ready == ("r0",), flush=True)
"""
)

REPLICA = (
    _THREADS
    + """
from tests.cases.base import Small
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine

agent = InferenceAgent(sys.argv[1], "g", "guest", TorchModuleEngine(Small(2)), transports=["grpc"]).start()
print(agent.wait_live(60), flush=True)
"""
)


@pytest.mark.parametrize("script", [TRAINER, REPLICA], ids=["trainer", "replica"])
def test_a_process_that_closes_nothing_leaves_no_thread_in_a_stream(script: str) -> None:
    with site("r0") as f:
        command = [sys.executable, "-c", script, f.address]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "left []"], done.stdout + done.stderr
