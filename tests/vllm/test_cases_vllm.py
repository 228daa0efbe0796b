"""Cases of ``tests/cases`` about engines, on a real vLLM: right, and failing by name with a planted defect.

Each body becomes a test of its own, ``test_<id>_<what is right>``. The engine runs in this process, so that a defect
can be put into the agent's side, the worker's and the control plane.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cases.base import CaseFailed, check, must, refused, soon
from tests.inference_agent.server import Server
from weightplane.controlplane import failpoints
from weightplane.controlplane.core import ending
from weightplane.inference_agent.engines.vllm.adapter import VllmEngine
from weightplane.inference_agent.engines.vllm.offline import OfflineDriver
from weightplane.trainer_agent import PublishError, UpdateFailed

from .fleet import tensors_of
from .models import CORE, ENVIRONMENT, PROMPTS
from .orders import Orders
from .test_offline import Program

Golden = dict[str, list[list[int]]]
Patch = pytest.MonkeyPatch
K = "model.layers.1.self_attn.k_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3."


@dataclass
class Bench:
    """A real ``LLM`` with experts that holds MA, and what a fresh one generates."""

    program: Program
    folders: dict[str, Path]
    golden: Golden

    @property
    def group(self) -> Any:
        return self.program.plane.state(self.program.group)

    @property
    def weights(self) -> str:
        return str(self.group.replicas["a"].weights)

    def generates(self, name: str) -> bool:
        """Asked only while nobody holds it: a fenced vLLM answers nobody, for as long as that takes."""
        check("nobody holds it paused", not self.program.engine.holders(), self.program.engine.holders())
        return self.program.generate(PROMPTS) == self.golden[name]

    def refuses(self, what: str, tensors: dict[str, Any], *names: str) -> None:
        """A publish that does not fit is refused by name, and nothing changes."""
        before = self.program.engine.held()
        failed = refused(what, lambda: self.program.publish(tensors), UpdateFailed)
        check(what, all(n in str(failed) for n in names), failed)
        check("the engine holds what it held", self.program.engine.held() == before, self.program.engine.held())
        check("it generates as before", self.generates("MA"))


CASES: dict[str, Callable[[Bench], None]] = {}
PLANTS: dict[str, tuple[str, Callable[[Patch], None]]] = {}


def case(body: Callable[[Bench], None]) -> Callable[[Bench], None]:
    CASES[body.__name__.partition("_")[0]] = body
    return body


def plant(*ids: str, found_by: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """The defect of these cases, and how the assertion begins that must find it."""

    def register(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
        for id_ in ids:
            PLANTS[id_] = (found_by, patch)
        return patch

    return register


def fails_at(where: str, n: int) -> Callable[[str, int], None]:
    def hook(name: str, nth: int) -> None:
        if (name, nth) == (where, n):
            raise failpoints.FailpointError(name)

    return hook


@case
def C04_a_load_that_breaks_in_place_leaves_a_fenced_engine_that_heals(b: Bench) -> None:
    failpoints.set_hook(fails_at("vllm.stream.inside", 20))
    try:
        refused("the update fails", lambda: b.program.publish(b.folders["MB"], mode="in_place"), UpdateFailed)
    finally:
        failpoints.set_hook(None)
    soon("it is DIRTY", lambda: b.weights == "DIRTY")
    (on_meta,) = b.program.llm.collective_rpc("on_meta")
    check("no layer is left on meta", not on_meta, on_meta)
    check("generation is blocked", "dirty" in b.program.engine.holders(), b.program.engine.holders())
    with must("a full update heals it"):
        b.program.publish(b.folders["MB"])
    check("the values are exact", b.generates("MB"))


@plant("C04", found_by="no layer is left on meta")
def _(m: Patch) -> None:
    """A load that failed puts nothing back."""
    from weightplane.inference_agent.vllm_plugin import loading

    m.setattr(loading, "restore", lambda model: None)


@case
def C06_sending_the_engines_own_weights_changes_no_bit(b: Bench) -> None:
    (before,) = b.program.llm.collective_rpc("live_bits")
    check("there is something to compare", len(before) > 10, len(before))
    for mode in ("staged", "in_place"):
        b.program.publish(b.folders["MA"], mode=mode)
        (after,) = b.program.llm.collective_rpc("live_bits")
        changed = sorted(n for n in before if before[n] != after.get(n))
        check("the live tensors are bit-identical", not changed, changed[:5])
    check("it generates as before", b.generates("MA"))


@plant("C06", found_by="the live tensors are bit-identical")
def _(m: Patch) -> None:
    """A post-load step is applied to what is loaded already."""
    from weightplane.inference_agent.vllm_plugin import loading

    repack = loading._repack_tied

    def scaled(model: Any, found: Any) -> None:
        repack(model, found)
        model.model.norm.weight.data.mul_(1.001)

    m.setattr(loading, "_repack_tied", scaled)


@case
def C08_what_a_sleep_dropped_is_never_ready_and_what_it_kept_is_what_it_was(b: Bench) -> None:
    orders = Orders(b.program.plane.address, b.program.group)
    held = b.program.engine.held()
    orders.sleep(1)
    check(
        "who sleeps joins no update",
        "ASLEEP" in str(refused("none is left", lambda: b.program.publish(b.folders["MB"]), PublishError)),
    )
    orders.wake()
    check("the version after waking up is what is in memory", b.program.engine.held() == held and b.generates("MA"))
    orders.sleep(2)
    check("lost weights are not ready", b.weights == "DIRTY" and not any(h.version for h in b.program.engine.held()))
    orders.wake("weights")
    refused("lost weights are not served", lambda: orders.wake("kv_cache"), grpc.RpcError)
    b.program.publish(b.folders["MB"])
    check("an update makes it ready", orders.wake("kv_cache").routable and b.generates("MB"))


@plant("C08", found_by="lost weights are not ready")
def _(m: Patch) -> None:
    """A deep sleep is taken for a light one."""
    deep = VllmEngine.sleep
    m.setattr(VllmEngine, "sleep", lambda self, level: deep(self, 1))


@case
def C11_a_failed_update_leaves_no_flag_behind(b: Bench) -> None:
    failpoints.set_hook(fails_at("vllm.stream.inside", 5))
    try:
        refused("the update fails", lambda: b.program.publish(b.folders["MB"], mode="in_place"), PublishError)
    finally:
        failpoints.set_hook(None)
    soon("the failed update is over", lambda: b.group.open is None, 5)
    for mode, name in (("in_place", "MB"), ("staged", "MA")):
        with must("the next start succeeds"):
            b.program.publish(b.folders[name], mode=mode)
        check("its values are exact", b.generates(name))


@plant("C11", found_by="the failed update is over")
def _(m: Patch) -> None:
    """An aborted update is never closed."""
    m.setattr(ending, "maybe_aborted", lambda tx, u: None)


@case
def C13_an_update_completes_while_a_paused_request_stands_still(b: Bench) -> None:
    made: list[list[int]] = []
    orders = Orders(b.program.plane.address, b.program.group)
    running = threading.Event()
    step = b.program.llm.llm_engine.step

    def told() -> Any:
        outputs = step()
        running.set()
        return outputs

    b.program.llm.llm_engine.step = told
    thread = threading.Thread(target=lambda: made.extend(b.program.generate([PROMPTS[0]], 480)))
    try:
        thread.start()
        check("a request runs", running.wait(60))
        with orders.paused():
            for mode in ("staged", "in_place"):
                with must("the update completes although a paused request is in flight"):
                    b.program.publish(b.folders["MB"], mode=mode, update_timeout=10.0)
            check("the operator's pause is all that is left", b.program.engine.holders() == {"operator"})
        thread.join(120)
    finally:
        del b.program.llm.llm_engine.step
    check("the request lost nothing", made and len(made[0]) == 480)


@plant("C13", found_by="the update completes although a paused request is in flight")
def _(m: Patch) -> None:
    """Whether vLLM is paused is taken for whether no request is in flight."""
    m.setattr(OfflineDriver, "is_paused", lambda self, t: not self._llm.llm_engine.has_unfinished_requests())


@case
def M01_values_are_exact_although_a_bucket_is_smaller_than_a_layer(b: Bench) -> None:
    for name in ("MB", "MA"):
        b.program.publish(b.folders[name], mode="in_place", bucket_bytes=4096)
        check("the values are exact although memory is used again", b.generates(name))


@plant("M01", found_by="the values are exact although memory is used again")
def _(m: Patch) -> None:
    """What the loaders were given is written over by what comes next: they keep it until a layer is whole."""
    from weightplane.inference_agent.vllm_plugin import stream

    give = stream.Stream.give
    given: list[Any] = []

    def reuse(self: Any, name: str, tensor: Any) -> None:
        for earlier in given[-3:]:
            earlier.zero_()
        given.append(tensor)
        give(self, name, tensor)

    m.setattr(stream.Stream, "give", reuse)


@case
def T05_every_update_loads_as_the_first_did(b: Bench) -> None:
    for mode, name in (("staged", "MB"), ("staged", "MA"), ("in_place", "MB"), ("in_place", "MA")):
        with must("every update loads as the first"):
            (replica,) = b.program.publish(b.folders[name], mode=mode).replicas
        check("every update loads as the first", replica.state == "READY", replica.failure)
        check("it lands in the live tensors", b.generates(name))


@plant("T05", found_by="every update loads as the first")
def _(m: Patch) -> None:
    """A step after the load leaves the live tensors without the loaders that vLLM gave them."""
    from weightplane.inference_agent.vllm_plugin import loading

    forget = loading._forget_counters

    def drops(model: Any) -> None:
        forget(model)
        for tensor in model.parameters():
            if "weight_loader" in vars(tensor):
                m.delattr(tensor, "weight_loader")

    m.setattr(loading, "_forget_counters", drops)


@case
def T11_packed_experts_are_taken_apart_exactly(b: Bench) -> None:
    """vLLM's loader knows experts of one projection in one tensor; others are refused as any name is (T23)."""
    import torch

    tensors = tensors_of(b.folders["MB"])
    for i in range(3):
        names = [f"model.layers.{i}.mlp.experts.{e}.down_proj.weight" for e in range(4)]
        tensors[f"model.layers.{i}.mlp.experts.down_proj"] = torch.stack([tensors.pop(n) for n in names])
    with must("packed experts are taken"):
        b.program.publish(tensors)
    check("each expert has its own values", b.generates("MB"))


