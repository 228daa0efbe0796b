"""VersionSpans: every expectation here was worked out by hand."""

from __future__ import annotations

import pytest

from weightplane.inference_agent.engines.gate import VersionTag
from weightplane.inference_agent.spans import (
    Lag,
    Span,
    from_dicts,
    from_message,
    lag,
    merge,
    spans_of,
    to_dicts,
    to_message,
)


def tag(version: int, life: str = "a") -> VersionTag:
    return VersionTag(version, f"u{version}", 10 * version, "lin", life)


def span(start: int, stop: int, version: int, life: str = "a") -> Span:
    return Span(start, stop, version, 10 * version, "lin", life)


def unknown(start: int, stop: int) -> Span:
    return Span(start, stop, known=False)


def test_tags_become_spans_and_unknown_tokens_stay_unknown() -> None:
    tags = [tag(3), tag(3), tag(4), None, None, tag(4), tag(4, "b")]
    assert spans_of(tags) == (span(0, 2, 3), span(2, 3, 4), unknown(3, 5), span(5, 6, 4), span(6, 7, 4, "b"))
    assert spans_of([]) == ()


def test_an_aborted_rollout_continued_elsewhere() -> None:
    """7 tokens on a (5 of v3, 2 of v4), aborted; 4 more on b at v5."""
    first = spans_of([tag(3)] * 5 + [tag(4)] * 2)
    rest = spans_of([tag(5, "b")] * 4)
    assert merge([(first, 7), (rest, 4)]) == (span(0, 5, 3), span(5, 7, 4), span(7, 11, 5, "b"))


def test_a_continuation_that_starts_over_from_a_token_replaces_what_followed() -> None:
    first = spans_of([tag(3)] * 7)
    assert merge([(first, 7), (spans_of([tag(4)] * 3), 3, 5)]) == (span(0, 5, 3), span(5, 8, 4))
    assert merge([(first, 7), (spans_of([tag(4)] * 3), 3, 9)]) == (span(0, 7, 3), unknown(7, 9), span(9, 12, 4))
    assert merge([(first, 7), (spans_of([tag(4)] * 3), 3, 0)]) == (span(0, 3, 4),)


def test_turns_with_tool_output_between_them() -> None:
    """Two turns of one version around 3 tokens that no engine made; adjacent equal spans join."""
    turn = spans_of([tag(6)] * 2)
    assert merge([(turn, 2), ((), 3), (turn, 2)]) == (span(0, 2, 6), unknown(2, 5), span(5, 7, 6))
    assert merge([(turn, 2), (turn, 2)]) == (span(0, 4, 6),)


def test_a_part_that_tells_less_than_its_tokens_leaves_the_rest_unknown() -> None:
    assert merge([((span(1, 3, 2),), 5)]) == (unknown(0, 1), span(1, 3, 2), unknown(3, 5))
    assert merge([((span(0, 9, 2),), 4)]) == (span(0, 4, 2),)


def test_lag_by_hand() -> None:
    """5 tokens 4 behind, 2 tokens 3 behind, 3 unknown: mean (5 * 4 + 2 * 3) / 7."""
    spans = (span(0, 5, 3), span(5, 7, 4), unknown(7, 10))
    assert lag(spans, 7) == Lag(3, 4, 26 / 7, 7, 3)
    # versions 5 and 6 were aborted: from 3 the fleet went 4, 7
    assert lag(spans, 7, committed=[1, 2, 3, 4, 7]) == Lag(1, 2, 12 / 7, 7, 3)
    assert lag([unknown(0, 4)], 7) == Lag(-1, -1, -1.0, 0, 4)
    assert lag([], 7).known_tokens == 0
    with pytest.raises(ValueError, match="newer"):
        lag(spans, 3)


def test_other_forms_are_lossless() -> None:
    spans = (span(0, 5, 3), unknown(5, 6), Span(6, 7))
    assert from_message(to_message(spans)) == spans
    assert from_dicts(to_dicts(spans)) == spans


def test_nonsense_is_refused() -> None:
    for wrong in ((3, 3), (4, 2), (-1, 2)):
        with pytest.raises(ValueError):
            Span(*wrong)
    with pytest.raises(ValueError, match="unknown"):
        Span(0, 1, version=3, known=False)
    with pytest.raises(ValueError, match="disjoint"):
        merge([((span(0, 4, 1), span(2, 5, 2)), 5)])
