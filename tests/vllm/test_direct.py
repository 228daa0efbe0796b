"""Past vLLM's loaders: a real engine whose layers keep plain weights, as they do on a GPU (see ``plain``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.inference_agent.server import Server
from weightplane.controlplane import failpoints
from weightplane.trainer_agent import UpdateFailed

from .fleet import tensors_of
from .models import ENVIRONMENT, PROMPTS
from .test_offline import Program

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm sets up .venv-vllm for it"
)
Golden = dict[str, list[list[int]]]
BUCKET = 1 << 18


@pytest.fixture(scope="module")
def plain_golden(folders: dict[str, Path]) -> Golden:
    from . import plain

    return plain.goldens({n: folders[n] for n in ("A", "B", "TA16", "TB16")})


@pytest.fixture(scope="module", params=["A", "TA16"])
def program(
    request: pytest.FixtureRequest, plain_golden: Golden, folders: dict[str, Path], plane: Server
) -> Iterator[Program]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("WEIGHTPLANE_TEST_PLAIN", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        name = str(request.param)
        made = Program(folders[name], plane, f"direct-{name}", worker_extension_cls="tests.vllm.plain.Plain")
        yield made
        made.close()


def publish(program: Program, weights: Any, way: str, **options: Any) -> Any:
    """Publish, and look at how it was loaded."""
    receipt = program.publish(weights, **options)
    (load,) = program.engine.loads
    assert {r.state for r in receipt.replicas} == {"READY"}
    assert load["way"] == way, load
    if options.get("verify") != "off":
        live = way == "direct" and options.get("mode") == "in_place"
        consumed = "CONSUMED" if options.get("mode") == "in_place" else "RECEIVED"
        assert {r.evidence for r in receipt.replicas} == {"LIVE" if live else consumed}
        assert load["read_back"] == (way == "direct")
    assert program.llm.get_weight_version() == str(receipt.version)
    return receipt


@pytest.fixture
def known(program: Program, folders: dict[str, Path]) -> None:
    """The engine has A by a full load, and the map was seen to be right."""
    program.publish(folders[program.first])
    if program.engine.loads[0]["way"] == "loaders":
        publish(program, folders[program.first], "direct")


def test_weights_go_there_and_back_past_the_loaders(
    program: Program, folders: dict[str, Path], plain_golden: Golden
) -> None:
    """The first full load of a manifest goes through them and proves the map; from then on the bits are the same."""
    a, b = program.first, program.other
    assert program.generate(PROMPTS) == plain_golden[a]
    for n, (target, mode) in enumerate(
        [(b, "in_place"), (a, "in_place"), (b, "staged"), (a, "staged"), (b, "in_place"), (a, "staged")]
    ):
        publish(program, folders[target], "direct" if n else "loaders", mode=mode, bucket_bytes=BUCKET)
        assert program.generate(PROMPTS) == plain_golden[target], (n, target, mode)
    assert "first full load" not in program.engine.loads[0]["why"]


def test_digests_are_what_the_level_asks(
    program: Program, folders: dict[str, Path], plain_golden: Golden, known: None
) -> None:
    for verify, mode in (("off", "in_place"), ("sampled", "in_place"), ("off", "staged"), ("sampled", "staged")):
        publish(program, folders[program.other], "direct", mode=mode, verify=verify)
        assert program.generate(PROMPTS) == plain_golden[program.other]


def test_the_first_load_shows_it_at_any_level(program: Program, folders: dict[str, Path], plain_golden: Golden) -> None:
    """In place nothing is kept that came: all is hashed that once, and the receipt tells what was asked."""
    for turn, verify in ((6, "sampled"), (7, "off")):
        for target, way in ((program.other, "loaders"), (program.first, "direct")):
            source = reordered(folders[target], turn)
            program.publish(source, mode="in_place", verify=verify)
            assert program.engine.loads[0]["way"] == way
            assert program.generate(PROMPTS) == plain_golden[target]


class _Once:
    """Fails at a named place, once."""

    def __init__(self, name: str, nth: int) -> None:
        self.name, self.nth = name, nth

    def __call__(self, name: str, nth: int) -> None:
        if (name, nth) == (self.name, self.nth):
            raise failpoints.FailpointError(name)


def test_an_update_in_place_that_ends_in_the_middle_is_dirty_until_the_next(
    program: Program, folders: dict[str, Path], plain_golden: Golden, known: None
) -> None:
    failpoints.set_hook(_Once("replica.receive.inside", 2))
    try:
        with pytest.raises(UpdateFailed):
            program.publish(folders[program.other], mode="in_place", bucket_bytes=BUCKET, failure="raise")
    finally:
        failpoints.set_hook(None)
    assert program.engine.mixed() and program.engine.held()[0].version == 0
    publish(program, folders[program.other], "direct", mode="in_place", bucket_bytes=BUCKET)
    assert not program.engine.mixed()
    assert program.generate(PROMPTS) == plain_golden[program.other]


def test_one_that_ends_before_the_first_byte_leaves_what_was(
    program: Program, folders: dict[str, Path], plain_golden: Golden, known: None
) -> None:
    held = program.engine.held()
    failpoints.set_hook(_Once("replica.receive.before", 1))
    try:
        with pytest.raises(UpdateFailed):
            program.publish(folders[program.other], mode="in_place", failure="raise")
    finally:
        failpoints.set_hook(None)
    assert not program.engine.mixed() and program.engine.held() == held
    assert program.generate(PROMPTS) == plain_golden[program.first]


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_a_bit_that_changes_in_live_memory_is_found(
    program: Program, folders: dict[str, Path], plain_golden: Golden, known: None, mode: str
) -> None:
    """Read back: what was received was right, what lies there is not. Named, DIRTY; the next one heals it."""
    program.llm.collective_rpc("flip", args=("model.layers.1.self_attn.qkv_proj.weight",))
    try:
        if mode == "staged":  # after the decision: committed, and this replica is not READY
            receipt = program.publish(folders[program.other], mode=mode)
            assert {r.state for r in receipt.replicas} == {"DIRTY"}
            said = str(receipt)
        else:
            with pytest.raises(UpdateFailed) as failed:
                program.publish(folders[program.other], mode=mode, failure="raise")
            said = str(failed.value)
    finally:
        program.llm.collective_rpc("flip", args=("",))
    assert "q_proj" in said, said
    assert program.engine.mixed()
    publish(program, folders[program.other], "direct", mode=mode)
    assert program.generate(PROMPTS) == plain_golden[program.other]


def reordered(folder: Path, turn: int) -> dict[str, Any]:
    """The same tensors in another order: another manifest, which is surveyed anew."""
    named = list(tensors_of(folder).items())
    return dict(named[turn:] + named[:turn])


@pytest.mark.parametrize(("how", "turn"), [("lose", 1), ("swap", 2)])
def test_a_record_that_is_wrong_is_not_used(
    program: Program, folders: dict[str, Path], plain_golden: Golden, how: str, turn: int
) -> None:
    """One that misses a copy is incomplete; one that names the wrong places is found out by the first load."""
    program.llm.collective_rpc("misrecord", args=(how,))
    try:
        for target, mode in ((program.other, "staged"), (program.first, "in_place"), (program.other, "staged")):
            publish(program, reordered(folders[target], turn), "loaders", mode=mode)
            assert program.generate(PROMPTS) == plain_golden[target]
    finally:
        program.llm.collective_rpc("misrecord", args=("",))
    why = program.engine.loads[0]["why"]
    assert ("written" in why) if how == "lose" else ("k_proj" in why), why


def test_a_tensor_that_was_replaced_is_seen(
    program: Program, folders: dict[str, Path], plain_golden: Golden, known: None
) -> None:
    """Staged it goes through the loaders; in place nothing was written yet, and the next one does."""
    turn = 3
    for mode in ("staged", "in_place"):
        for _ in range(2):
            program.publish(reordered(folders[program.first], turn))
        assert program.engine.loads[0]["way"] == "direct"
        version = program.engine.held()
        program.llm.collective_rpc("replace", args=("model.norm.weight",))
        source = reordered(folders[program.other], turn)
        if mode == "in_place":
            with pytest.raises(UpdateFailed, match="was replaced or moved"):
                program.publish(source, mode=mode, failure="raise")
            assert not program.engine.mixed() and program.engine.held() == version
        publish(program, source, "loaders", mode=mode)
        assert "replaced" in program.engine.loads[0]["why"]
        assert program.generate(PROMPTS) == plain_golden[program.other]
        turn += 1


@pytest.fixture(scope="module")
def two_workers(plain_golden: Golden, folders: dict[str, Path], plane: Server) -> Iterator[Program]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("WEIGHTPLANE_TEST_PLAIN", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        extension = "tests.vllm.plain.Plain"
        made = Program(folders["A"], plane, "direct-two", worker_extension_cls=extension, tensor_parallel_size=2)
        yield made
        made.close()


def test_two_workers_take_their_parts_from_the_slot(
    two_workers: Program, folders: dict[str, Path], plain_golden: Golden
) -> None:
    """Each keeps a part of most tensors: staged, parts are copied from the slot; in place the loaders cut them."""
    program = two_workers
    assert program.generate(PROMPTS) == plain_golden["A"]
    for n, (target, mode, way) in enumerate(
        [
            ("B", "staged", "loaders"),
            ("A", "staged", "direct"),
            ("B", "staged", "direct"),
            ("A", "in_place", "loaders"),
            ("B", "staged", "direct"),
        ]
    ):
        receipt = program.publish(folders[target], mode=mode)
        assert {r.state for r in receipt.replicas} == {"READY"}
        assert [load["way"] for load in program.engine.loads] == [way, way], (n, program.engine.loads)
        assert program.generate(PROMPTS) == plain_golden[target], (n, target, mode)
