"""A small decoder-only transformer: the model that ``weightplane demo`` trains and serves.

It is plain ``torch.nn`` and holds what a weight update has to get right: the embedding and the LM head are one
tied parameter under two names, and the rotary tables are non-persistent buffers that no update may touch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["DecoderLM", "KVCache", "ModelConfig", "build_model"]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a `DecoderLM`; two processes that share it build modules with the same tensors."""

    vocab_size: int = 16
    d_model: int = 128
    n_layers: int = 2
    n_heads: int = 4
    max_len: int = 64

    @property
    def head_dim(self) -> int:
        """Width of one attention head (even, because of the rotary pairs)."""
        return self.d_model // self.n_heads

    def __post_init__(self) -> None:
        if self.d_model % self.n_heads or self.head_dim % 2:
            raise ValueError(f"d_model {self.d_model} does not split into {self.n_heads} heads of even width")


class KVCache:
    """Keys and values of the positions seen so far, for one batch.

    Two float32 tensors ``[n_layers, batch, n_heads, max_len, head_dim]`` are allocated once; `length` counts the
    positions that are filled. The content is valid only for the weights that computed it: call `reset` on a change.
    """

    def __init__(self, config: ModelConfig, batch: int, device: torch.device | None = None) -> None:
        shape = (config.n_layers, batch, config.n_heads, config.max_len, config.head_dim)
        self.keys = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)
        self.length = 0

    def reset(self) -> None:
        """Forget every position; the next forward pass must bring the whole prefix."""
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``[batch, n_heads, t, head_dim]`` behind `length`; return views of all positions up to there.

        `length` itself moves once per forward pass, in `DecoderLM.forward`, after the last layer has written.
        """
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads = config.n_heads
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        causal = mask is None and length > 1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class _Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(config.d_model)
        self.attn = _Attention(config, layer)
        self.norm_mlp = nn.LayerNorm(config.d_model)
        self.up = nn.Linear(config.d_model, 4 * config.d_model)
        self.down = nn.Linear(4 * config.d_model, config.d_model)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        x = x + self.attn(self.norm_attn(x), cos, sin, mask, cache)
        y: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return y


class DecoderLM(nn.Module):
    """Decoder-only transformer: pre-norm blocks, rotary positions, LM head tied to the embedding; float32.

    ``state_dict()`` names the tied tensor twice (``embed.weight``, ``lm_head.weight``: one storage) and leaves the
    rotary tables ``rope_cos`` and ``rope_sin`` out (non-persistent buffers, a function of the config alone).
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(_Block(config, layer) for layer in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed.weight
        cos, sin = _rope_tables(config)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def new_cache(self, batch: int) -> KVCache:
        """An empty cache for `batch` sequences of at most ``config.max_len`` positions."""
        return KVCache(self.config, batch, self.embed.weight.device)

    def forward(self, tokens: Tensor, cache: KVCache | None = None, pad: Tensor | None = None) -> Tensor:
        """Logits for the token that follows each position.

        Args:
            tokens: int64 ``[batch, t]``; with a filled cache, only the positions that the cache lacks.
            cache: positions already computed; extended by this call. A call that brings more than one position to a
                filled cache is refused: it would need a mask that nothing here uses.
            pad: int64 ``[batch]``, how many leading positions of each row are left padding; None when there is none.

        Returns:
            float32 ``[batch, t, vocab_size]``. Rows of padding positions mean nothing.
        """
        start = 0 if cache is None else cache.length
        length = tokens.shape[1]
        if start + length > self.config.max_len:
            raise ValueError(f"{start + length} positions exceed max_len {self.config.max_len}; shorten the request")
        if start and length != 1:
            raise ValueError(f"a filled cache takes one position a call, got {length}; reset it to prefill again")
        cos, sin, mask = self._positions(start, length, pad)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, mask, cache)
        if cache is not None:
            cache.length = start + length
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def _positions(self, start: int, length: int, pad: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rotary rows (broadcastable to ``[batch, n_heads, t, head_dim / 2]``) and the bool mask, None if causal."""
        if pad is None:
            return self.rope_cos[start : start + length], self.rope_sin[start : start + length], None
        queries = torch.arange(start, start + length, device=pad.device)
        keys = torch.arange(start + length, device=pad.device)
        rows = (queries[None, :] - pad[:, None]).clamp(min=0)
        same = keys[None, None, :] == queries[None, :, None]  # keeps a padding query's softmax finite
        seen = (keys[None, None, :] <= queries[None, :, None]) & (keys[None, None, :] >= pad[:, None, None])
        return self.rope_cos[rows][:, None], self.rope_sin[rows][:, None], (same | seen)[:, None]


def build_model(config: ModelConfig, seed: int) -> DecoderLM:
    """A `DecoderLM` whose weights depend on `config` and `seed` only (the global generator is neither read nor moved).

    Matrices are normal with standard deviation 0.02, those that write to the residual stream scaled down by
    ``sqrt(2 * n_layers)``; so the first policy is nearly uniform, which is what exploration needs.
    """
    with torch.random.fork_rng(devices=[]):
        model = DecoderLM(config)
    generator = torch.Generator().manual_seed(seed)
    residual = 0.02 / math.sqrt(2 * config.n_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                std = residual if name.endswith(("attn.out.weight", "down.weight")) else 0.02
                parameter.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
    return model


def _rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines, float32 ``[max_len, head_dim / 2]`` each."""
    rates = 10000.0 ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angles = torch.arange(config.max_len, dtype=torch.float64)[:, None] * rates[None, :]
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to ``[batch, n_heads, t, head_dim]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
