"""What a second trainer is told: why the first one's hold lives, in words for a trainer of any language."""

from __future__ import annotations

import re

from tests.server.scripted import Trainer, fleet, refused, server


async def test_the_one_who_comes_second_is_told_why_and_what_to_do() -> None:
    async with server() as running:
        first, second = Trainer(running.address, name="job-1"), Trainer(running.address, name="job-2")
        await first.init()  # it holds no stream: its lease has an end
        told = str((await refused(second.init(), "TRAINER_HELD")).details())
        assert re.search(r"'job-1' \(generation 1\) holds group 'g': its lease ends in [12]\.\d s unless", told), told
        assert "End that trainer and call again, or fence it by a takeover (--takeover)" in told
        await first.channel.close()
        await second.channel.close()
    async with server() as running, fleet(running.address, 1) as (_, _):
        second = Trainer(running.address, name="job-2")
        told = str((await refused(second.init(), "TRAINER_HELD")).details())
        assert "it is connected, and holds it for as long as it stays so. End that trainer" in told
        assert "0.0 s" not in told
        await second.channel.close()
