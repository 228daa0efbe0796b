"""One program with a vLLM inside, in a process of its own: A -> B -> A -> B, and whether each is a fresh engine's.

``python -m tests.vllm.product_cell LLM|AsyncLLM A B``, with both checkpoints' tokens as JSON on standard input.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.inference_agent.server import FAST, Server
from weightplane.trainer_agent import Publisher, SafetensorsSource

from . import test_async_llm, test_offline
from .models import PROMPTS

ROUNDS = ((1, "staged"), (0, "in_place"), (1, "in_place"))  # A is what it started with


def main(way: str, folders: list[Path], golden: list[list[list[int]]]) -> None:
    """Raises where something is not as it should be."""
    plane = Server(replace(FAST, ttl_s=10.0)).start()
    program: Any
    if way == "LLM":
        program = test_offline.Program(folders[0], plane, "async")
        tokens = lambda: program.generate(PROMPTS)  # noqa: E731
        label = program.llm.get_weight_version
    else:
        program = test_async_llm.Program(folders[0], plane)
        tokens = program.all_tokens
        label = lambda: program.run(program.llm.get_weight_version())  # noqa: E731
    try:
        assert tokens() == golden[0], "as it started"
        for step, (target, mode) in enumerate(ROUNDS, 1):
            source = SafetensorsSource(folders[target])
            with Publisher(plane.address, "async", source, takeover=True, mode=mode) as publisher:
                receipt = publisher.publish(step=step)
            assert {(r.state, r.mode) for r in receipt.replicas} == {("READY", mode.upper())}
            assert tokens() == golden[target], f"update {step}, {mode}"
            assert label() == str(receipt.version)
    finally:
        program.close()
        plane.close()
    print("exact")


if __name__ == "__main__":
    main(sys.argv[1], [Path(p) for p in sys.argv[2:4]], json.load(sys.stdin))