@plant("T11", found_by="each expert has its own values")
def _(m: Patch) -> None:
    """Experts are taken apart in another order."""
    from weightplane.inference_agent.vllm_plugin import loading

    class Turned(loading._Given):
        def __iter__(self) -> Iterator[tuple[str, Any]]:
            for name, tensor in super().__iter__():
                yield name, tensor.flip(0) if name.endswith("experts.down_proj") else tensor

    m.setattr(loading, "_Given", Turned)


@case
def T12_an_equal_number_of_elements_does_not_excuse_another_shape(b: Bench) -> None:
    tensors = tensors_of(b.folders["MB"])
    tensors[K] = tensors[K].reshape(tensors[K].shape[::-1]).contiguous()
    b.refuses("a shape that does not fit is refused", tensors, K)


@case
def T18_another_dtype_is_refused_at_once(b: Bench) -> None:
    tensors = tensors_of(b.folders["MB"])
    tensors[K] = tensors[K].int()
    b.refuses("a dtype that does not fit is refused", tensors, K, "int32")


@case
def T23_names_that_match_nothing_are_an_error_with_examples(b: Bench) -> None:
    tensors = {f"base_model.{n}" if EXPERT in n else n: t for n, t in tensors_of(b.folders["MB"]).items()}
    b.refuses("names that match nothing are an error", tensors, f"base_model.{EXPERT}")


