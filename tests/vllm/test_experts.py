"""A mixture of experts: every expert follows, and a loader that loses one in silence is caught."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference_agent.server import Server
from weightplane.trainer_agent import UpdateFailed

from .models import ENVIRONMENT, PROMPTS
from .test_offline import Program

Golden = dict[str, list[list[int]]]
EXPERT = "layers.1.mlp.experts.3."


@pytest.fixture(scope="module")
def program(golden: object, folders: dict[str, Path], plane: Server) -> Iterator[Program]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
        made = Program(folders["MA"], plane, "experts", worker_extension_cls="tests.vllm.planted.Planted")
        yield made
        made.close()


def test_every_expert_follows(program: Program, folders: dict[str, Path], golden: Golden) -> None:
    assert program.generate(PROMPTS) == golden["MA"]
    for target, mode in (("MB", "staged"), ("MA", "in_place")):
        assert {r.state for r in program.publish(folders[target], mode=mode).replicas} == {"READY"}
        assert program.generate(PROMPTS) == golden[target]


def test_a_lost_expert_is_caught_and_named(program: Program, folders: dict[str, Path], golden: Golden) -> None:
    """Counting what the loaders wrote: staged, after the decision: DIRTY and named; in place the finish fails."""
    program.publish(folders["MA"])
    program.llm.collective_rpc("drop_names", args=(EXPERT,))
    receipt = program.publish(folders["MB"])
    (replica,) = receipt.replicas
    assert receipt.committed and replica.state == "DIRTY" and replica.failure is not None
    assert "layers.1.mlp.experts" in replica.failure.message and "fewer elements" in replica.failure.message
    assert "dirty" in program.engine.holders()
    with pytest.raises(UpdateFailed, match=r"layers\.1\.mlp\.experts"):
        program.publish(folders["MB"], mode="in_place")
    program.llm.collective_rpc("drop_names", args=("",))
    assert {r.state for r in program.publish(folders["MB"]).replicas} == {"READY"}
    assert program.generate(PROMPTS) == golden["MB"]
