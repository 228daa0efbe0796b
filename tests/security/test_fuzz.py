"""A bounded run of the fuzzer; ``make fuzz`` sends 200,000 messages to each service."""

from __future__ import annotations

import os

import pytest

from tests.security.fuzz import fuzz


@pytest.mark.timeout(180)
def test_mutated_messages_and_junk_on_every_port(capsys: pytest.CaptureFixture[str]) -> None:
    seconds, seed = float(os.environ.get("FUZZ_SECONDS", "12")), int(os.environ.get("FUZZ_SEED", "7"))
    summary, wrong = fuzz(seconds=seconds, seed=seed)
    with capsys.disabled():
        print(f"\n{summary}")
    assert not wrong, "\n".join(wrong)
