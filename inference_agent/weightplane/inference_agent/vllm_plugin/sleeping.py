"""Whether a vLLM can sleep. Imports neither vLLM nor torch."""

from __future__ import annotations

from typing import Any

__all__ = ["sleep_refusal"]


def sleep_refusal(vllm_config: Any, device: str) -> str:
    """Why this vLLM cannot sleep; empty if it can.

    On CPU it can in name: vLLM obeys every order and keeps its memory, which the agent says.
    """
    if device == "cpu" or getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return ""
    return "vLLM was started without --enable-sleep-mode: its memory is not in a pool that it can release"
