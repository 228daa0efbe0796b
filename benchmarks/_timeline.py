"""One update, step by step, across all processes: what ran where, from when to when, on the host's one clock.

``WEIGHTPLANE_TIMELINE=FOLDER`` in a benchmark's environment makes each of its processes write what it does there;
``python benchmarks/_timeline.py FOLDER [N]`` prints the last update's N longest-waited steps in order of time. It is a
look from outside: methods of the product are wrapped, the product knows nothing of it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["install", "table"]

_FLUSH_S = 0.2

#: Role -> "module:Class.method", and how to name one call of it (from its arguments).
_STEPS: dict[str, tuple[str, ...]] = {
    "trainer": (
        "trainer_agent.publishing:Publishing._attempt",
        "trainer_agent.attempt:Attempt._start",
        "trainer_agent.attempt:Attempt._finish",
        "trainer_agent.client:Client.begin",
        "trainer_agent.client:Pending.wait",
        "trainer_agent.sending:Sending.prepare",
        "trainer_agent.sending:Sending.wait_hashed",
        "trainer_agent.transfer:Transfer._put_all",
        "trainer_agent.replay:ChannelReplay.look",
        "trainer_agent.replay:of_channel",
        "trainer_agent.sending:Sending.start",
        "trainer_agent.sending:Sending._run",
        "trainer_agent.supply:DirectSupply.__init__",
        "trainer_agent.transfer:Transfer.__init__",
        "trainer_agent.channels:ChannelPool.open",
        "trainer_agent.plans:plan_from_pages",
        "trainer_agent.transfer:Transfer._arm",
        "trainer_agent.transfer:Transfer._send",
        "trainer_agent.sending:Sending._send_all",
        "trainer_agent.hashing:RegionDigests.of_plan",
        "trainer_agent.hashing:LiveHasher._run",
        "trainer_agent.produced:Produced.order",
        "trainer_agent.produced:Produced.wait",
    ),
    "replica": (
        "inference_agent.agent:InferenceAgent._take",
        "inference_agent.session:ControlSession.publish",
        "inference_agent.operations:Operations._check",
        "inference_agent.operations:Operations._open",
        "inference_agent.operations:Operations._arm",
        "inference_agent.operations:Operations._prepare",
        "inference_agent.operations:Operations._apply",
        "inference_agent.operations:Operations._complete",
        "inference_agent.operations:Operations._read_back",
        "inference_agent.shares:Shares.get",
        "inference_agent.transfer:Channels.get",
        "inference_agent.transfer:Transfer.arm",
        "inference_agent.transfer:Transfer.receive",
        "inference_agent.transfer:LocalWorker.take",
        "inference_agent.rpc:AgentCalls._call",
        "inference_agent.codec:report_message",
        "inference_agent.engines.torch_module:TorchModuleEngine.begin",
        "inference_agent.engines.torch_module:TorchModuleEngine.writing",
        "inference_agent.engines.torch_module:TorchModuleEngine.prepare",
        "inference_agent.engines.torch_module:TorchModuleEngine.apply",
        "inference_agent.engines.torch_module:TorchModuleEngine.describe",
    ),
    "vllm": (
        "inference_agent.operations:Operations._check",
        "inference_agent.operations:Operations._open",
        "inference_agent.operations:Operations._arm",
        "inference_agent.operations:Operations._prepare",
        "inference_agent.operations:Operations._apply",
        "inference_agent.pauses:Pauses.pause",
        "inference_agent.pauses:Pauses._in_force",
        "inference_agent.pauses:Pauses.resume",
        "inference_agent.transfer:Transfer.arm",
        "inference_agent.transfer:Transfer.receive",
        "inference_agent.rpc:AgentCalls._call",
        "inference_agent.engines.vllm.adapter:VllmEngine.writing",
        "inference_agent.engines.vllm.links:WorkerLink.call",
        "inference_agent.engines.vllm.offline:OfflineDriver._run",
        "inference_agent.engines.vllm.async_llm:AsyncDriver._run",
    ),
    "worker": (
        "inference_agent.vllm_plugin.worker:WorkerReplica.do",
        "inference_agent.vllm_plugin.running:Run._take",
        "inference_agent.vllm_plugin.opening:Opening._read_back",
        "inference_agent.vllm_plugin.opening:Opening._landing_in",
        "inference_agent.vllm_plugin.applying:Applying.stream",
        "inference_agent.vllm_plugin.applying:Applying._unusable",
        "inference_agent.vllm_plugin.applying:Applying._copy",
    ),
    "server": (
        "controlplane.server.runtime:Group._step",
        "controlplane.server.calls:Guard.intercept_service",
        "controlplane.server.artifacts:Artifacts.compare",
        "controlplane.server.artifacts:Artifacts.make_plan",
        "controlplane.server.pages:plan_page",
        "controlplane.server.bindings:Desired.message",
        "controlplane.server.transfer_service:TransferService.StartUpdate",
        "controlplane.server.transfer_service:TransferService.UpdateWeights",
        "controlplane.server.transfer_service:TransferService.PutDigests",
        "controlplane.server.transfer_service:TransferService.FinishUpdate",
        "controlplane.server.agent_service:AgentService.PutReceipt",
        "controlplane.server.agent_service:AgentService.PutWorkerPlacement",
        "controlplane.store.sqlite:SqliteStore.write",
    ),
}


def install(role: str) -> None:
    """Note this process's steps, if the environment asks for it. Once a process."""
    folder = os.environ.get("WEIGHTPLANE_TIMELINE")
    if not folder:
        return
    noted: list[tuple[float, float, str]] = []
    for step in _STEPS[role]:
        _wrap(step, noted)
    file = Path(folder) / f"{role}-{os.getpid()}.jsonl"

    def flush() -> None:
        with file.open("a") as out:
            while True:
                time.sleep(_FLUSH_S)
                taken, noted[:] = list(noted), []
                out.writelines(json.dumps([a, b, f"{role}: {what}"]) + "\n" for a, b, what in taken)
                out.flush()

    threading.Thread(target=flush, name="bench-timeline", daemon=True).start()


