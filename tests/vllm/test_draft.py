"""An ``LLM`` that drafts with a model of its own, declared frozen: updates go to its model, and never to its draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference_agent.server import Server
from weightplane.trainer_agent import UpdateFailed

from .models import CORE, ENVIRONMENT, PROMPTS, Goldens
from .test_offline import Program


@pytest.fixture(scope="module")
def program(golden: Goldens, folders: dict[str, Path], plane: Server) -> Iterator[Program]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", CORE)
        drafts = {"method": "draft_model", "model": str(folders["B"]), "num_speculative_tokens": 3}
        made = Program(
            folders["A"],
            plane,
            "draft",
            worker_extension_cls="tests.vllm.planted.Planted",
            speculative_config=drafts,
            engine_options={"frozen_draft": True},
        )
        yield made
        made.close()


def test_a_frozen_draft_stays_as_it_is_and_the_model_follows(
    program: Program, folders: dict[str, Path], golden: Goldens
) -> None:
    """Bit for bit, in the very tensors and kernels that it was born with; what is generated is the model's alone."""
    (before,) = program.llm.collective_rpc("draft_kernels")
    assert len(before) > 10, before
    assert dict(program.plane.state(program.group).replicas["a"].labels) == {"draft": "frozen"}
    for target, mode in (("B", "staged"), ("A", "in_place"), ("B", "in_place"), ("A", "staged")):
        assert {r.state for r in program.publish(folders[target], mode=mode).replicas} == {"READY"}
        assert program.generate(PROMPTS) == golden[target]
        assert program.llm.collective_rpc("draft_kernels") == [before]
    program.llm.collective_rpc("touch_draft")
    assert program.llm.collective_rpc("draft_kernels") != [before], "that is no proof"


def test_undeclared_it_is_refused_by_name_with_the_option(
    program: Program, folders: dict[str, Path], golden: Goldens
) -> None:
    """Another agent, which does not declare it, takes the engine over; and one that does again."""
    program.publish(folders["B"])
    program.restart_agent()
    for mode in ("staged", "in_place"):
        with pytest.raises(UpdateFailed, match=r"speculative_config.*frozen_draft=true"):
            program.publish(folders["A"], mode=mode)
    assert not program.plane.state(program.group).replicas["a"].labels
    assert program.generate(PROMPTS) == golden["B"]
    program.restart_agent(frozen_draft=True)
    program.publish(folders["A"])
    assert program.generate(PROMPTS) == golden["A"]
