"""Tiny Qwen2 checkpoints, made on the spot, and what a vLLM that never heard of Weightplane generates from them."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PROMPTS = [[1, 10, 20, 30], [1, 7], [1, *((7 * i) % 500 + 5 for i in range(199))]]
TOKENS = 24
COLLECT = gc.collect
#: Of two processes that run tests side by side each has a core for its engines.
CORE = "1" if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" else "0"
_HAS_CARD = Path("/dev/nvidiactl").exists()
#: What every engine of these tests is made with on a GPU: attention in Triton, a share of the card.
CARD: dict[str, Any] = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.15} if _HAS_CARD else {}
#: And those that take weights: memory that sleeps, which one engine of a process may have there.
REPLICA: dict[str, Any] = {**CARD, "enable_sleep_mode": True} if _HAS_CARD else {}
_ON_A_CARD = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the tests' process may have asked the card something
}
#: What every vLLM of these tests is run with.
ENVIRONMENT = {
    **(_ON_A_CARD if _HAS_CARD else {}),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH", "")]).rstrip(
        ":"
    ),
}


def make_model(folder: Path, seed: int, *, tie: bool = False, dtype: str = "float32", experts: int = 0) -> Path:
    """A checkpoint of 0.5 million parameters (more with experts), with a tokenizer of numbered words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found, unused-ignore]
    from transformers import (  # type: ignore[import-not-found, unused-ignore]
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
    )

    torch.manual_seed(seed)
    kind, model, more = Qwen2Config, Qwen2ForCausalLM, {}
    if experts:
        kind, model = Qwen2MoeConfig, Qwen2MoeForCausalLM
        more = {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
        }
    config = kind(
        **more,
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tie,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    model(config).to(getattr(torch, dtype)).save_pretrained(folder)
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"t{i}": i for i in range(3, 512)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Goldens(Mapping[str, list[list[int]]]):
    """Greedy tokens of ``PROMPTS`` from a fresh engine of each checkpoint, of a process without our plug-in.

    They are made while other things start; who asks waits. ``kept``: a file where they lie for others of this run, or
    (``VLLM_GOLDENS``) for other runs on this machine: checkpoints are made from seeds.
    """

    def __init__(self, folders: Mapping[str, Path], kept: Path) -> None:
        self._kept = Path(os.environ.get("VLLM_GOLDENS", kept))
        self._found: dict[str, list[list[int]]] = {}
        self._names = list(folders)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            kept.with_suffix(".mine").touch(exist_ok=False)
        except FileExistsError:
            return  # somebody else makes them
        if self._kept.exists():
            return
        environment = {**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [
            sys.executable,
            "-m",
            "tests.vllm.models",
            str(self._kept),
            *(f"{n}={p}" for n, p in folders.items()),
        ]
        self._process = subprocess.Popen(command, env=environment)

    def close(self) -> None:
        """Nobody asks any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def __getitem__(self, name: str) -> list[list[int]]:
        if not self._found:
            end = time.monotonic() + 400
            while not self._kept.exists():
                failed = self._process is not None and self._process.poll()
                assert not failed and time.monotonic() < end, "no golden tokens were made"
                time.sleep(0.05)
            self._found = json.loads(self._kept.read_text())
            assert len({str(v) for v in self._found.values()}) == len(self._names), "the models must not agree"
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def dtype_of(folder: str | Path) -> str:
    """What a checkpoint is in."""
    return str(json.loads((Path(folder) / "config.json").read_text())["dtype"])


def quick() -> None:
    """vLLM collects garbage seven times an engine, a quarter of a second each with all that is imported: ``COLLECT`` at
    its end is enough in a process that makes many."""
    gc.collect = lambda *_: 0


def _generate(folder: str) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    quick()
    llm = LLM(
        model=folder,
        dtype=dtype_of(folder),
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        **CARD,
    )
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": p} for p in PROMPTS]
    out = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]
    del llm
    COLLECT()
    return out


if __name__ == "__main__":
    into = Path(sys.argv[1])
    made = {n: _generate(p) for n, _, p in (a.partition("=") for a in sys.argv[2:])}
    into.with_suffix(".new").write_text(json.dumps(made))
    into.with_suffix(".new").rename(into)
