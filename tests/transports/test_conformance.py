"""The conformance kit bites: each planted defect fails the case that is there for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest

from weightplane.transports.conformance import cases_data, cases_faults, cases_resources
from weightplane.transports.conformance.harness import Fleet, PeerError, Pool

#: Defect → the case that finds it, and what it says.
DEFECTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "Zeros": (cases_data.test_unicode_names, r"r0: \d+ wrong, e\.g\."),
    "Nothing": (cases_data.test_unicode_names, r"r0: 10 wrong, e\.g\."),
    "LastByteLost": (cases_data.test_several_calls_of_one_update, r"r0: \d+ wrong, e\.g\."),
    "Unfenced": (cases_data.test_stale_bytes_are_never_delivered, r"different plans|wrong, e\.g\."),
    "Spoiling": (cases_data.test_nan_payloads, r"s0: \d+ wrong, e\.g\."),
    "Deaf": (lambda fleet: cases_faults.test_abort_at(fleet, "s0", "kit.send.before", 3), r"^$|ChannelTimeout"),
    "Blind": (lambda fleet: cases_faults.test_deadline_names_the_peer(fleet, "s0"), r"^$"),
    "Leaky": (cases_resources.test_fifty_updates_grow_nothing, r"s0: \{'fds': \(\d+, \d+\)\}"),
    "Busy": (cases_resources.test_waiting_is_idle, r"s of processor in 2 s"),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool("")
    yield made
    made.close()


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_fails_its_case(pool: Pool, defect: str) -> None:
    pool.transport = f"tests.transports.defects:{defect}"
    fleets: list[Fleet] = []

    def fleet(model: str, **options: Any) -> Fleet:
        fleets.append(Fleet(pool, model, **({"deadline_s": 10} | options)))
        return fleets[-1]

    case, text = DEFECTS[defect]
    try:  # a call that should have ended within a second shows as a time-out of the kit, with no text
        with pytest.raises((AssertionError, FutureTimeout, PeerError), match=text):
            case(fleet)
    finally:
        for one in fleets:
            one.close()
