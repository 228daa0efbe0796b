"""A mixture of experts: every expert follows, and a loader that loses one in silence is caught."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference_agent.server import Server
from weightplane.trainer_agent import Publisher, PublishError, SafetensorsSource, UpdateFailed

from .models import CORE, ENVIRONMENT, PROMPTS
from .test_offline import Program

Golden = dict[str, list[list[int]]]
EXPERT = "layers.1.mlp.experts.3."


@pytest.fixture(scope="module")
def program(golden: object, folders: dict[str, Path], plane: Server) -> Iterator[Program]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", CORE)
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


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_a_full_disk_is_named_with_the_tensor_and_heals(
    program: Program, folders: dict[str, Path], golden: Golden, mode: str
) -> None:
    """ENOSPC of the kernel's own in the middle of a load: staged, after the decision; in place the finish fails."""
    program.publish(folders["MA"])
    program.llm.collective_rpc("fill_disk", args=(EXPERT,))
    if mode == "staged":
        (replica,) = program.publish(folders["MB"]).replicas
        assert replica.state == "DIRTY" and replica.replica_id == "a" and replica.failure is not None
        failure = replica.failure
    else:
        with pytest.raises(UpdateFailed) as failed:
            program.publish(folders["MB"], mode="in_place")
        failure = failed.value.failures["a"]
    assert "No space left on device" in failure.message and EXPERT in failure.message
    assert len(failure.tensors) == 1 and EXPERT in failure.tensors[0]
    assert "dirty" in program.engine.holders()
    program.llm.collective_rpc("fill_disk", args=("",))
    for target in ("MB", "MA"):
        assert {r.state for r in program.publish(folders[target], mode=mode).replicas} == {"READY"}
        assert program.generate(PROMPTS) == golden[target]


def test_full_shared_memory_is_named_and_costs_the_engine_nothing(
    program: Program, folders: dict[str, Path], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's ring does not fit any more when its channel opens: nothing began, vLLM serves on."""
    before = program.publish(folders["MA"])
    room, asked = os.posix_fallocate, itertools.count()

    def full(fd: int, offset: int, size: int) -> None:
        if next(asked):  # the transport's own trial still had room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room(fd, offset, size)

    source = SafetensorsSource(folders["MB"])
    with Publisher(program.plane.address, program.group, source, takeover=True, transport="shm") as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(PublishError, match=r"KiB are needed.*No space left on device.*--shm-size"):
                publisher.publish(step=program.step)
        assert program.engine.held()[0].version == before.version and program.generate(PROMPTS) == golden["MA"]
        program.step += 1
        assert {r.state for r in publisher.publish(step=program.step).replicas} == {"READY"}
    assert program.generate(PROMPTS) == golden["MB"]
