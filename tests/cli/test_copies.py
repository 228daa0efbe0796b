"""What ``weightplane doctor`` says of copying memory."""

from __future__ import annotations

from weightplane.cli import copies


def test_slow_pieces_are_said_with_what_to_set() -> None:
    assert copies.TUNABLE in copies.advice(6.2, 10.9)
    assert copies.TUNABLE not in copies.advice(10.2, 10.9)


def test_both_rates_are_those_of_copies() -> None:
    pieces, whole = copies.measure()
    assert 0.05 < pieces < 1000 and 0.05 < whole < 1000
