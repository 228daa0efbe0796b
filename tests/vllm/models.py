"""Tiny Qwen2 checkpoints, made on the spot, and what a vLLM that never heard of Weightplane generates from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[1, 10, 20, 30], [1, 7], [1, *((7 * i) % 500 + 5 for i in range(199))]]
TOKENS = 24
#: What every vLLM of these tests is run with.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
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


def goldens(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Greedy tokens of ``PROMPTS`` from a fresh engine of each checkpoint, in a process without our plug-in.

    ``VLLM_GOLDENS``: a file to keep them in between runs on one machine (checkpoints are made from seeds).
    """
    kept = Path(os.environ["VLLM_GOLDENS"]) if "VLLM_GOLDENS" in os.environ else None
    if kept is not None and kept.exists():
        known: dict[str, list[list[int]]] = json.loads(kept.read_text())
        return known
    environment = {**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", "tests.vllm.models", *(f"{n}={p}" for n, p in folders.items())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=400)
    found: dict[str, list[list[int]]] = json.loads(done.stdout.strip().splitlines()[-1])
    if kept is not None:
        kept.write_text(json.dumps(found))
    return found


def dtype_of(folder: str | Path) -> str:
    """What a checkpoint is in."""
    return str(json.loads((Path(folder) / "config.json").read_text())["dtype"])


def _generate(folder: str) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype=dtype_of(folder),
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
    )
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": p} for p in PROMPTS]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]


if __name__ == "__main__":
    print(json.dumps({n: _generate(p) for n, _, p in (a.partition("=") for a in sys.argv[1:])}))
