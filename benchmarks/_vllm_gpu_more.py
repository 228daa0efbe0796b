"""The cases of ``vllm_gpu.py`` that break or stretch something: kills, quantisation, data parallel."""

from __future__ import annotations

import re
import time
from typing import Any

from benchmarks._common import Result
from benchmarks._process import MemberFailed
from benchmarks._vllm_gpu_cases import Run, compare, engine_options, round_of, wait_dead
from benchmarks._vllm_gpu_models import MODELS
from benchmarks._vllm_gpu_stage import NotHere

__all__ = ["experts", "kill", "quantised"]

_ANSWER_S = 5.0  # within which requests must be answered again
_WATCH_S = 8.0
_SEEDS = {"A": 1001, "B": 1002}


def kill(run: Run) -> None:
    """The trainer is killed in mid-update: staged, and in place."""
    stage, report = run.stage, run.stage.report
    run.engine("kill", "ours")
    stage.call("ours", "join", 40.0, address=stage.plane.address, group="kill", transports=[run.transports[0]])
    try:
        for mode in ("staged", "in_place"):
            try:
                _kill(run, mode)
            except (AssertionError, TimeoutError, MemberFailed) as e:
                report.fail(f"kill/{mode}", str(e))
                if not stage.alive("ours"):
                    raise
            if not stage.alive(run.trainer):
                _next_trainer(run)
    finally:
        if stage.alive("ours"):
            stage.call("ours", "leave")


