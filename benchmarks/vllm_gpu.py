"""A stock vLLM on a pair of GPUs takes Qwen2.5-7B's weights from a trainer: exact, timed, killed in the middle.

Trainer on GPU 0, vLLM on GPU 1, each a process of its own, dummy weights, unique random weights each round; every
parameter is compared by checksum. Cases, most valuable first (``--cases`` to choose):

``load``       vLLM starts with our plug-in and its worker attaches
``cuda_ipc``   full updates, in place and staged: total, pause, wire, apply, peak memory
``nccl``       the same
``native``     vLLM's own NCCL engine, same weights and cards, and ours as a ratio of it
``kill``       the trainer is killed in mid-update: answers within 5 s, or a fence until the next publish; that is exact
``colocated``  trainer and ``LLM`` in one process on one GPU
``quantised``  bf16 weights into ``quantization="fp8"`` (two layers): A, B, A, live memory equal to a fresh engine's
``experts``    two data-parallel instances with expert parallel: 50 updates under load

Engines start side by side, so that the wait is paid once; each call has a time limit, a case that fails is noted and
the next one begins, and the JSON is written after every finding. ``--tiny --device cpu``: the same logic on small
models, shm and grpc for the two transports, and without ``native``.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks import _vllm_gpu_cases as cases
from benchmarks import _vllm_gpu_more as more
from benchmarks._process import MemberFailed
from benchmarks._vllm_gpu_cases import Run, engine_options
from benchmarks._vllm_gpu_stage import CaseReport, NotHere, Stage
from benchmarks.transports import size

ALL = ("load", "cuda_ipc", "nccl", "native", "kill", "colocated", "quantised", "experts")
_ON_CPU = ("shm", "grpc")


def begin(run: Run, wanted: Sequence[str], instances: int) -> None:
    """Start every process that the cases need; engines come up while nobody waits."""
    stage, names = run.stage, set(wanted)
    stage.trainer(run.trainer)
    if "native" in names and stage.cuda:
        stage.tell(run.trainer, "warm")
    if names & {"load", "cuda_ipc", "nccl", "kill"}:
        stage.engine("ours", cards="1,0")
        stage.tell("ours", "start", **engine_options(run, run.model))
    if "native" in names and stage.cuda:
        stage.engine("native", cards="1,0")
        stage.tell("native", "start", **engine_options(run, run.model, backend="nccl"))
    if "kill" in names:
        run.spares = ["spare-1", "spare-2"]
        for name in run.spares:
            stage.trainer(name)
    if names & {"quantised", "experts"}:
        stage.trainer("small")
    if "colocated" in names:
        stage.engine("both", cards="0")
        stage.tell("both", "start", **engine_options(run, run.model, inside=True))
    if "quantised" in names:
        for name in ("fresh-A", "fresh-B", "live"):
            stage.engine(name, cards="0")
        model, method = ("two", "fp8") if stage.cuda else ("tiny", None)
        guarded(run, "quantised", lambda r: more.prepare_quantised(r, model, method))
    if "experts" in names:
        stage.engine("experts", "async", cards="0,1" if stage.cuda or instances < 2 else "0|1")
        parallel = {"data_parallel_size": instances} if instances > 1 else {}
        told = engine_options(run, _experts(stage), enable_expert_parallel=instances > 1 and stage.cuda, **parallel)
        stage.tell("experts", "start", **told)


def _experts(stage: Stage) -> str:
    return "experts" if stage.cuda else "tiny-experts"


def guarded(run: Run, name: str, case: Callable[[Run], None]) -> None:
    """One case; whatever it raises is noted."""
    report, start = run.stage.report, time.monotonic()
    print(f"== {name} ({run.stage.left():.0f} s left)", flush=True)
    try:
        if run.stage.left() < 1:
            raise NotHere("no time is left")
        case(run)
    except NotHere as e:
        report.note(name, not_run=str(e))
    except MemberFailed as e:
        print(str(e)[-6000:], flush=True)
        report.fail(name, str(e))
    except Exception as e:
        report.fail(name, f"{traceback.format_exc()[-3000:]}\n{type(e).__name__}: {e}")
    report.note(name, seconds=round(time.monotonic() - start, 1))


def arguments() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="PATH", help="write all that is found here")
    made.add_argument("--logs", type=Path, metavar="FOLDER", help="of every process; default: a temporary one")
    made.add_argument("--cases", default=",".join(ALL), help="default: %(default)s")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--tiny", action="store_true", help="a small model")
    made.add_argument("--deep", action="store_true", help="a small model of as many tensors as the large one")
    made.add_argument("--seconds", type=float, default=240.0, help="for everything; default %(default).0f")
    made.add_argument("--samples", type=int, default=5, help="updates that count, in each mode; default %(default)s")
    made.add_argument(
        "--bucket-bytes", action="append", default=[], type=size, help="updates in place by these buckets too; repeat"
    )
    made.add_argument("--warm-ups", type=int, default=2)
    made.add_argument("--instances", type=int, default=0, help="data-parallel ones; default 2 on GPUs, 1 on a CPU")
    made.add_argument("--updates", type=int, default=50, help="under load; default %(default)s")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Run and report; 1 if a case failed."""
    args = arguments().parse_args(words)
    wanted = args.cases.split(",")
    unknown = sorted(set(wanted) - set(ALL))
    if unknown:
        raise SystemExit(f"no case {', '.join(unknown)}: {', '.join(ALL)}")
    cuda = args.device == "cuda"
    report = CaseReport("vllm", args.json, cuda=cuda)
    folder = Path(tempfile.mkdtemp(prefix="weightplane-vllm-"))
    stage = Stage(report, args.logs or folder / "logs", args.device, args.seconds)
    model = "tiny-deep" if args.deep else "tiny" if args.tiny or not cuda else "dense"
    over = ("cuda_ipc", "nccl") if cuda else _ON_CPU
    run = Run(stage, folder, args.samples, args.warm_ups, model, over, tuple(args.bucket_bytes))
    instances = args.instances or (2 if cuda else 1)
    made: dict[str, Callable[[Run], None]] = {
        "load": cases.load,
        "cuda_ipc": cases.transport(over[0]),
        "nccl": cases.transport(over[1]),
        "native": cases.native,
        "kill": more.kill,
        "colocated": cases.colocated,
        "quantised": more.quantised("two" if cuda else "tiny", "fp8" if cuda else None),
        "experts": more.experts(_experts(stage), instances, args.updates),
    }

    def ended(signum: int, frame: Any) -> None:
        raise SystemExit(f"ended by signal {signum}")

    signal.signal(signal.SIGTERM, ended)
    try:
        begin(run, wanted, instances)
        if "load" not in wanted:
            guarded(run, "trainer", lambda r: r.stage.call(r.trainer, "start", 60.0, model=r.model, device=r.device()))
        for name in ALL:
            if name in wanted:
                guarded(run, name, made[name])
    finally:
        stage.close()
        report.write()
        shutil.rmtree(folder, ignore_errors=args.logs is None)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