def _wrap(step: str, noted: list[tuple[float, float, str]]) -> None:
    module_name, _, path = step.partition(":")
    holder: Any = importlib.import_module(f"weightplane.{module_name}")
    *owners, name = path.split(".")
    for owner in owners:
        holder = getattr(holder, owner)
    inner: Callable[..., Any] | None = getattr(holder, name, None)
    if inner is None:
        print(f"timeline: no {step}", file=sys.stderr)
        return

    def said(args: tuple[Any, ...]) -> str:
        words = [a if isinstance(a, str) else type(a).__name__ for a in args[1:3]] if owners else []
        return f"{path}({', '.join(words)})"

    if asyncio.iscoroutinefunction(inner):

        @functools.wraps(inner)
        async def waited(*args: Any, **more: Any) -> Any:
            start = time.monotonic()
            try:
                return await inner(*args, **more)
            finally:
                noted.append((start, time.monotonic(), said(args)))

        setattr(holder, name, waited)
        return

    @functools.wraps(inner)
    def called(*args: Any, **more: Any) -> Any:
        start = time.monotonic()
        try:
            return inner(*args, **more)
        finally:
            noted.append((start, time.monotonic(), said(args)))

    setattr(holder, name, called)


def table(folder: Path, least_ms: float = 0.0) -> list[str]:
    """The last whole publish: begin and length in ms after its start, and what it was."""
    rows: list[tuple[float, float, str]] = []
    for file in folder.glob("*.jsonl"):
        rows += [tuple(json.loads(line)) for line in file.read_text().splitlines()]
    calls = sorted(r for r in rows if r[2].startswith("trainer: Attempt._start("))
    ends = sorted(r for r in rows if r[2].startswith("trainer: Attempt._finish("))
    if not calls or not ends:
        return ["no whole update was noted"]
    end = ends[-1][1]
    start = max(c[0] for c in calls if c[0] < ends[-1][0])
    inside = sorted(r for r in rows if start - 0.004 <= r[0] <= end and 1e3 * (r[1] - r[0]) >= least_ms)
    return [f"{1e3 * (a - start):8.2f} {1e3 * (b - a):8.2f}  {what}" for a, b, what in inside]


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)))
