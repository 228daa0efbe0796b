"""What ``--engine vllm`` makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import VllmEngine

__all__ = ["make"]


def make(url: str | Sequence[str] = "http://127.0.0.1:8000", **options: Any) -> VllmEngine:
    """For ``weightplane inference-agent --engine vllm --engine-option url=http://host:port``.

    ``url``: the server; a list of them where each data-parallel instance has its own. ``options``: of ``VllmEngine``.
    Waits until vLLM answers.
    """
    from .adapter import VllmEngine
    from .http import HttpDriver

    return VllmEngine(HttpDriver([url] if isinstance(url, str) else list(url)), **options)
