"""Reinforcement learning in Ray actors: two replicas that never stop generating, a trainer that publishes meanwhile.

Run: python examples/ray_loop.py. Ray carries token ids, spans and numbers; weights go from actor to actor by Weightplane.
"""

import asyncio
import collections
import itertools
import os
import tempfile
import threading
import time

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
import ray
import torch
from torch import nn

from weightplane.controlplane.server.thread import ControlPlaneThread
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.spans import from_dicts, lag, spans_of, to_dicts
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource

GROUP, STEPS, REPLICAS, BATCH, TOKENS, LENGTH = "policy", 20, 2, 8, 12, 32


class Policy(nn.Module):
    """The next token, given the last. Each layer carries the step it was published at: a mix of two would show."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(TOKENS, 64), nn.Linear(64, TOKENS)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        for layer in self.layers:
            layer.register_buffer("step", torch.tensor(-1))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, set[int]]:
        h, steps = self.embed(tokens), set()
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
            steps.add(int(layer.step))
        return torch.log_softmax(self.head(h), -1), steps


@ray.remote(num_cpus=1)
class Rollout:
    """A replica: an engine and its agent; a thread generates all the time."""

    def __init__(self, address: str, name: str) -> None:
        self.engine = TorchModuleEngine(Policy())
        self.agent = InferenceAgent(address, GROUP, name, self.engine).start()
        self.made, self.stopping, self.counts = threading.Condition(), False, collections.Counter[str]()
        self.recent: collections.deque[dict] = collections.deque(maxlen=BATCH)
        self.thread = threading.Thread(target=self.generate, daemon=True)
        self.thread.start()

    @torch.inference_mode()
    def generate(self) -> None:
        while not self.stopping:
            tokens, logps, tags, mixed = [0], [], [], 0
            with self.engine.request():
                for _ in range(LENGTH):
                    with self.engine.forward() as tag:  # one pass reads one version, and says which
                        logp, steps = self.engine.modules[0](torch.tensor(tokens[-1]))
                    tokens.append(int(torch.multinomial(logp.exp(), 1)))
                    logps.append(float(logp[tokens[-1]]))
                    tags.append(tag)
                    mixed += steps != {tag.trainer_step}
            spans = spans_of(tags)
            with self.made:
                self.recent.append({"tokens": tokens, "logps": logps, "spans": to_dicts(spans)})
                self.counts.update(outputs=1, passes=LENGTH, mixed=mixed, crossed=len(spans) > 1)
                self.made.notify_all()

    def sample(self) -> list[dict]:
        """The next BATCH outputs that get finished."""
        with self.made:
            want = self.counts["outputs"] + BATCH
            if not self.made.wait_for(lambda: self.counts["outputs"] >= want, timeout=60):
                raise TimeoutError(f"no rollouts: {self.agent.status()}")
            return list(self.recent)

    def stop(self) -> collections.Counter[str]:
        self.stopping = True
        self.thread.join(10)
        self.agent.stop()
        return self.counts


@ray.remote(num_cpus=1)
class Trainer:
    """An asyncio actor: the Publisher lives under its running loop."""

    async def train(self, address: str, rollouts: list) -> dict:
        policy, lags, rewards, versions = Policy(), collections.Counter[int](), [], set()
        adam = torch.optim.Adam(policy.parameters(), lr=0.01)
        async with Publisher(address, GROUP, ModuleSource(policy), pause="keep") as publisher:
            await asyncio.to_thread(publisher.wait_for_replicas, REPLICAS)
            publishing, committed = None, []
            for step in range(STEPS):
                if publishing is not None:
                    await publishing.wait_source_free()  # until here the replicas may still read our weights
                    rewards.append(self.learn(policy, adam, batch))
                    committed.append((await publishing).version)
                    ...
            return {}
