"""The cases of ``vllm_gpu.py`` that publish and compare: each notes what it finds as it finds it."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._common import Result
from benchmarks._memory import CardPeak
from benchmarks._process import MemberFailed
from benchmarks._vllm_gpu_models import MODELS, options
from benchmarks._vllm_gpu_stage import NotHere, Stage

__all__ = ["Run", "colocated", "load", "native", "transport"]

GB = 1e9
_MODES = ("in_place", "staged")


@dataclass
class Run:
    """What the cases share."""

    stage: Stage
    folder: Path
    samples: int
    warm_ups: int
    model: str
    transports: tuple[str, str]
    buckets: tuple[int, ...] = ()
    trainer: str = "trainer"
    spares: list[str] = field(default_factory=list)
    seed: int = 0
    up: dict[str, Any] = field(default_factory=dict)
    medians: dict[str, float] = field(default_factory=dict)

    def device(self, card: int = 0) -> str:
        """A torch device of the processes."""
        return f"cuda:{card}" if self.stage.cuda else "cpu"

    def engine(self, case: str, name: str, timeout: float = 150.0) -> dict[str, Any]:
        """Wait until an engine is up; how long it took."""
        if name not in self.up:
            if self.stage.waiting(name):
                self.up[name] = self.stage.answer(name, timeout)
            elif not self.stage.alive(name):
                raise NotHere(f"{name} is not there")
            self.stage.report.note(case, **{f"{name}_start": self.up.get(name)})
        return dict(self.up.get(name) or {})

    def fresh(self, name: str = "") -> int:
        """Weights that were never there; the seed."""
        self.seed += 1
        self.stage.call(name or self.trainer, "randomise", seed=self.seed)
        return self.seed


def compare(run: Run, engine: str, trainer: str, model: str, at: str = "") -> dict[str, Any]:
    """Every parameter, cut back to the checkpoint's tensors, against the trainer's. Raises if one differs."""
    expected = run.stage.call(trainer, f"{at}checksums")
    workers = run.stage.call(engine, "checksums", 60.0, rows=MODELS[model].rows())
    without = max(int(w.pop("")[0]) for w in workers)
    found: dict[str, set[tuple[int, ...]]] = {}
    for worker in workers:
        for name, sums in worker.items():
            found.setdefault(name, set()).add(tuple(sums))
    differ = sorted(n for n, sums in found.items() if sums != {tuple(expected.get(n, ()))})
    if not run.stage.cuda:  # there vLLM packs experts for its kernel
        differ = [n for n in differ if ".mlp.experts." not in n]
    absent = sorted(set(expected) - set(found))
    said = {"tensors": len(expected), "equal": len(found) - len(differ), "packed_away": without}
    if differ or (absent and not without):
        raise AssertionError(f"{said}; differ: {differ[:6]} ({len(differ)}); absent: {absent[:6]} ({len(absent)})")
    return said


def round_of(run: Run, engine: str, trainer: str, mode: str, at: str = "", model: str = "") -> dict[str, Any]:
    """One update of weights never seen before, with its memory, compared parameter by parameter."""
    stage = run.stage
    run.seed += 1
    stage.call(trainer, f"{at}randomise", seed=run.seed)
    before = stage.call(engine, "memory", reset=True)
    uuids = sorted({m["uuid"] for m in before if m})
    cards = CardPeak(uuids) if uuids else None
    if cards is not None:
        cards.begin()
    said: dict[str, Any] = stage.call(trainer, f"{at}publish", 40.0, step=run.seed, mode=mode)
    said["loads"] = stage.call(engine, "loads")
    on_cards = cards.extra() if cards is not None else []
    after = stage.call(engine, "memory", reset=False)
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if b and a]
    said["peak_torch"] = max((a["peak"] - b["now"] for b, a in pairs), default=0)
    said["kept_torch"] = max((a["now"] - b["now"] for b, a in pairs), default=0)
    said["peak_card"] = max(on_cards, default=0)
    states = {r["state"] for r in said["replicas"]}
    if states != {"READY"}:
        raise AssertionError(f"replicas after the publish: {said['replicas']}")
    said["compared"] = compare(run, engine, trainer, model or run.model, at)
    return said


def ways(taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Which way updates were loaded, seconds of the load, the evidence of their receipts."""
    loads = [load for said in taken for load in said["loads"]]
    return {
        "ways": sorted({load["way"] for load in loads}),
        "why": sorted({load["why"] for load in loads if load["why"]}),
        "read_back": sorted({bool(load["read_back"]) for load in loads}),
        "load_s": [round(load["load_s"], 4) for load in loads],
        "evidence": sorted({r["evidence"] for said in taken for r in said["replicas"]}),
    }


