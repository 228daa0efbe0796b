"""``weightplane parity check``: from what was asked for to the files of the report."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from .probe import ProbeError, ProbeResult, probe
from .report import draw, report, write_json
from .samples import DEFAULT_SAMPLINGS, Plan, Scorer, draw_prompts, sampling_from
from .thresholds import Thresholds, thresholds_of

__all__ = ["Asked", "Job", "ProbeError", "prepare"]


@dataclass(frozen=True)
class Asked:
    """The command's options. ``samplings`` and ``bounds``: as words; ``vocab`` 0: the checkpoint's."""

    url: str
    checkpoint: Path | None = None
    scorer: str = ""
    version: int | None = None
    dtype: str = "float32"
    head_dtype: str = "float32"
    samplings: Sequence[str] = ()
    seed: int = 0
    prompts: int = 4
    prompt_tokens: int = 256
    tokens: int = 32
    completions: int = 2
    vocab: int = 0
    bounds: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
    """What is ready to be run."""

    asked: Asked
    scorer: Scorer
    plan: Plan
    thresholds: Thresholds

    def probe(self) -> ProbeResult:
        """Measure. ``ProbeError``."""
        return probe(self.asked.url, self.scorer, self.plan, self.thresholds, version=self.asked.version)

    def run(self, folder: Path) -> dict[str, Any]:
        """Measure, and write the report; returns what ``parity.json`` holds, and ``files``: what was written.

        There is no picture where matplotlib is not installed. ``ProbeError``.
        """
        result = self.probe()
        asked = self.asked
        about = {
            "url": asked.url,
            "scorer": asked.scorer or str(asked.checkpoint),
            "dtype": asked.dtype,
            "head_dtype": asked.head_dtype,
            "seed": asked.seed,
            "samplings": [asdict(s) for s in self.plan.samplings],
        }
        files = [str(folder / "parity.json")]
        try:
            draw(folder / "parity.png", result, f"{asked.url}, version {result.version}")
            files.append(str(folder / "parity.png"))
        except ModuleNotFoundError as e:
            if e.name is None or e.name.partition(".")[0] != "matplotlib":
                raise
        found = {**report(result, about), "files": files}
        write_json(folder / "parity.json", found)
        return found


def prepare(asked: Asked) -> Job:
    """Make scorer and plan. ``ValueError`` says what cannot be; ``ModuleNotFoundError``: torch or transformers."""
    if (asked.checkpoint is None) == (not asked.scorer):
        raise ValueError("expected one of --checkpoint and --scorer: whose log-probabilities are right?")
    samplings = tuple(sampling_from(s) for s in asked.samplings) or DEFAULT_SAMPLINGS
    bounds = thresholds_of(asked.dtype, _bounds(asked.bounds))
    vocab = asked.vocab or _vocabulary(asked.checkpoint)
    plan = Plan(
        draw_prompts(asked.seed, asked.prompts, asked.prompt_tokens, vocab),
        samplings,
        asked.completions,
        asked.tokens,
        asked.seed,
    )
    return Job(asked, _scorer(asked), plan, bounds)


def _bounds(words: Sequence[str]) -> Mapping[str, float]:
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ValueError(f"--bound {word!r}: expected name=number") from None
    return found


def _vocabulary(checkpoint: Path | None) -> int:
    if checkpoint is None:
        raise ValueError("expected --vocab with --scorer: prompts are token ids below it")
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError) as e:
        raise ValueError(f"--checkpoint {checkpoint}: no vocab_size in its config.json ({e})") from e


def _scorer(asked: Asked) -> Scorer:
    if asked.checkpoint is not None:
        from .scorer import TransformersScorer

        try:
            return TransformersScorer(asked.checkpoint, dtype=asked.dtype, head_dtype=asked.head_dtype)
        except (OSError, AttributeError) as e:
            raise ValueError(f"--checkpoint {asked.checkpoint}: {e}") from e
    module, colon, name = asked.scorer.partition(":")
    if not colon:
        raise ValueError(f"--scorer {asked.scorer!r}: expected module:function")
    sys.path.insert(0, os.getcwd())  # one beside the user is found, as by python itself
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"--scorer {asked.scorer!r}: {e}") from e
    if not callable(found):
        raise ValueError(f"--scorer {asked.scorer!r}: expected a function, found {type(found).__name__}")
    return cast(Scorer, found)
