"""The demo's fleet as its trainer sees it: rollouts over HTTP from two replicas, weights by Weightplane."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn

from weightplane.demo.loop import RolloutRequest
from weightplane.demo.sampling import Completion
from weightplane.inference_agent.threads import awaited
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.receipt import PublishReceipt

__all__ = ["FleetError", "HttpFleet"]


class FleetError(RuntimeError):
    """A replica refused or answered with tokens of another version than the one published."""


class HttpFleet:
    """``loop.Fleet`` over real replicas. Without ``publisher`` nothing is ever published (the control).

    Every token's version is checked: after a publish no replica may answer from other weights.
    """

    def __init__(self, generate: Mapping[str, str], publisher: Publisher | None) -> None:
        self._addresses = dict(generate)
        self._publisher = publisher
        self._pool = ThreadPoolExecutor(len(self._addresses), thread_name_prefix="rollout")
        self.receipts: list[PublishReceipt] = []
        self.tokens_by_version: dict[int, int] = {}

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """See ``loop.Fleet``: request i goes to replica i modulo their number."""
        names = list(self._addresses)
        jobs = [self._pool.submit(self._ask, names[i % len(names)], r) for i, r in enumerate(requests)]
        return [awaited(job) for job in jobs]

    def publish(self, model: nn.Module, step: int) -> None:
        """See ``loop.Fleet``. The publisher's source reads ``model`` itself."""
        if self._publisher is not None:
            self.receipts.append(self._publisher.publish(step))

    def digests(self) -> dict[str, dict[str, str]]:
        """By replica, the LIVE digest of every tensor, read back from its memory."""
        return {name: self._call(address, "/digests") for name, address in self._addresses.items()}

    def versions(self) -> dict[str, int]:
        """By replica, the version that its workers hold."""
        return {name: int(self._call(address, "/version")["version"]) for name, address in self._addresses.items()}

    def close(self) -> None:
        """End the rollout threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, name: str, request: RolloutRequest) -> list[Completion]:
        body = {
            "prompts": request.prompts,
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        answer = self._call(self._addresses[name], "/generate", body)
        want = self.receipts[-1].version if self.receipts else 0
        out: list[Completion] = []
        for c in answer["completions"]:
            for span in c["spans"]:
                version = int(span["version"])
                self.tokens_by_version[version] = self.tokens_by_version.get(version, 0) + span["stop"] - span["start"]
                if version != want:
                    raise FleetError(f"replica {name} answered with tokens of version {version}; {want} is published")
            out.append(Completion(c["tokens"], c["logprobs"], [], c["finished"]))
        return out

    def _call(self, address: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{address}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise FleetError(f"{address}{path}: {error.code}: {text}") from error
