"""Servers, the agents beside them, and what the control plane says of them."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.inference_agent.server import Server, eventually
from weightplane.controlplane.core import members
from weightplane.trainer_agent import Publisher, PublishReceipt, SafetensorsSource, Source, StateDictSource

from .servers import AgentProcess, VllmServer

__all__ = ["Fleet", "tensors_of"]


class Fleet:
    """A group of real vLLM servers. Everything ends with it."""

    def __init__(self, group: str, plane: Server, servers: dict[str, VllmServer], logs: Path) -> None:
        self.group, self.plane, self.servers, self.logs = group, plane, servers, logs
        self.agents: dict[str, AgentProcess] = {}
        self.step = 0

    def __enter__(self) -> Self:
        for name in self.servers:
            self.agent(name)
        for name in self.servers:
            eventually(lambda n=name: self.there(n), 60, f"replica {name} joins: {self.log(name)}")  # type: ignore[misc]
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for agent in self.agents.values():
            agent.stop()
        for server in self.servers.values():
            server.kill()

    def agent(self, name: str) -> AgentProcess:
        """Start the agent of a server (anew)."""
        url = self.servers[name].url
        found = AgentProcess(self.plane.address, self.group, name, url, self.logs / f"{name}.agent.log")
        self.agents[name] = found
        return found

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.agent.log").read_text()[-3000:]

    def replica(self, name: str) -> Any:
        """As the control plane knows it."""
        return self.plane.state(self.group).replicas.get(name)

    def there(self, name: str) -> bool:
        r = self.replica(name)
        return r is not None and r.reported and r.liveness == "LIVE"

    def routable(self, name: str) -> bool:
        """Whether a router may send requests there."""
        return members.routable(self.plane.state(self.group), self.replica(name))[2]

    def weights(self, name: str) -> tuple[str, int]:
        """(state, version) of a replica."""
        r = self.replica(name)
        return str(r.weights), r.held.version

    def publisher(self, source: Path | dict[str, Any] | Source, **options: Any) -> Publisher:
        """As a trainer of its own would make it; publish with ``step=fleet.step``."""
        self.step += 1
        if isinstance(source, Path):
            source = SafetensorsSource(source)
        elif isinstance(source, dict):
            source = StateDictSource(source)
        return Publisher(self.plane.address, self.group, source, takeover=True, **options)

    def publish(self, source: Path | dict[str, Any] | Source, **options: Any) -> PublishReceipt:
        """Publish a checkpoint or named tensors."""
        with self.publisher(source, **options) as publisher:
            return publisher.publish(step=self.step)

    def tokens(self, name: str) -> list[list[int]]:
        return self.servers[name].all_tokens()


def tensors_of(folder: Path) -> dict[str, Any]:
    """A checkpoint's tensors by name, in memory."""
    from safetensors.torch import load_file  # type: ignore[import-not-found, unused-ignore]

    return dict(load_file(folder / "model.safetensors"))
