"""An engine in a process of its own: its agent may die and come back, the engine generates on.

The worker holds a real ``TorchModuleEngine`` whose live and staging tensors lie in files that both processes map, and
serves ``/generate``. The agent's side (``connect``, for ``--engine``) is a proxy: bytes go straight to the mapped
tensors, everything else is a line of JSON over a Unix socket. What is held, mixed and paused is the worker's to say.
"""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.process.coded import LAYERS, SIZE, Coded, generator_of
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.placement import full_box
from weightplane.controlplane.core.states import CachePolicy, Evidence, Mode, PauseMode
from weightplane.inference_agent.engines.base import (
    Description,
    Engine,
    EngineError,
    EngineUpdate,
    LocalTensors,
    Request,
    VersionTag,
    WorkerDevice,
)
from weightplane.inference_agent.engines.fit import fit
from weightplane.inference_agent.engines.live import collect
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.generate import GenerateServer


def mapped(folder: Path, kind: str) -> list[torch.Tensor]:
    """The model's tensors in files of ``folder``, shared by everyone who maps them."""
    return [torch.from_file(str(folder / f"{kind}.{i}"), shared=True, size=SIZE) for i in range(LAYERS)]


class _Shared:
    """Stands in for an ``Arena``."""

    nbytes = LAYERS * SIZE * 4

    def __init__(self, staged: list[torch.Tensor]) -> None:
        self.staged = staged


class WorkerEngine(TorchModuleEngine):
    """``torch_module`` whose staging is mapped too."""

    def __init__(self, module: Coded, folder: Path) -> None:
        self._folder = folder
        super().__init__(module)

    def _reserve(self) -> None:
        self._refusal = ""
        self._arenas = [_Shared(mapped(self._folder, "staged"))]  # type: ignore[list-item]


def _update(u: EngineUpdate) -> dict[str, Any]:
    tensors = [[t.name, t.dtype, list(t.shape), t.alias_of] for t in u.manifest.tensors]
    return {
        "update_id": u.update_id,
        "version": u.version,
        "trainer_step": u.trainer_step,
        "lineage": u.lineage,
        "mode": str(u.mode),
        "cache": str(u.cache),
        "manifest": tensors,
    }


def _update_from(d: dict[str, Any]) -> EngineUpdate:
    manifest = Manifest.of(TensorMeta(n, t, tuple(s), a) for n, t, s, a in d["manifest"])
    return EngineUpdate(
        d["update_id"],
        d["version"],
        d["trainer_step"],
        d["lineage"],
        Mode(d["mode"]),
        CachePolicy(d["cache"]),
        manifest,
    )


def answer(engine: WorkerEngine, call: str, a: dict[str, Any]) -> Any:
    if call == "state":
        return {
            "life": engine.life,
            "held": [asdict(h) for h in engine.held()],
            "mixed": engine.mixed(),
            "holders": sorted(engine.holders()),
            "layout": engine.layout(),
            "running": engine.running_requests,
        }
    if call == "begin":
        return engine.begin(_update_from(a))
    if call == "pause":
        return engine.pause(a["holder"], PauseMode(a["mode"]))
    return getattr(engine, call)(**a)


def main(argv: list[str]) -> None:
    folder = Path(argv[0])
    model = Coded()
    for p, live in zip(model.layers, mapped(folder, "live"), strict=True):
        p.data = live.zero_()
    engine = WorkerEngine(model, folder)
    server = GenerateServer(engine, generator_of(model, 0.001)).start()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                request = json.loads(line)
                try:
                    said = {"ok": answer(engine, request.pop("call"), request)}
                except Exception as e:
                    said = {"error": f"{type(e).__name__}: {e}"}
                self.wfile.write(json.dumps(said).encode() + b"\n")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    with Server(str(folder / "socket"), Handler) as rpc:
        threading.Thread(target=rpc.serve_forever, daemon=True).start()
        print(json.dumps({"serving": server.address}), flush=True)
        sys.stdin.read()


