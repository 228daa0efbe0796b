"""``weightplane parity diagnose``: controlled re-runs on the same tokens, then the judgement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .diagnosis import Candidate, Diagnosis, choose
from .probe import checked
from .reruns import rescored
from .samples import Sample, Sampling, Scorer
from .stats import Stats, compare
from .thresholds import Thresholds
from .variants import Variants

__all__ = ["Evidence", "diagnose"]

_FEW = 4  # samples for what is tried once per module


@dataclass(frozen=True)
class Evidence:
    """What can be tried.

    Attributes:
        variants: the trainer's side, with the weights of the version before where they are there.
        thresholds: see ``choose``.
        url: of the engine, to be asked again; empty: it is not.
        fresh: of another engine that was started from the checkpoint of this version; empty: there is none.
        cache_policy: as declared: a stale key is a fault under ``clear`` only.
        own: what the training job itself computes, where that is another than the reference in ``variants``.
    """

    variants: Variants
    thresholds: Thresholds
    url: str = ""
    fresh: str = ""
    cache_policy: str = "clear"
    own: Scorer | None = None


def diagnose(samples: Sequence[Sample], evidence: Evidence) -> tuple[Diagnosis, dict[str, Stats]]:
    """Judge samples of an engine: of one probe, of requests that were in flight in an update, or of both.

    Returns the diagnosis, and further measurements by name: ``rescored`` (the engine itself, the same tokens without
    cache, at temperature 1), ``fresh`` (the same of a fresh engine). ``ProbeError``.
    """
    served = [s.served for s in samples]
    right = evidence.variants.right(samples)
    stats = compare(served, right)
    more: dict[str, Stats] = {}
    if choose(stats, evidence.thresholds, ()).kind == "none":
        if evidence.own is not None:
            return _objective(samples, right, stats, evidence), more
        return choose(stats, evidence.thresholds, ()), more
    steady = [s for s in samples if len(s.spans) <= 1]
    if steady:
        raw = evidence.variants.as_if_sampled(steady, temperature=False, filters=False)
        for name, url in (("rescored", evidence.url), ("fresh", evidence.fresh)):
            if url:
                more[name] = compare(rescored(url, steady), raw)
    candidates = list(_candidates(samples, evidence))
    plain = [i for i, s in enumerate(samples) if s.sampling == Sampling() and len(s.spans) <= 1]
    found = choose(
        stats,
        evidence.thresholds,
        candidates,
        rescored=more.get("rescored"),
        neutral=compare([served[i] for i in plain], [right[i] for i in plain]) if plain else None,
        untold=any(s.cached is None for s in steady),
    )
    return found, more


def _objective(samples: Sequence[Sample], right: list[list[float]], stats: Stats, evidence: Evidence) -> Diagnosis:
    """The engine is right; is what the training job computes?"""
    assert evidence.own is not None
    own = compare([s.served for s in samples], checked(samples, evidence.own(samples)))
    reference = Candidate(
        "objective",
        "trainer",
        stats,
        "engine and reference agree on these tokens at this version; what the training job computes differs from both",
        "compare the training job's temperature, masks, shift by one token and dtype with the reference's",
    )
    return choose(own, evidence.thresholds, [reference])


def _candidates(samples: Sequence[Sample], evidence: Evidence) -> Iterator[Candidate]:
    v, served = evidence.variants, [s.served for s in samples]

    def stats(scores: Sequence[Sequence[float]]) -> Stats:
        return compare(served, scores)

    semantic = (
        ("raw-logprobs", False, False, "raw log-probabilities: before temperature, top-k and top-p"),
        ("temperature-ignored", False, True, "the temperature is not in the log-probabilities served"),
        ("filters-ignored", True, False, "top-k and top-p are not in the log-probabilities served"),
    )
    for cause, temperature, filters, text in semantic:
        scores = v.as_if_sampled(samples, temperature=temperature, filters=filters)
        yield Candidate("semantic", cause, stats(scores), text, "--logprobs-mode processed_logprobs")
    for dtype in ("bfloat16", "float16", "float32"):
        if dtype != v.scorer.head_dtype:
            text = f"the engine's last projection is computed in {dtype}, the trainer's in {v.scorer.head_dtype}"
            advice = f"""--hf-overrides '{{"head_dtype": "{v.scorer.head_dtype}"}}'"""
            yield Candidate("inference-path", f"head-{dtype}", stats(v.head_in(samples, dtype)), text, advice)
    if v.previous is None:
        return
    text = f"the engine computes with the weights of {v.before}, labelled version {v.version}"
    advice = "publish again with verify='full'; if that does not help restart the engine"
    yield Candidate("inference-path", "version-behind", stats(v.behind(samples)), text, advice)
    yield from _keys(samples, evidence)
    yield from _modules(samples, evidence, advice)


def _keys(samples: Sequence[Sample], evidence: Evidence) -> Iterator[Candidate]:
    v, served = evidence.variants, [s.served for s in samples]
    fault = evidence.cache_policy == "clear"
    advice = "publish(cache='clear'); if it is so already, the engine did not clear" if fault else ""
    declared = "" if fault else f" (declared: cache policy {evidence.cache_policy})"
    before = f"{v.before}{declared}"
    cached = [(s.cached or 0) if _steady(s, v.version) else 0 for s in samples]
    if any(cached):
        text = f"prompts rest on keys and values in the prefix cache that are of {before}"
        scores = v.on_old_keys(samples, cached)
        yield Candidate("inference-path", "prefix-cache", compare(served, scores), text, advice, fault)
    flown = [_flown(s, v.version) for s in samples]
    if any(flown):
        text = f"requests that an update met in flight go on from keys and values of {before}"
        scores = v.on_old_keys(samples, flown)
        yield Candidate("inference-path", "stale-kv-in-flight", compare(served, scores), text, advice, fault)
    if any(cached) and any(flown):
        text = f"prompts and requests that an update met in flight rest on keys and values of {before}"
        scores = v.on_old_keys(samples, [max(pair) for pair in zip(cached, flown, strict=True)])
        yield Candidate("inference-path", "stale-kv", compare(served, scores), text, advice, fault)


def _steady(sample: Sample, version: int) -> bool:
    return all(s.known and s.version == version for s in sample.spans)


def _flown(sample: Sample, version: int) -> int:
    """Tokens whose keys were there when the version came: all before its first token but the last, which that pass
    computed. 0: the sample is of one version."""
    mine = [s.start for s in sample.spans if s.known and s.version == version]
    first = min(mine, default=0)
    return len(sample.prompt) + first - 1 if first else 0


def _modules(samples: Sequence[Sample], evidence: Evidence, advice: str) -> Iterator[Candidate]:
    """One module of the version before at a time, on a few samples spread over all."""
    v = evidence.variants
    few = list(samples[:: max(1, len(samples) // _FEW)])
    served = [s.served for s in few]
    for name, tensors in v.modules():
        tied = name.rpartition(".")[2] == "lm_head" and v.scorer.tied
        cause = "stale-tied-head" if tied else f"stale:{name}"
        text = f"{name} is of {v.before}" + (", the embedding that it is tied to is not" if tied else "")
        yield Candidate("inference-path", cause, compare(served, v.stale(few, tensors)), text, advice)