def rounds(run: Run, case: str, engine: str, trainer: str, at: str = "", modes: tuple[str, ...] = _MODES) -> None:
    """Warm-ups and samples in each mode; the figures go to the report."""
    report = run.stage.report
    for mode in modes:
        taken: list[dict[str, Any]] = []
        try:
            for n in range(run.warm_ups + run.samples):
                said = round_of(run, engine, trainer, mode, at)
                report.note(case, **{f"{mode}_{n}": said})
                if n >= run.warm_ups:
                    taken.append(said)
        except (MemberFailed, AssertionError) as e:
            report.fail(f"{case}/{mode}", str(e))
            if not run.stage.alive(engine) or not run.stage.alive(trainer):
                raise
        if not taken:
            continue
        details = {"mode": mode, "bytes": taken[0]["bytes"], "rounds": len(taken), **ways(taken)}
        print(f"{case}/{mode}: {ways(taken)}", flush=True)
        for figure in ("total", "wire", "pause", "apply", "publish"):
            made = Result.of(f"{figure}/{case}/{mode}", "s", [s[figure] for s in taken], details=details)
            report.add(made, quiet=figure not in ("total", "pause"))
        for figure in ("peak_torch", "kept_torch", "peak_card"):
            made = Result.of(f"{figure}/{case}/{mode}", "GB", [s[figure] / GB for s in taken], details=details)
            report.add(made, quiet=figure != "peak_torch")
        run.medians[f"{case}/{mode}"] = statistics.median(s["total"] for s in taken)


def load(run: Run) -> None:
    """vLLM starts with our plug-in; its workers say what they are and what they can."""
    stage = run.stage
    stage.report.note("load", trainer=stage.call(run.trainer, "ready", 60.0))
    nbytes = stage.call(run.trainer, "start", 60.0, model=run.model, device=run.device())
    stage.report.note("load", bytes=nbytes)
    run.engine("load", "ours")
    before = stage.call("ours", "generate", 60.0, tokens=4)
    said = stage.call("ours", "join", 60.0, address=stage.plane.address, group="load", transports=list(run.transports))
    stage.report.note("load", hello=said, tokens=before, memory=stage.call("ours", "memory", reset=True))
    stage.call("ours", "leave")
    note = Result.of("start/ours", "s", [run.up["ours"]["start_s"]], details={"hello": said})
    stage.report.add(note)


def transport(name: str) -> Callable[[Run], None]:
    """Full cycles over one transport, and in place once more with each of ``run.buckets``."""

    def case(run: Run) -> None:
        stage, group = run.stage, f"over-{name}"
        run.engine(name, "ours")
        said = stage.call("ours", "join", 40.0, address=stage.plane.address, group=group, transports=[name])
        stage.report.note(name, hello=said)
        try:
            stage.call(run.trainer, "open", 60.0, address=stage.plane.address, group=group, transport=name)
            rounds(run, name, "ours", run.trainer)
            for nbytes in run.buckets:
                again = {"group": group, "transport": name, "bucket_bytes": nbytes}
                stage.call(run.trainer, "open", 60.0, address=stage.plane.address, **again)
                rounds(run, f"{name}@{nbytes >> 20}MiB", "ours", run.trainer, modes=("in_place",))
            stage.report.note(name, tokens=stage.call("ours", "generate", tokens=8))
            stage.call(run.trainer, "close")
        finally:
            if stage.alive("ours"):
                stage.call("ours", "leave")

    return case


