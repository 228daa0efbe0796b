"""The process that holds the replicas of ``cards``: real agents and engines on the wire's receiving device.

``python -m tests.cases.card_child``: each line of standard input is ``{"do", "arguments"}``, a method of ``Replicas``;
each is answered by a line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases.card_models import MODELS, Even, values_of
from tests.cases.cards import kept_by
from tests.cases.cases_distribution import Rows, own_rows, sharded
from tests.cases.wires import WIRES, Wire, busy_stream, one_card
from tests.transports.host_card import card
from weightplane.controlplane import failpoints
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource
from weightplane.transports import collective_receive, cuda_copy

__all__: list[str] = []


def _own_stream(device: str) -> AbstractContextManager[object]:
    """A new stream of a card, which waits for no other, as the calling thread's current one."""
    if device == "cpu":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


class Readers:
    """A generation loop: passes behind the engine's gate, each reads every layer on a stream of its own."""

    def __init__(self, engine: TorchModuleEngine, device: str) -> None:
        self._engine, self._device = engine, device
        self.torn: list[str] = []
        self.passes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        live = self._engine.modules[0]
        assert isinstance(live, Even)
        if self._device != "cpu":
            torch.cuda.set_device(self._device)
        mine = _own_stream(self._device)
        while not self._stop.is_set():
            with self._engine.forward() as tag, mine, torch.no_grad():
                found = set(live.ends().flatten().tolist())
            self.passes += 1
            if found != {float(tag.trainer_step)}:
                self.torn.append(f"a pass of step {tag.trainer_step} read {sorted(found)[:4]}")

    def end(self) -> None:
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()


