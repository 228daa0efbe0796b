"""The demo's fleet of stock vLLM servers as its trainer sees it, and the Qwen2 that they serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weightplane.demo.config import DemoConfig
from weightplane.demo.fleet import FleetError
from weightplane.demo.grpo import token_logprobs
from weightplane.demo.loop import RolloutRequest
from weightplane.demo.sampling import Completion
from weightplane.inference_agent.engines.vllm.rollouts import RolloutError, Rollouts, VllmOutput
from weightplane.inference_agent.threads import awaited
from weightplane.parity.batch import BatchParity, batch_parity
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.receipt import PublishReceipt

__all__ = ["Policy", "VllmFleet"]

_AT_ONCE = 32  # requests to one server; each is a whole group of completions


class Policy(nn.Module):
    """A tiny Qwen2 of ``transformers`` (0.25 M parameters) with the task's vocabulary: token ids in, logits out."""

    def __init__(self, config: DemoConfig, seed: int) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM  # type: ignore[import-not-found, unused-ignore]

        super().__init__()
        torch.manual_seed(seed)
        shape = Qwen2Config(
            vocab_size=config.model.vocab_size,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        self.inner: Any = Qwen2ForCausalLM(shape).float()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits float32 ``[n, t, vocab]`` of token ids int64 ``[n, t]``."""
        logits: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits

    def save(self, folder: Path) -> Path:
        """As a checkpoint that vLLM starts from."""
        self.inner.save_pretrained(folder)
        return folder


class VllmFleet:
    """``loop.Fleet`` over real vLLM servers. Without ``publisher`` nothing is ever published (the control).

    The log-probabilities are vLLM's. Every token's version is checked, as vLLM labels it. ``policy``: the trainer's;
    every batch is scored again by it as it comes, and ``batches`` says what each is worth.
    """

    def __init__(self, urls: Mapping[str, str], publisher: Publisher | None, policy: nn.Module | None = None) -> None:
        self.batches: list[BatchParity] = []
        self._policy = policy
        self.servers = {name: Rollouts(url) for name, url in urls.items()}
        self._publisher = publisher
        self._pool = ThreadPoolExecutor(_AT_ONCE * len(urls), thread_name_prefix="rollout")
        self.receipts: list[PublishReceipt] = []

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """See ``loop.Fleet``: request i goes to server i modulo their number, equal prompts as one call."""
        names = list(self.servers)
        jobs: list[list[Future[list[VllmOutput]]]] = []
        for i, request in enumerate(requests):
            groups = [(prompt, len(list(same))) for prompt, same in groupby(request.prompts)]
            name = names[i % len(names)]
            jobs.append([self._pool.submit(self._ask, name, request, p, n, g) for g, (p, n) in enumerate(groups)])
        answers = [[done for job in of_request for done in awaited(job)] for of_request in jobs]
        if self._policy is not None:
            self.batches.append(self._parity(self._policy, requests, answers))
        return [[Completion(o.tokens, o.logprobs, [], o.finish == "length") for o in outs] for outs in answers]

    def _parity(
        self, policy: nn.Module, requests: Sequence[RolloutRequest], answers: Sequence[Sequence[VllmOutput]]
    ) -> BatchParity:
        """Of a batch whose prompts are of equal length, and whose completions are."""
        outs = [out for outs in answers for out in outs]
        recomputed: list[list[float]] = []
        for request, of_request in zip(requests, answers, strict=True):
            rows = [[*p, *o.tokens] for p, o in zip(request.prompts, of_request, strict=True)]
            with torch.no_grad():
                scores = token_logprobs(policy, torch.tensor(rows), request.temperature)
            recomputed += scores[:, -request.max_new_tokens :].tolist()
        version = self.receipts[-1].version if self.receipts else 0
        return batch_parity([o.logprobs for o in outs], [o.spans for o in outs], recomputed, version)

    def publish(self, model: nn.Module, step: int) -> None:
        """See ``loop.Fleet``. The publisher's source reads ``model`` itself."""
        if self._publisher is not None:
            self.receipts.append(self._publisher.publish(step, verify="full"))

    def versions(self) -> dict[str, int]:
        """By replica, the version that vLLM itself says it has."""
        return {name: server.held() for name, server in self.servers.items()}

    def digests_match(self) -> bool:
        """Whether in every publish every replica's digests of what it got equalled the trainer's (``verify`` is full).

        A replica whose digests differ does not become READY, and the publish fails: this reads the receipts.
        """
        return bool(self.receipts) and all(
            receipt.committed
            and {r.replica_id for r in receipt.replicas} == set(self.servers)
            and all(r.state == "READY" and r.held == receipt.version and r.evidence for r in receipt.replicas)
            for receipt in self.receipts
        )

    def close(self) -> None:
        """End the rollout threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, name: str, request: RolloutRequest, prompt: list[int], n: int, group: int) -> list[VllmOutput]:
        want = self.receipts[-1].version if self.receipts else 0
        try:
            outputs = self.servers[name].generate(
                prompt,
                max_tokens=request.max_new_tokens,
                n=n,
                temperature=request.temperature,
                seed=(request.seed + 1_000_003 * group) % (1 << 62),
            )
        except RolloutError as error:
            raise FleetError(f"replica {name}: {error}") from error
        for out in outputs:
            if {(s.known, s.version) for s in out.spans} != {(True, want)}:
                raise FleetError(f"replica {name} answered with tokens of {out.spans}; version {want} is published")
        return outputs
