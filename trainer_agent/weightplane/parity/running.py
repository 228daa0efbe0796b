"""``weightplane parity check`` and ``diagnose``: from what was asked for to the files of the report."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from .probe import ProbeError, ProbeResult, Unreachable, in_vocabulary, probe, sample
from .report import diagnosis_report, draw, report, write_json
from .reruns import ride_through
from .samples import DEFAULT_SAMPLINGS, Plan, Sample, Sampling, Scorer, draw_prompts, sampling_from
from .thresholds import BY_DTYPE, Thresholds, calibrated, thresholds_of

__all__ = ["Asked", "Job", "ProbeError", "Unfit", "Unreachable", "diagnosed", "prepare"]


log = logging.getLogger("weightplane.parity")

_LINES = 2  # of requests kept in flight
_LONGER = 16  # times as many tokens as a probe's


class Unfit(ValueError):
    """What was asked for cannot be; the message says what was expected."""


@dataclass(frozen=True)
class Asked:
    """The commands' options. ``samplings`` and ``bounds``: as words; ``vocab`` 0: the checkpoint's. The last four are
    of ``diagnose`` (``Evidence``; ``in_flight``: seconds that requests are kept in flight for an update to meet)."""

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
    previous: Path | None = None
    fresh: str = ""
    cache_policy: str = "clear"
    in_flight: float = 0.0


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
        made(folder)
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
        except OSError as e:
            raise Unfit(f"--report {folder}: expected a folder to write to, found {e}") from e
        found = {**report(result, about), "files": files}
        written(folder / "parity.json", found)
        return found


def made(folder: Path) -> None:
    """Make the report's folder, before minutes are spent on what goes there. ``Unfit``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise Unfit(f"--report {folder}: expected a folder to write to, found {e}") from e


def written(path: Path, found: Mapping[str, Any]) -> None:
    """``write_json``; ``Unfit``."""
    try:
        write_json(path, found)
    except OSError as e:
        raise Unfit(f"--report {path.parent}: expected a folder to write to, found {e}") from e


def diagnosed(asked: Asked, folder: Path) -> dict[str, Any]:
    """Measure, try every hypothesis, and write ``diagnosis.json``; returns what it holds.

    ``asked.checkpoint`` is the reference; ``asked.scorer``, if there is one, what the training job itself computes.
    ``Unfit``: what cannot be; ``ModuleNotFoundError``: torch or transformers; ``ProbeError``.
    """
    if asked.checkpoint is None:
        raise Unfit("expected --checkpoint: hypotheses are tried on its weights")
    from .diagnosing import Evidence, diagnose
    from .scorer import TransformersScorer
    from .variants import Variants

    made(folder)
    job = prepare(replace(asked, scorer=""))
    own = _scorer(replace(asked, checkpoint=None)) if asked.scorer else None
    earlier = replace(asked, checkpoint=asked.previous, scorer="")
    before = None if asked.previous is None else _scorer(earlier, "--previous")
    reference = job.scorer
    assert isinstance(reference, TransformersScorer) and (before is None or isinstance(before, TransformersScorer))
    if before is not None and before.shapes != reference.shapes:
        raise Unfit(f"--previous {asked.previous}: expected a checkpoint of the same model as --checkpoint")
    flown = _flown(asked, reference.vocab_size)
    version, samples = sample(asked.url, job.plan, version=asked.version)
    samples += flown
    in_vocabulary(asked.url, samples, reference.vocab_size)
    coldest = min((s.temperature or 1.0 for s in job.plan.samplings), default=1.0)
    bounds = job.thresholds.at(coldest)
    if reference.rounds:
        bounds = calibrated(reference.score(samples), reference.exact(samples))
    least = min((s.version for f in flown for s in f.spans if s.known), default=-1)
    variants = Variants(reference, version, before, least)
    evidence = Evidence(variants, bounds, asked.url, asked.fresh, asked.cache_policy, own)
    conclusion, more = diagnose(samples, evidence)
    about = {"url": asked.url, "version": version, "seed": asked.seed, "in_flight": len(flown)}
    found = diagnosis_report(conclusion, more, about)
    written(folder / "diagnosis.json", found)
    return found


def _flown(asked: Asked, vocab: int) -> tuple[Sample, ...]:
    """Requests that an update met, made before anything else: their prompts are their own."""
    if not asked.in_flight:
        return ()
    if asked.previous is None:
        raise Unfit("expected --previous with --in-flight: the first tokens are of the version before")
    prompts = draw_prompts(asked.seed + 1, _LINES, asked.prompt_tokens, vocab, shared=0)
    tokens = _LONGER * asked.tokens
    # A warning, so that whoever waits for it sees it: before this an update would have met nobody.
    log.warning("requests are in flight, for %g s at most: publish the version of --checkpoint now", asked.in_flight)
    return ride_through(asked.url, prompts, tokens, sampling=Sampling(), seed=asked.seed, patience=asked.in_flight)


def prepare(asked: Asked) -> Job:
    """Make scorer and plan. ``Unfit`` says what cannot be; ``ModuleNotFoundError``: torch or transformers."""
    try:
        return _prepared(asked)
    except Unfit:
        raise
    except ValueError as e:
        raise Unfit(str(e)) from e


def _prepared(asked: Asked) -> Job:
    if (asked.checkpoint is None) == (not asked.scorer):
        raise ValueError("expected one of --checkpoint and --scorer: whose log-probabilities are right?")
    samplings = tuple(sampling_from(s) for s in asked.samplings) or DEFAULT_SAMPLINGS
    bounds = thresholds_of(asked.dtype, _bounds(asked.bounds))
    if asked.head_dtype not in BY_DTYPE:
        raise ValueError(f"--head-dtype: expected one of {', '.join(BY_DTYPE)}, found {asked.head_dtype!r}")
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"--checkpoint {checkpoint}: no vocab_size in its config.json ({e})") from e


def _scorer(asked: Asked, option: str = "--checkpoint") -> Scorer:
    if asked.checkpoint is not None:
        from .scorer import TransformersScorer

        try:
            return TransformersScorer(asked.checkpoint, dtype=asked.dtype, head_dtype=asked.head_dtype)
        except ModuleNotFoundError:
            raise
        except Exception as e:  # whatever transformers and safetensors make of a folder that is no checkpoint
            raise Unfit(f"{option} {asked.checkpoint}: {type(e).__name__}: {e}") from e
    module, colon, name = asked.scorer.partition(":")
    if not colon:
        raise Unfit(f"--scorer {asked.scorer!r}: expected module:function")
    sys.path.insert(0, os.getcwd())  # one beside the user is found, as by python itself
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise Unfit(f"--scorer {asked.scorer!r}: {e}") from e
    if not callable(found):
        raise Unfit(f"--scorer {asked.scorer!r}: expected a function, found {type(found).__name__}")
    return cast(Scorer, found)
