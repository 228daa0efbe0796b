"""Trainers in other languages beside the Python one: whole updates of one file to one fleet, turn by turn.

Each sample is a process of its own that publishes once, as ``publish_checkpoint`` does; so both send what they have
never sent before, and neither replays a plan. *update* is from the call of StartUpdate to FinishUpdate's answer, by the
trainer's clock, its hashing included; *wire* is the control plane's word of both. What they send from is ready before:
the file is in the page cache, or on the card.

``cpp/shm/staged/dense-cpu``: language, transport, mode, model. The limit is the Python trainer's median in the same
rounds; the floor of the ratio is 1.0 on the CPU and 0.9 on cards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from benchmarks._common import GB, SAMPLES, WARM_UPS, Report, Result, Rounds, parser
from benchmarks._models import MODELS, model, model_bytes
from benchmarks._process import MemberFailed, Process, tell_all
from benchmarks.control_plane import SERVER, line, process
from tests.clients.files import save
from tests.clients.needs import with_nccl
from weightplane.transports.dtypes import dtype_of

_ROOT = Path(__file__).resolve().parent.parent
_MEMBERS = Path(__file__).resolve().parent / "_update_members.py"
_PYTHON = Path(__file__).resolve().parent / "_language_trainer.py"
_PROGRAMS = [_ROOT / folder / "publish_checkpoint" for folder in (".build-cpp", ".build-cpp-portable")]
_ON_CARDS = ("cuda_ipc", "nccl")


def write(path: Path, name: str) -> None:
    """A checkpoint of a tensor list, of random bytes."""
    made = torch.Generator().manual_seed(0)
    tensors = {}
    for tensor, dtype, shape in model(name):
        kind = dtype_of(dtype)
        raw = torch.randint(0, 256, (*shape, kind.itemsize), dtype=torch.uint8, generator=made)
        tensors[tensor] = raw.view(kind).reshape(shape)
    save(path, tensors)


def published(words: list[str]) -> dict[str, float]:
    """What a trainer says of its one update."""
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **with_nccl()}
    )
    if done.returncode:
        raise MemberFailed(f"{words[0]} ended with {done.returncode}: {done.stdout[-500:]} {done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"update": float(said["seconds"]), "wire": float(said["wire_s"]), "bytes": float(said["bytes"])}


def measure(report: Report, address: str, file: Path, transport: str, mode: str, args: argparse.Namespace) -> None:
    """One transport and mode: both trainers in each round, in turns."""
    group, on_card = f"{transport}-{mode}", transport in _ON_CARDS
    where = ["cuda:0", "cuda:1" if transport == "nccl" else "cuda:0"] if on_card else ["cpu", "cpu"]
    by = ["--transport", transport]
    trainers = {
        "python": [sys.executable, str(_PYTHON), address, group, str(file), transport, where[0]],
        "cpp": [str(args.program), "--address", address, "--group", group, "--file", str(file), *by],
    }
    with ExitStack() as stack:
        replicas = [Process(f"replica-{i}", _MEMBERS, ["replica"]) for i in range(args.replicas)]
        for r in replicas:
            stack.callback(r.close, 5)
        tell_all(replicas, "start", device=where[1], name=args.model)
        for r in replicas:
            words = {"address": address, "group": group, "replica_id": r.member}
            r.call("open", **words, transport=transport, staged=mode == "staged")
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
        rounds = Rounds(3 if args.quick else SAMPLES, WARM_UPS, [r.pid for r in replicas], args.patience)
        for n, counts in enumerate(rounds):
            order = list(trainers) if n % 2 else list(reversed(trainers))
            these = {name: published(trainers[name]) for name in order}
            if counts and not rounds.spoilt():
                for name, said in these.items():
                    taken[name].append(said)
    for phase in ("update", "wire"):
        samples = {name: [said[phase] for said in some] for name, some in taken.items()}
        limit = statistics.median(samples["python"])
        for name, values in samples.items():
            gbps = statistics.median(said["bytes"] / said[phase] / GB for said in taken[name])
            report.add(
                Result.of(
                    f"{name}/{phase}/{transport}/{mode}/{args.model}",
                    "s",
                    values,
                    limit,
                    less_is_better=True,
                    limit_name="the Python trainer",
                    details={"gbps": gbps, "bytes": taken[name][0]["bytes"], "others": rounds.noise},
                )
            )


def main() -> int:
    """Run it all; 1 if something failed, or with --strict if a floor is missed."""
    made = parser(__doc__ or "")
    made.add_argument("--model", choices=MODELS, default="dense-cpu")
    made.add_argument("--transport", action="append", choices=["shm", "grpc", *_ON_CARDS], help="default: shm, grpc")
    made.add_argument("--mode", action="append", choices=["staged", "in_place"], help="default: both")
    made.add_argument("--replicas", type=int, default=1)
    made.add_argument("--program", type=Path, default=next((p for p in _PROGRAMS if p.exists()), _PROGRAMS[0]))
    made.add_argument("--strict", action="store_true", help="exit 1 where a floor is missed")
    args = made.parse_args()
    if not args.program.exists():
        made.error(f"{args.program} is not there: make clients-cpp, or clients-cpp-portable for a GPU host")
    transports = args.transport or ["shm", "grpc"]
    report = Report("languages", args.json, cuda=any(t in _ON_CARDS for t in transports))
    print(f"{args.model}: {model_bytes(args.model) / GB:.2f} GB, {args.replicas} replica(s)")
    with tempfile.TemporaryDirectory() as folder, process(SERVER, f"{folder}/store.db") as server:
        address, file = line(server), Path(folder) / "model.safetensors"
        write(file, args.model)
        for transport in transports:
            for mode in args.mode or ["staged", "in_place"]:
                try:
                    measure(report, address, file, transport, mode, args)
                except MemberFailed as e:
                    report.fail(f"{transport}/{mode}", str(e))
    report.write()
    floors = {r.case: 0.9 if r.case.split("/")[2] in _ON_CARDS else 1.0 for r in report.results}
    missed = [r.case for r in report.results if r.case.startswith("cpp/update") and r.ratio < floors[r.case]]
    print(*(f"below its floor: {case}" for case in missed), sep="\n", end="\n" if missed else "")
    return 1 if report.failures or (args.strict and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
