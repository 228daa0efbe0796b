"""A real engine whose policy is compared with a trainer's: publishes, requests in flight, plants."""

from __future__ import annotations

import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from tests.inference_agent.server import Server
from weightplane.cli.client import connect
from weightplane.parity.reruns import ride
from weightplane.parity.samples import Sample, Sampling
from weightplane.parity.scorer import TransformersScorer
from weightplane.trainer_agent import Publisher, StateDictSource
from weightplane.v1 import common_pb2, fleet_pb2

from .fleet import Fleet, tensors_of
from .servers import TELLING, VllmServer

GROUP = "parity"
RIDE = 600  # tokens of a request that an update is to meet
OPTIONS = {
    **TELLING,
    "--logprobs-mode": "processed_logprobs",
    "--generation-config": "vllm",
    "--worker-extension-cls": "tests.vllm.parity_plants.ParityPlants",
}
#: What vLLM compiles to rank log-probabilities takes longer than these tests.
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


class ParityEngine:
    """One server, its agent, a trainer that publishes now this checkpoint, now that, and a scorer of each."""

    def __init__(self, plane: Server, folders: dict[str, Path], logs: Path) -> None:
        self.folders = folders
        self.names = list(folders)
        self.server = VllmServer(
            folders[self.names[0]], logs / "parity.log", environment=ENVIRONMENT, options=OPTIONS
        ).launch()
        self.scorers = {n: TransformersScorer(f) for n, f in folders.items()}
        tensors = {n: tensors_of(f) for n, f in folders.items()}
        self._tensors = tensors
        self._live = {k: t.clone() for k, t in tensors[self.names[0]].items()}
        try:
            self._fleet = Fleet(GROUP, plane, {"a": self.server.wait_healthy()}, logs)
        except BaseException:
            self.server.kill()
            raise
        self._plane, self._step = plane, 0
        self.held, self.version = self.names[0], 0
        self.before, self.version_before = "", 0

    def __enter__(self) -> Self:
        self._fleet.__enter__()
        source = StateDictSource(self._live)
        self.publisher = Publisher(self._plane.address, GROUP, source, trainer_id="t").__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.publisher.__exit__(*error)
        finally:
            self._fleet.__exit__(*error)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def other(self) -> str:
        """The checkpoint that it does not hold."""
        return next(n for n in self.names if n != self.held)

    def publish(self, name: str, cache: str = "clear") -> None:
        self._step += 1
        for k, t in self._tensors[name].items():
            self._live[k].copy_(t)
        self.version_before, self.before = self.version, self.held
        self.receipt = self.publisher.publish(self._step, cache=cache, pause="keep", verify="full")
        self.version = self.receipt.version
        self.held = name

    @property
    def replica(self) -> Any:
        """As the control plane knows it."""
        return self._fleet.replica("a")

    @property
    def requests(self) -> int:
        """In flight, as vLLM counts them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return int(
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running"))
        )

    @property
    def routable(self) -> bool:
        return self._fleet.routable("a")

    def policy(self, **fields: Any) -> None:
        """The group's policies from now on."""
        request = fleet_pb2.UpdateGroupRequest(
            request_id=uuid4().hex, group=GROUP, policy=fleet_pb2.GroupPolicy(**fields)
        )
        with connect(self._plane.address, timeout=30) as c:
            c.fleet.UpdateGroup(request, timeout=30)

    def plant(self, what: str = "", tensor: str = "") -> None:
        """See ``ParityPlants.plant``. What stays old at a load is what it holds now. Publish after the end of one."""
        body = {"method": "plant", "args": [what, tensor, str(self.folders[self.held])]}
        self.server.post("/collective_rpc", body)

    def clear_cache(self) -> None:
        self.server.post("/reset_prefix_cache")

    def publish_under(self, prompt: tuple[int, ...], seed: int, name: str, cache: str = "clear") -> Sample:
        """Publish while a request is in flight for certain: an operator's hold keeps it from ending meanwhile."""
        flowing = threading.Event()

        def fly() -> Sample:
            try:
                return ride(
                    self.url,
                    prompt,
                    RIDE,
                    sampling=Sampling(1.0),
                    seed=seed,
                    on_tokens=lambda n: flowing.set() if n > 3 else None,
                )
            finally:
                flowing.set()  # one that failed is not waited for

        ask = {"group": GROUP, "holder": "operator"}
        with connect(self._plane.address, timeout=60) as c, ThreadPoolExecutor(1) as pool:
            flight = pool.submit(fly)
            assert flowing.wait(60), "no tokens come"
            pause = fleet_pb2.PauseGenerationRequest(request_id=uuid4().hex, mode=common_pb2.PAUSE_MODE_KEEP, **ask)
            c.fleet.PauseGeneration(pause, timeout=60)
            try:
                self.publish(name, cache)
            finally:
                c.fleet.ResumeGeneration(fleet_pb2.ResumeGenerationRequest(request_id=uuid4().hex, **ask), timeout=60)
            found = flight.result(120)
        assert len(found.spans) == 2, f"the update came too late: {found.spans}"
        return found