class RemoteEngine(Engine):
    """The agent's side. Every method asks the worker; a connection per thread, for some calls block."""

    name = "remote"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._local = folder, threading.local()
        self._tensors = {"live": mapped(folder, "live"), "staged": mapped(folder, "staged")}
        shape = Coded()
        self._shape = collect(shape)
        self._names = [t.names[0] for t in self._shape]
        self._update: EngineUpdate | None = None

    def _ask(self, call: str, **arguments: Any) -> Any:
        stream = getattr(self._local, "stream", None)
        if stream is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(self._folder / "socket"))
            stream = self._local.stream = connection.makefile("rwb")
        stream.write(json.dumps({"call": call, **arguments}).encode() + b"\n")
        stream.flush()
        said = json.loads(stream.readline())
        if "error" in said:
            raise EngineError(said["error"])
        return said["ok"]

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._ask("state")
        return state

    # --- what it is and holds

    @property
    def life(self) -> str:
        return str(self._state()["life"])

    workers = (WorkerDevice(),)
    modes = (Mode.STAGED, Mode.IN_PLACE)
    pause_modes = (PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT)
    cache_policies = (CachePolicy.CLEAR,)
    evidence = Evidence.LIVE

    def held(self) -> tuple[Held, ...]:
        return tuple(Held(**h) for h in self._state()["held"])

    def mixed(self) -> str:
        return str(self._state()["mixed"])

    def layout(self) -> int:
        return int(self._state()["layout"])

    def describe(self, manifest: Manifest, members: Sequence[str]) -> Description:
        return fit(manifest, members, [self._shape], lambda meta, _: full_box(meta.shape), (), ())

    # --- generation

    def bind(self, incarnation: str) -> None:
        self._ask("bind", incarnation=incarnation)

    def pause(self, holder: str, mode: PauseMode) -> None:
        self._ask("pause", holder=holder, mode=str(mode))

    def wait_paused(self, holder: str, timeout: float) -> bool:
        return bool(self._ask("wait_paused", holder=holder, timeout=timeout))

    def resume(self, holder: str) -> None:
        self._ask("resume", holder=holder)

    def holders(self) -> frozenset[str]:
        return frozenset(self._state()["holders"])

    @property
    def running_requests(self) -> int:
        return int(self._state()["running"])

    def forward(self, request: Request | None = None) -> AbstractContextManager[VersionTag]:
        raise NotImplementedError("passes run in the worker")

    def request(self) -> AbstractContextManager[Request]:
        raise NotImplementedError("requests run in the worker")

    # --- an update

    def begin(self, update: EngineUpdate) -> None:
        self._ask("begin", **_update(update))
        self._update = update

    def _at(self, kind: str) -> LocalTensors:
        assert self._update is not None
        index = self._update.manifest.index
        return {
            index[n]: (t, full_box(t.shape))
            for n, t in zip(self._names, self._tensors[kind], strict=True)
            if n in index
        }

    def targets(self, worker: int) -> LocalTensors:
        assert self._update is not None
        return self._at("staged" if self._update.mode is Mode.STAGED else "live")

    def live(self, worker: int) -> LocalTensors:
        return self._at("live")

    def writing(self, update_id: str) -> None:
        self._ask("writing", update_id=update_id)

    def prepare(self, update_id: str) -> None:
        self._ask("prepare", update_id=update_id)

    def apply(self, update_id: str) -> None:
        self._ask("apply", update_id=update_id)

    def commit(self, update_id: str) -> None:
        self._ask("commit", update_id=update_id)

    def abort(self, update_id: str, wrote: bool, reason: str) -> None:
        self._ask("abort", update_id=update_id, wrote=wrote, reason=reason)

    def close(self) -> None:
        """The worker lives on."""


def connect(folder: str) -> Engine:
    """``--engine tests.process.remote:connect --engine-option folder=...``."""
    return RemoteEngine(Path(folder))
