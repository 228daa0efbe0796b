"""The models of ``vllm_gpu.py``: a ``config.json`` for vLLM, tensors for a trainer. Imports neither."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _models
from benchmarks._models import Shape

__all__ = ["MODELS", "Decoder", "environment", "options", "to_log"]


@dataclass(frozen=True)
class Decoder:
    """A Qwen2 (dense, biases on q, k, v), or with ``experts`` a Qwen3-MoE (norms on q and k), by its dimensions."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocab: int
    experts: int = 0

    def config(self) -> dict[str, Any]:
        """What vLLM is started from."""
        kind = ("Qwen3MoeForCausalLM", "qwen3_moe") if self.experts else ("Qwen2ForCausalLM", "qwen2")
        moe = {
            "moe_intermediate_size": self.inner,
            "num_experts": self.experts,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
        }
        return {
            "architectures": [kind[0]],
            "model_type": kind[1],
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "intermediate_size": self.inner,
            "vocab_size": self.vocab,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            **(moe if self.experts else {}),
        }

    def tensors(self) -> list[Shape]:
        """Name, dtype, shape of every tensor of the checkpoint, in its order."""
        query, kv = self.heads * self.head, self.kv_heads * self.head
        widths = _models.Decoder(self.layers, self.hidden, query, kv, self.head, self.inner, self.vocab, self.experts)
        return [(name, "bfloat16", shape) for name, shape in widths.tensors()]

    def rows(self) -> dict[str, list[tuple[str, int]]]:
        """By vLLM's fused name: the checkpoint's names and how many rows each has there."""
        query, kv = self.heads * self.head, self.kv_heads * self.head
        return {
            "qkv_proj": [("q_proj", query), ("k_proj", kv), ("v_proj", kv)],
            "gate_up_proj": [("gate_proj", self.inner), ("up_proj", self.inner)],
        }

    def folder(self, at: Path) -> str:
        """Write the config there."""
        at.mkdir(parents=True, exist_ok=True)
        (at / "config.json").write_text(json.dumps(self.config()))
        return str(at)


#: ``dense``: Qwen2.5-7B. ``two``: two layers of it, a small vocabulary. ``experts``: a small mixture. ``tiny…``: CPU.
MODELS = {
    "dense": Decoder(28, 3584, 28, 4, 128, 18944, 152064),
    "two": Decoder(2, 3584, 28, 4, 128, 18944, 32000),
    "experts": Decoder(4, 1024, 16, 4, 64, 512, 32000, experts=32),
    "tiny": Decoder(3, 128, 4, 2, 32, 256, 512),
    "tiny-deep": Decoder(28, 128, 4, 2, 32, 256, 512),  # as many tensors as ``dense``
    "tiny-experts": Decoder(2, 128, 4, 2, 32, 64, 512, experts=4),
}


def options(device: str, **more: Any) -> dict[str, Any]:
    """How every vLLM here is started: without a tokenizer and, unless ``more`` says otherwise, with dummy weights."""
    common = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "worker_extension_cls": "benchmarks._vllm_gpu_worker.Probe",
        "seed": 0,
    }
    if device == "cpu":
        common |= {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
    else:
        common |= {
            "max_model_len": 2048,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": 2 << 30,
            "gpu_memory_utilization": 0.1,  # asked of what is free at its start only: the cache's size is given
            "attention_backend": "TRITON_ATTN",
        }
    return {**common, **more}


def to_log() -> None:
    """From here on what this process and its children print as errors goes to ``WEIGHTPLANE_BENCH_LOG``."""
    where = os.environ.get("WEIGHTPLANE_BENCH_LOG")
    if where:
        log = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 2)
        os.close(log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")


def environment(log: Path, device: str, cards: str) -> dict[str, str]:
    """Of every process that runs vLLM. ``cards``: the GPUs it sees, its own first; or ``0|1``: a core per instance."""
    found = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device != "cpu":
        found["CUDA_VISIBLE_DEVICES"] = cards
    else:
        found["VLLM_CPU_OMP_THREADS_BIND"] = cards if "|" in cards else "0"
    return {**found, "WEIGHTPLANE_BENCH_LOG": str(log)}