def native(run: Run) -> None:
    """vLLM's own NCCL engine, same weights, same cards; then ours beside it."""
    stage, report = run.stage, run.stage.report
    if not stage.cuda:
        raise NotHere("vLLM's NCCL engine needs GPUs")
    run.engine("native", "native")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    stage.tell("native", "native", what="init", info=where)
    stage.call(run.trainer, "native_open", 40.0, port=port)
    stage.answer("native", 40.0)
    metadata = stage.call(run.trainer, "native_metadata")
    taken: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for packed, count in ((True, run.warm_ups + run.samples), (False, 3)):
        for n in range(count):
            run.fresh()
            (before,) = stage.call("native", "memory", reset=True)
            stage.tell("native", "native_cycle", info={**metadata, "packed": packed})
            stage.call(run.trainer, "native_send", 40.0, packed=packed)
            said = stage.answer("native", 40.0)
            (after,) = stage.call("native", "memory", reset=False)
            said["peak_torch"] = after["peak"] - before["now"]
            said["cycle"] = said["start"] + said["update"] + said["finish"]
            said["compared"] = compare(run, "native", run.trainer, run.model)
            report.note("native", **{f"{'packed' if packed else 'plain'}_{n}": said})
            if n >= (run.warm_ups if packed else 1):
                taken[packed].append(said)
        label = "packed" if packed else "plain"
        report.add(Result.of(f"total/native/{label}", "s", [s["total"] for s in taken[packed]]))
        report.add(Result.of(f"cycle/native/{label}", "s", [s["cycle"] for s in taken[packed]]))
        report.add(Result.of(f"peak_torch/native/{label}", "GB", [s["peak_torch"] / GB for s in taken[packed]]))
    # Ours pauses and resumes inside its total, so theirs does too; "cycle" is start, update and finish alone.
    best = min(statistics.median(s["total"] for s in some) for some in taken.values())
    for name, value in sorted(run.medians.items()):
        made = Result.of(
            f"against vLLM's own/{name}", "s", [value], best, less_is_better=True, limit_name="vLLM's NCCL engine"
        )
        report.add(made)


def colocated(run: Run) -> None:
    """Trainer and ``LLM`` in one process, on one GPU."""
    stage = run.stage
    run.engine("colocated", "both")
    for name in (run.trainer, *run.spares, "ours", "native"):  # their memory is wanted
        stage.drop(name, "the colocated case needs its memory")
    where = {"address": stage.plane.address, "group": "colocated"}
    said = stage.call("both", "join", 40.0, **where, transports=[run.transports[0]])
    stage.report.note("colocated", hello=said)
    stage.call("both", "trainer.start", 60.0, model=run.model, device=run.device())
    stage.call("both", "trainer.open", 60.0, **where, transport=run.transports[0])
    rounds(run, "colocated", "both", "both", "trainer.")
    stage.report.note("colocated", tokens=stage.call("both", "generate", tokens=8))
    stage.call("both", "trainer.close")
    stage.call("both", "leave")


def engine_options(run: Run, model: str, **more: Any) -> dict[str, Any]:
    """The words of ``Engine.start``, with the model's folder made."""
    inside = bool(more.pop("inside", False))
    backend = str(more.pop("backend", "weightplane"))
    folder = MODELS[model].folder(run.folder / model)
    made = options(run.stage.device, **{"model_folder": folder, **more})
    return {"folder": made.pop("model_folder"), "backend": backend, "inside": inside, "options": made}


def wait_dead(pid: int, seconds: float) -> float:
    """When a process was seen dead or a zombie. ``TimeoutError``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return time.monotonic()
        if state in "ZX":
            return time.monotonic()
        time.sleep(0.002)
    raise TimeoutError(f"process {pid} lives on after {seconds:.0f} s")
