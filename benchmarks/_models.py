"""Tensor lists to publish: real models' names, counts and shapes, blobs of one size, and very many tiny tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from weightplane.controlplane.core.manifest import DTYPE_BYTES

__all__ = ["MODELS", "ON_CPU", "REAL", "Shape", "model", "model_bytes"]

#: Name, dtype, shape.
Shape = tuple[str, str, tuple[int, ...]]

_BLOBS = {"16MiB": 16 << 20, "256MiB": 256 << 20, "1GiB": 1 << 30}
#: Real lists, for cards: 15.23 and 16.20 GB.
REAL = ("dense", "moe")
#: What a host without cards runs by default.
ON_CPU = (*_BLOBS, "transformer", "tiny", "dense-cpu", "moe-cpu")
MODELS = (*ON_CPU, *REAL)


@dataclass(frozen=True)
class Decoder:
    """A decoder's dimensions; ``experts`` 0: a dense one, with biases on its projections."""

    layers: int
    hidden: int
    query: int
    key_value: int
    head: int
    inner: int
    vocab: int
    experts: int = 0

    def cut(self, by: int) -> Decoder:
        """The same tensors, each width divided."""
        fields = ("hidden", "query", "key_value", "head", "inner", "vocab")
        return replace(self, **{field: getattr(self, field) // by for field in fields})

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in the checkpoint's order."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for i in range(self.layers):
            for name, shape in self._layer():
                yield f"model.layers.{i}.{name}", shape
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)

    def _layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, width in (("q_proj", self.query), ("k_proj", self.key_value), ("v_proj", self.key_value)):
            yield f"self_attn.{name}.weight", (width, self.hidden)
            if not self.experts:
                yield f"self_attn.{name}.bias", (width,)
        yield "self_attn.o_proj.weight", (self.hidden, self.query)
        if self.experts:
            yield "self_attn.q_norm.weight", (self.head,)
            yield "self_attn.k_norm.weight", (self.head,)
            yield "mlp.gate.weight", (self.experts, self.hidden)
        for prefix in [f"mlp.experts.{e}" for e in range(self.experts)] or ["mlp"]:
            yield f"{prefix}.gate_proj.weight", (self.inner, self.hidden)
            yield f"{prefix}.up_proj.weight", (self.inner, self.hidden)
            yield f"{prefix}.down_proj.weight", (self.hidden, self.inner)
        yield "input_layernorm.weight", (self.hidden,)
        yield "post_attention_layernorm.weight", (self.hidden,)


_QWEN25_7B = Decoder(28, 3584, 3584, 512, 128, 18944, 152064)
_QWEN3_30B_A3B_OF_12_LAYERS = Decoder(12, 2048, 4096, 512, 128, 768, 151936, experts=128)
_DECODERS = {
    "dense": _QWEN25_7B,
    "moe": _QWEN3_30B_A3B_OF_12_LAYERS,
    # As many tensors, a quarter of each width: a sixteenth of the bytes, so that the work per tensor weighs more.
    "dense-cpu": _QWEN25_7B.cut(4),
    "moe-cpu": _QWEN3_30B_A3B_OF_12_LAYERS.cut(4),
    # The names and count of Qwen2.5-1.5B, at a third of its width.
    "transformer": Decoder(28, 512, 512, 128, 64, 2944, 32064),
}


def model(name: str) -> list[Shape]:
    """A tensor list by name.

    ``dense``: Qwen2.5-7B (339 tensors, 15.23 GB). ``moe``: Qwen3-30B-A3B cut to 12 layers (4,719 tensors, 16.20 GB).
    ``dense-cpu``, ``moe-cpu``: the same tensors at a quarter of their widths (0.95 and 1.01 GB). ``transformer``: 339
    tensors, 323 MB. ``16MiB`` …: that size in four tensors. ``tiny``: 10,000 tensors of 1 to 16 elements.
    """
    if name in _BLOBS:
        return [(f"blob.{i}", "uint8", (_BLOBS[name] // 4,)) for i in range(4)]
    if name == "tiny":
        dtypes = ("float32", "bfloat16", "uint8", "int64")
        return [(f"layers.{i}.bias", dtypes[i % 4], (1 + i % 16,)) for i in range(10_000)]
    if name not in _DECODERS:
        raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
    return [(n, "bfloat16", shape) for n, shape in _DECODERS[name].tensors()]


def model_bytes(name: str) -> int:
    """Payload bytes of a list."""
    return sum(prod(shape) * DTYPE_BYTES[dtype] for _, dtype, shape in model(name))