def _kill(run: Run, mode: str) -> None:
    stage, report = run.stage, run.stage.report
    over = run.transports[0]
    opened = {"address": stage.plane.address, "group": "kill", "transport": over, "bucket_bytes": 256 << 20}
    if not stage.cuda:
        opened["bucket_bytes"] = 1 << 17
    stage.call(run.trainer, "open", 60.0, **opened)
    first = round_of(run, "ours", run.trainer, mode)
    stage.call("ours", "ask_on", tokens=8)
    time.sleep(0.7)
    held = stage.call("ours", "standing")
    run.fresh()
    nth = max(1, first["bytes"] // (2 << 20) // 2)
    stage.call(run.trainer, "die_at", failpoint=f"{over}.send.inside", nth=nth, after_s=0.06)
    pid = stage.pid(run.trainer)
    stage.tell(run.trainer, "publish", step=run.seed, mode=mode)
    buried = wait_dead(pid, 20)
    said = re.findall(r"killed at ([0-9.]+)", stage.tail(run.trainer))
    dead = float(said[-1]) if said else buried
    stage.drop(run.trainer, "killed by its failpoint")
    seen: list[dict[str, Any]] = []
    while time.monotonic() < dead + _WATCH_S:
        now, standing = time.monotonic(), stage.call("ours", "standing")
        if not seen or {**standing, "after_s": 0} != {**seen[-1], "after_s": 0}:
            seen.append({**standing, "after_s": round(now - dead, 3)})
        time.sleep(0.1)
    asked = stage.call("ours", "answered")
    again = [end - dead for begin, end in asked["answers"] if begin > dead]
    steps = [b[1] - a[1] for a, b in zip(asked["answers"], asked["answers"][1:], strict=False)]
    mixed = seen[-1]["mixed"]
    found = {
        "killed_at_bucket_bytes": nth * (2 << 20),
        "process_gone_after_s": buried - dead,
        "standing": seen,
        "answers": len(asked["answers"]),
        "first_answer_after_s": min(again, default=None),
        "longest_gap_s": max(steps, default=None),
        "cut_short": asked["cut_short"],
        "ask_failed": asked["failed"],
        "mixed": mixed,
    }
    report.note("kill", **{mode: found})
    if mixed:
        fenced = mode == "in_place" and "dirty" in seen[-1]["holders"]
        late = again or [end - dead for _, end in asked["answers"] if end > dead]
        if not fenced or late:
            raise AssertionError(f"mixed, fenced: {fenced}, answers that came all the same: {late[:5]}")
    else:
        if seen[-1]["held"] != held["held"]:
            raise AssertionError(f"it held {held['held']} and holds {seen[-1]['held']}")
        if not again or min(again) > _ANSWER_S:
            raise AssertionError(f"requests are answered again after {min(again, default=None)} s")
        report.add(Result.of(f"answered again/kill/{mode}", "s", [min(again)], _ANSWER_S, limit_name="bound"))
    _next_trainer(run)
    stage.call(run.trainer, "open", 60.0, **opened)
    before = time.monotonic()
    run.fresh()
    healed = stage.call(run.trainer, "publish", 40.0, step=run.seed, mode=mode)
    after = time.monotonic()
    exact = compare(run, "ours", run.trainer, run.model)
    time.sleep(0.5)
    asked = stage.call("ours", "asked", 40.0, seconds=20.0)
    answers = [end - after for _, end in asked["answers"] if end > after]
    healing = {"publish_s": after - before, "receipt": healed, "compared": exact, "answers": len(answers)}
    report.note("kill", **{f"{mode}_healed": healing, f"{mode}_stuck": asked["stuck"] or asked["failed"]})
    if not answers or asked["stuck"]:
        raise AssertionError(f"after the next publish: {len(answers)} answers, stuck: {asked['stuck']}")


def _next_trainer(run: Run) -> None:
    if not run.spares:
        raise NotHere("no trainer is left")
    run.trainer = run.spares.pop(0)
    run.stage.call(run.trainer, "start", 60.0, model=run.model, device=run.device())


def prepare_quantised(run: Run, model: str, quantization: str | None) -> None:
    """Checkpoints A and B, and then the engines, which start while other cases run."""
    stage = run.stage
    stage.call("small", "start", 60.0, model=model, device=run.device())
    more: dict[str, Any] = {"quantization": quantization} if quantization else {}
    folder = ""
    for name, seed in _SEEDS.items():
        folder = MODELS[model].folder(run.folder / f"{model}-{name}")
        stage.call("small", "save", 60.0, folder=folder, seed=seed)
        told = engine_options(run, model, inside=True, backend="", load_format="auto", model_folder=folder, **more)
        stage.tell(f"fresh-{name}", "start", **told)
    # From the last checkpoint: dummy weights are random in the attention's scales too, which no checkpoint brings.
    live = engine_options(run, model, inside=True, load_format="auto", model_folder=folder, **more)
    stage.tell("live", "start", **live)


def quantised(model: str, quantization: str | None) -> Any:
    """bf16 from the trainer, quantised by vLLM as it loads: A, B, A, each equal to a fresh engine's in every bit."""

    def case(run: Run) -> None:
        stage, report = run.stage, run.stage.report
        fresh = {}
        for name in _SEEDS:
            run.engine("quantised", f"fresh-{name}")
            (fresh[name],) = stage.call(f"fresh-{name}", "live")
            report.note("quantised", **{f"fresh_{name}_tokens": stage.call(f"fresh-{name}", "generate", tokens=8)})
        dtypes = sorted({v[0] for v in fresh["A"].values()})
        report.note("quantised", dtypes=dtypes, tensors=len(fresh["A"]), method=quantization)
        if fresh["A"] == fresh["B"]:
            raise AssertionError("the fresh engines of A and B are equal: nothing can be told apart")
        run.engine("quantised", "live")
        where = {"address": stage.plane.address, "group": "quantised"}
        hello = stage.call("live", "join", 40.0, **where, transports=[run.transports[0]])
        report.note("quantised", hello=hello)
        stage.call("small", "open", 60.0, **where, transport=run.transports[0])
        wrong = 0
        for n, (name, mode) in enumerate((("A", "in_place"), ("B", "staged"), ("A", "staged"), ("B", "in_place"))):
            stage.call("small", "randomise", seed=_SEEDS[name])
            said = stage.call("small", "publish", 40.0, step=n + 1, mode=mode)
            (live,) = stage.call("live", "live")
            differ = sorted(k for k in fresh[name] if live.get(k) != fresh[name][k])
            scales = sum("scale" in k for k in fresh[name])
            tokens = stage.call("live", "generate", tokens=8)
            found = {
                "receipt": said,
                "differ": differ[:8],
                "differing": len(differ),
                "scales": scales,
                "tokens": tokens,
            }
            report.note("quantised", **{f"{n}_{name}_{mode}": found})
            wrong += len(differ)
        stage.call("small", "close")
        stage.call("live", "leave")
        if wrong:
            raise AssertionError(f"{wrong} live tensors differ from a fresh engine's: see the case")
        report.add(Result.of("quantised/differing tensors", "", [float(wrong)]))

    return case


def experts(model: str, instances: int, updates: int) -> Any:
    """Data parallel with expert parallel: pause, update, resume under load, again and again."""

    def case(run: Run) -> None:
        stage, report = run.stage, run.stage.report
        run.engine("experts", "experts")
        report.note("experts", tokens=stage.call("experts", "generate", 60.0, tokens=8))
        where = {"address": stage.plane.address, "group": "experts"}
        hello = stage.call("experts", "join", 40.0, **where, transports=[run.transports[0]])
        report.note("experts", hello=hello)
        if len(hello["workers"]) != instances:
            raise AssertionError(f"{instances} instances, workers attached: {hello['workers']}")
        stage.call("small", "start", 60.0, model=model, device=run.device())
        stage.call("small", "open", 60.0, **where, transport=run.transports[0])
        stage.call("experts", "load_on", requests=8, tokens=32)
        times: list[float] = []
        for n in range(updates):
            run.fresh("small")
            mode = ("in_place", "staged")[n % 2]
            said = stage.call("small", "publish", 40.0, step=n + 1, mode=mode)
            times.append(said["total"])
            if n % 10 in (0, 1):
                exact = compare(run, "experts", "small", model)
                made = stage.call("experts", "made")
                report.note("experts", **{f"{n}_{mode}": {"receipt": said, "compared": exact, "tokens": made}})
        load = stage.call("experts", "loaded", 40.0, seconds=20.0)
        report.note("experts", updates=len(times), load=load)
        stage.call("small", "close")
        stage.call("experts", "leave")
        report.add(Result.of(f"total/experts/{instances} instances", "s", times, details=load))
        if load["stuck"] or load["failed"] or not load["tokens"]:
            raise AssertionError(f"the load: {load}")

    return case
