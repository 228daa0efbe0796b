"""When a replica fetches what the next update will probably come by."""

from __future__ import annotations

from collections.abc import Sequence

from weightplane.inference_agent.ahead import QUIET_S, PlansAhead

Fetched = list[tuple[str, Sequence[str]]]


def heard(*plans: str) -> tuple[PlansAhead, Fetched]:
    fetched: Fetched = []
    made = PlansAhead(lambda manifest_id, plans: fetched.append((manifest_id, plans)))
    made.hear("m", plans, 10.0)
    return made, fetched


def test_it_is_fetched_once_no_other_word_has_come_for_a_while() -> None:
    ahead, fetched = heard("p1")
    assert ahead.waiting
    ahead.look(10.0 + 0.9 * QUIET_S, True)
    ahead.hear("m", ["p2"], 10.0 + 0.9 * QUIET_S)
    ahead.look(10.0 + 1.5 * QUIET_S, True)
    assert not fetched and ahead.waiting, "p2 is younger"
    ahead.hear("m", ["p2"], 10.0 + 1.8 * QUIET_S)
    ahead.look(10.0 + 2 * QUIET_S, True)
    assert fetched == [("m", ("p2",))] and not ahead.waiting, "the same again changes nothing"
    ahead.hear("m", ["p2"], 20.0)
    ahead.look(30.0, True)
    assert len(fetched) == 1


def test_an_update_that_begins_fetches_its_own() -> None:
    ahead, fetched = heard("p1")
    ahead.look(10.0, False)
    assert not ahead.waiting
    ahead.look(20.0, True)
    assert not fetched


def test_no_plans_are_nothing_to_fetch() -> None:
    ahead, fetched = heard()
    assert not ahead.waiting
    ahead.hear("m", ["p1"], 11.0)
    ahead.hear("m", [], 11.0)
    ahead.look(20.0, True)
    assert not fetched and not ahead.waiting