class Replicas:
    """What the test may order."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._agents: dict[str, InferenceAgent] = {}
        self._engines: dict[str, TorchModuleEngine] = {}
        self._inside, self._go = threading.Event(), threading.Event()
        self._readers: Readers | None = None
        self._cloned: list[torch.Tensor] = []
        self._wire, self._device = Wire("shm", "host"), "cpu"
        self._module: Even | None = None
        self._publisher: Publisher | None = None

    def use(self, wire: str, plant: str = "", sends: bool = False) -> None:
        """Become the receiving end of a wire (or the sending one), with a defect or without."""
        from tests.cases.plants_cards import card_planted

        self._wire = WIRES[wire]
        self._device = self._wire.sender if sends else self._wire.receiver
        if self._device != "cpu":
            torch.cuda.set_device(self._device)
        self._stack.enter_context(self._wire.here())
        if plant:
            self._stack.enter_context(card_planted(plant))

    def join(
        self,
        address: str,
        name: str,
        model: str,
        staged: bool = False,
        workers: int = 1,
        heartbeat: bool = False,
        clones: bool = False,
        shared_card: bool = False,
    ) -> None:
        """A replica."""
        device = self._device
        if shared_card:
            self._stack.enter_context(one_card())
        hooks: list[Callable[[nn.Module], None]] = [self._clone] if clones else []
        if workers > 1:
            rows = MODELS[model](device)
            assert isinstance(rows, Rows)
            engine = sharded(rows, workers)
        else:
            engine = TorchModuleEngine(MODELS[model](device), staged=staged, hooks=hooks)
        agent = InferenceAgent(address, "g", name, engine, transports=[self._wire.transport], heartbeat=heartbeat)
        self._agents[name], self._engines[name] = agent, engine
        agent.start()
        assert agent.wait_live(20), agent.status()

    def _clone(self, served: nn.Module) -> None:
        """A consumer at the earliest moment, on a stream that waits for nobody."""
        with _own_stream(self._device):
            self._cloned = [p.detach().clone() for p in served.parameters()]

    def train(self, address: str, name: str) -> None:
        """Be the group's trainer, of ``Even``; one before is fenced."""
        self._module = Even().to(self._device)
        self._publisher = Publisher(
            address,
            "g",
            ModuleSource(self._module),
            trainer_id=name,
            transport=self._wire.transport,
            bucket_bytes=Even.BUCKET,
            takeover=True,
        )
        self._publisher.init()

    def publish(self, step: int, **options: Any) -> dict[str, Any]:
        """Fill the model with ``step`` and publish it: the version, or what was raised."""
        assert self._module is not None and self._publisher is not None
        self._module.become(step)
        try:
            return {"version": self._publisher.publish(step, **options).version}
        except UpdateFailed as e:
            return {"raised": str(e)}

    # --- questions

    def values(self, name: str) -> dict[str, str]:
        """The digest of every live tensor, as it is now."""
        return values_of(self._engines[name].modules[0])

    def held(self, name: str) -> list[Any]:
        """Version and update that the engine holds."""
        (held,) = set(self._engines[name].held())
        return [held.version, held.update_id]

    def cloned(self) -> list[float]:
        """The values of what ``_clone`` has taken."""
        if self._device != "cpu":
            torch.cuda.synchronize()
        return sorted({float(v) for t in self._cloned for v in torch.stack(torch.aminmax(t)).tolist()})

    def own(self, name: str, base: float) -> list[str]:
        """Which workers do not hold their own rows of ``Rows`` of that base."""
        rows = Rows()
        rows.become(base)
        return own_rows(self._engines[name], rows.to(self._device))

    def place(self, name: str, tensor: str) -> int:
        """Where a live tensor lies."""
        return self._engines[name].modules[0].get_parameter(tensor).data_ptr()

    def holders(self, name: str) -> list[str]:
        """Who holds generation back."""
        return sorted(self._engines[name].holders())

    def kept(self) -> dict[str, int]:
        """What this side keeps: mappings of others' memory, and of its card."""
        if self._publisher is not None:
            return kept_by(self._publisher, self._device)
        gc.collect()
        found = {"mapped": card().mapped if self._wire.id == "cuda_ipc-host" else 0, "entries": 0}
        for agent in self._agents.values():
            assert agent._ops is not None
            for opened in agent._ops._channels._open.values():
                channel: Any = opened
                if hasattr(channel, "_programs"):
                    found["entries"] += len(channel._programs)
                elif hasattr(channel, "_importer") and hasattr(channel._importer, "_mapped"):
                    found["mapped"] += len(channel._importer._mapped)
        if self._device != "cpu":
            torch.cuda.synchronize()
            found["card"] = torch.cuda.memory_allocated()
        return found

    # --- faults

    def hold(self, point: str, nth: int) -> None:
        """Stand still at a failpoint's n-th hit from now on, until ``go``."""
        self._inside.clear()
        self._go.clear()

        def hook(hit: str, n: int) -> None:
            if hit == point and n == nth:
                self._inside.set()
                self._go.wait()

        failpoints.set_hook(hook)

    def fault(self, point: str, nth: int, action: str) -> None:
        """At a failpoint's n-th hit from now on: ``KILL`` or ``STOP`` oneself."""

        def hook(hit: str, n: int) -> None:
            if hit == point and n == nth:
                # This thread's: stopped by the process's own it could say some more before another thread stops it.
                signal.pthread_kill(threading.get_ident(), signal.Signals[f"SIG{action}"])

        failpoints.set_hook(hook)

    def inside(self, seconds: float) -> bool:
        """Wait until it stands there."""
        return self._inside.wait(seconds)

    def go(self) -> None:
        """Let it go on."""
        failpoints.set_hook(None)
        self._go.set()

    def drag(self, seconds: float) -> None:
        """Copies that the product queues on the device end so much later, until ``end``."""
        launch, queue_work = cuda_copy.Card.launch, collective_receive.CollectiveReceiveChannel._queue_work

        def slow_launch(made: Any, part: Any) -> Any:
            for stream in made._streams[:1] if self._wire.on_host else made._streams:
                busy_stream(made.cuda, made.device, stream, seconds)
            return launch(made, part)

        def slow_work(channel: Any, *work: Any) -> Any:
            lanes = channel._lanes
            for stream in (lanes.wire, lanes.copy):
                busy_stream(lanes._cuda, lanes._index, stream, seconds)
            return queue_work(channel, *work)

        m = self._stack.enter_context(pytest.MonkeyPatch.context())
        m.setattr(cuda_copy.Card, "launch", slow_launch)
        m.setattr(collective_receive.CollectiveReceiveChannel, "_queue_work", slow_work)

    def read(self, name: str) -> None:
        """Begin to read all the time."""
        self._readers = Readers(self._engines[name], self._device)

    def was_read(self) -> dict[str, Any]:
        """End it: how many passes there were, and what was wrong."""
        readers, self._readers = self._readers, None
        assert readers is not None
        readers.end()
        return {"passes": readers.passes, "torn": readers.torn}

    # --- ends

    def leave(self) -> None:
        """Stop in good order, whatever goes on, and exit: at once, since threads that stand at failpoints never end."""
        for agent in self._agents.values():
            agent.stop("the replica is scaled down", drain_s=0.2)
        os._exit(0)

    def end(self) -> None:
        """Be as before."""
        self.go()
        if self._readers is not None:
            self._readers._stop.set()
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = self._module = None
        for agent in self._agents.values():
            agent.stop(leave=False)
        for engine in self._engines.values():
            engine.close()
        self._agents.clear()
        self._engines.clear()
        self._cloned, self._readers = [], None
        self._stack.close()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    torch.set_num_threads(1)
    replicas = Replicas()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            said = {"value": getattr(replicas, order["do"])(**order["arguments"])}
        except Exception:
            said = {"error": traceback.format_exc()[-3000:]}
        out.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
