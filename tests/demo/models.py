"""Small models for the demo's tests."""

from __future__ import annotations

import torch

from weightplane.demo.model import DecoderLM, ModelConfig, build_model

__all__ = ["SMALL", "lively"]

SMALL = ModelConfig(vocab_size=11, d_model=32, n_layers=2, n_heads=4, max_len=24)


def lively(seed: int = 0) -> DecoderLM:
    """A small model with weights large enough that context decides which token comes next."""
    model = build_model(SMALL, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model