@plant("T12", found_by="a shape that does not fit is refused")
@plant("T18", found_by="a dtype that does not fit is refused")
@plant("T23", found_by="names that match nothing are an error")
def _(m: Patch) -> None:
    """What the survey found is logged, and the update goes on."""
    describe = VllmEngine.describe
    m.setattr(VllmEngine, "describe", lambda self, *a: replace(describe(self, *a), problems=()))


@case
def T21_what_the_loaders_wrote_is_checked_not_what_the_wire_brought(b: Bench) -> None:
    b.program.llm.collective_rpc("drop_names", args=(EXPERT,))
    try:
        (replica,) = b.program.publish(b.folders["MB"]).replicas
    finally:
        b.program.llm.collective_rpc("drop_names", args=("",))
    check("a lost expert is found", replica.state == "DIRTY", replica.state)
    check("it is named", replica.failure is not None and "layers.1.mlp.experts" in replica.failure.message)


@plant("T21", found_by="a lost expert is found")
def _(m: Patch) -> None:
    """Bytes that came are taken for bytes that were loaded."""
    from weightplane.inference_agent.vllm_plugin import loading

    m.setattr(loading, "_check_written", lambda model, counter, found: 0)


# --- running them


@pytest.fixture(scope="module")
def bench(golden: Golden, folders: dict[str, Path], plane: Server) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", CORE)
        made = Program(folders["MA"], plane, "cases", worker_extension_cls="tests.vllm.planted.Planted")
        yield Bench(made, folders, golden)
        made.close()


globals().update({f"test_{body.__name__}": body for body in CASES.values()})


@pytest.fixture
def b(bench: Bench) -> Bench:
    """It holds MA and is awake, whatever a case, or its defect, left behind."""
    soon("no update is open", lambda: bench.group.open is None, 60)
    asleep = bench.group.replicas["a"].asleep
    orders = Orders(bench.program.plane.address, bench.program.group)
    if "weights" in asleep:
        orders.wake("weights")
    bench.program.publish(bench.folders["MA"])
    if asleep:
        orders.wake()
    return bench


@pytest.mark.parametrize("id_", sorted(CASES))
def test_planted_defect_is_found(b: Bench, id_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found_by, patch = PLANTS[id_]
    with monkeypatch.context() as m:
        patch(m)
        with pytest.raises(CaseFailed) as caught:
            CASES[id_](b)
    assert str(caught.value).startswith(found_by), f"expected {found_by!r} to fail, found {str(caught.value)!r}"
