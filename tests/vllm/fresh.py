"""What a fresh vLLM that never heard of Weightplane makes of given prompts, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .models import CARD, COLLECT, ENVIRONMENT, quick

LONGEST = 4096
#: Requests that are in flight for a while are longer than the tests' models say they can be.
OVERRIDES = {"max_position_embeddings": LONGEST}
Case = tuple[str, list[int], int]
"""Checkpoint, prompt, how many tokens."""


def fresh(cases: list[tuple[Path, list[int], int]]) -> list[list[int]]:
    """Greedy tokens of each case; an engine per checkpoint, without a prefix cache."""
    environment = {**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.fresh"],
        env=environment,
        input=json.dumps([(str(f), p, n) for f, p, n in cases]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=400,
    )
    found: list[list[int]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _main(cases: list[Case]) -> list[list[int]]:
    out: dict[int, list[int]] = {}
    for folder in sorted({c[0] for c in cases}):
        mine = [i for i, c in enumerate(cases) if c[0] == folder]
        out.update(zip(mine, _of(folder, [cases[i] for i in mine]), strict=True))
    return [out[i] for i in range(len(cases))]


def _of(folder: str, cases: list[Case]) -> list[list[int]]:
    """An engine for this call alone: one that is still there takes the next one's process groups with it."""
    from vllm import LLM, SamplingParams

    quick()
    llm = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=LONGEST,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
        hf_overrides=OVERRIDES,
        **CARD,
    )
    prompts: Any = [{"prompt_token_ids": p} for _, p, _ in cases]
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, _, n in cases]
    out = [
        list(llm.generate([p], s, use_tqdm=False)[0].outputs[0].token_ids) for p, s in zip(prompts, each, strict=True)
    ]
    del llm
    COLLECT()
    return out


if __name__ == "__main__":
    print(json.dumps(_main([(f, p, n) for f, p, n in json.load(sys.stdin)])))
