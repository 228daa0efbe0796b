"""Reinforcement learning in Ray actors: replicas that never stop generating, a trainer that publishes meanwhile.

Run: python examples/ray_loop.py. Ray carries token ids, spans and numbers; the weights go by Weightplane.
"""

import asyncio
import os
import queue
import secrets
import tempfile
import threading
import time
from collections import Counter

import ray
import torch
from torch import nn

from weightplane.controlplane.server.thread import ControlPlaneThread
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.spans import from_dicts, lag, spans_of, to_dicts
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource

STEPS, REPLICAS, BATCH, LENGTH, TOKENS = 20, 2, 8, 16, 12


class Policy(nn.Sequential):
    """The next token, given the last. Each layer holds the step it was published at: a mix of two would show."""

    def __init__(self):
        super().__init__(nn.Embedding(TOKENS, 256), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, TOKENS))
        for layer in self:
            layer.register_buffer("step", torch.tensor(-1))

    def forward(self, tokens):
        return torch.log_softmax(super().forward(tokens), -1), {int(step) for step in self.buffers()}


class Rollout:
    """A replica: an engine, its agent, and a thread that generates all the time."""

    def __init__(self, address, name):
        self.engine, self.stopping = TorchModuleEngine(Policy()), False
        self.agent = InferenceAgent(address, "policy", name, self.engine).start()
        self.made, self.counts = queue.SimpleQueue[tuple](), Counter[str]()
        self.thread = threading.Thread(target=self.generate, daemon=True)
        self.thread.start()

    @torch.inference_mode()
    def generate(self):
        while not self.stopping:
            tokens, tags, mixed = [0], [], 0
            with self.engine.request():
                for _ in range(LENGTH):
                    with self.engine.forward() as tag:  # one pass reads one version, and says which
                        logp, steps = self.engine.modules[0](torch.tensor(tokens[-1]))
                        time.sleep(0.001)  # an accelerator would be at work
                    tokens.append(int(torch.multinomial(logp.exp(), 1)))
                    tags.append(tag)
                    mixed += steps != {tag.trainer_step}
            self.made.put((tokens, to_dicts(spans_of(tags))))
            self.counts.update(outputs=1, passes=LENGTH, mixed=mixed, across=len(set(tags)) > 1)

    def sample(self):
        self.made = queue.SimpleQueue()  # what gets finished from here on
        return [self.made.get(timeout=60) for _ in range(BATCH)]

    def stop(self):
        self.stopping = True
        self.thread.join(10)
        self.agent.stop()
        return self.counts


class Trainer:
    """An asyncio actor: the Publisher works under its running loop."""

    async def train(self, address, rollouts):
        policy, committed, versions, lags, rewards = Policy(), [], set(), Counter[int](), []
        adam = torch.optim.Adam(policy.parameters(), lr=0.01)
        async with Publisher(address, "policy", ModuleSource(policy), pause="keep") as publisher:
            await asyncio.to_thread(publisher.wait_for_replicas, REPLICAS)
            for trainer_step in range(STEPS):
                for step in policy.buffers():
                    step.fill_(trainer_step)
                publishing = publisher.publish_async(trainer_step)
                samples = await asyncio.gather(*(r.sample.remote() for r in rollouts))  # made while it publishes
                await publishing.wait_source_free()  # until here the replicas may still read our weights
                rewards.append(self.learn(policy, adam, [tokens for sample in samples for tokens, _ in sample]))
                committed.append((await publishing).version)
                for spans in (from_dicts(rows) for sample in samples for _, rows in sample):
                    versions |= {s.version for s in spans}
                    lags[lag(spans, committed[-1], committed).most] += 1
        return committed, sorted(versions), dict(sorted(lags.items())), rewards

    def learn(self, policy, adam, outputs):  # a token is worth 1 if it is the number after the last one
        before, after = torch.tensor(outputs)[:, :-1], torch.tensor(outputs)[:, 1:]
        reward = (after == (before + 1) % TOKENS).float()
        logp = policy(before)[0].gather(-1, after[..., None])[..., 0]
        adam.zero_grad()
        (-(reward - reward.mean()) * logp).mean().backward()
        adam.step()
        return float(reward.mean())


if __name__ == "__main__":
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    actor = ray.remote(num_cpus=1)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # 127.0.0.2: Ray replaces 127.0.0.1 by another address
        node = {"_node_ip_address": "127.0.0.2", "_temp_dir": folder, "include_dashboard": False, "num_cpus": 3}
        with ray.init("local", object_store_memory=10**8, **node), ControlPlaneThread() as plane:
            rollouts = [actor(Rollout).remote(plane.address, f"replica-{i}") for i in range(REPLICAS)]
            committed, versions, lags, rewards = ray.get(actor(Trainer).remote().train.remote(plane.address, rollouts))
            counts: Counter[str] = sum(ray.get([r.stop.remote() for r in rollouts]), Counter())
    print(f"committed {committed}, sampled {versions}; outputs by lag in versions {lags}")
    print(f"{counts['across']} of {counts['outputs']} outputs went on across a publish")
    print(f"{counts['mixed']} of {counts['passes']} passes mixed; reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
