"""What a program sees of updates in its rollouts: prefixes, suffixes, spans, caches; one real server, fresh engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from tests.inference_agent.server import eventually
from weightplane.cli.client import connect
from weightplane.controlplane.core.states import CachePolicy
from weightplane.inference_agent.engines.gate import VersionTag
from weightplane.inference_agent.engines.vllm.rollouts import RolloutError, Rollouts, VllmOutput
from weightplane.inference_agent.engines.vllm.spans import cache_salt, spans_of_labels
from weightplane.inference_agent.engines.vllm.trajectory import Trajectory, quantile
from weightplane.inference_agent.spans import Span, merge
from weightplane.trainer_agent import Publisher, StateDictSource
from weightplane.v1 import common_pb2, fleet_pb2

from .fleet import Fleet, tensors_of
from .fresh import fresh

PROMPT = [1, *((7 * i) % 500 + 5 for i in range(99))]
TOTAL = 700  # an operator's hold sees to it that a publish comes in its middle
COMPARED = 200
POLICIES = (CachePolicy.CLEAR, CachePolicy.KEEP, CachePolicy.SALT)
TURN, ANSWER = 60, 40


@dataclass
class Flight:
    """A request that was in flight during a publish."""

    versions: tuple[int, int]
    out: VllmOutput
    continued: list[int]  # by a fresh engine of the new weights, from where the versions change


@dataclass
class Turns:
    """Three turns with a publish before the second and the third, and a trajectory that began after them."""

    trajectory: Trajectory
    versions: list[int]
    again: int | None
    lags: list[int]
    last: VllmOutput
    last_fresh: list[int]
    newcomer: VllmOutput
    newcomer_fresh: list[int]


@dataclass
class Played:
    old: list[int]
    flights: dict[CachePolicy, Flight]
    turns: dict[CachePolicy, Turns]


@pytest.fixture(scope="module")
def one(pair: Fleet) -> Fleet:
    """Its server ``a`` is the one that is asked."""
    return pair


class Trainer:
    """One trainer that publishes now this checkpoint, now that."""

    def __init__(self, fleet: Fleet, folders: dict[str, Path]) -> None:
        self.named = {n: tensors_of(folders[n]) for n in ("A", "B")}
        self.live = {k: t.clone() for k, t in self.named["A"].items()}
        self.publisher = Publisher(fleet.plane.address, fleet.group, StateDictSource(self.live), trainer_id="t")
        self._address, self._group = fleet.plane.address, fleet.group
        self.step = 0

    def publish(self, name: str, **options: Any) -> int:
        """The version."""
        self.step += 1
        for k, t in self.named[name].items():
            self.live[k].copy_(t)
        return self.publisher.publish(self.step, **options).version

    def publish_under(self, flight: Streamed, name: str, **options: Any) -> int:
        """Publish while a request is in flight for certain: an operator's hold keeps it from ending meanwhile."""
        ask = {"group": self._group, "holder": "operator"}
        with connect(self._address, timeout=60) as c:
            flight.start()
            c.fleet.PauseGeneration(
                fleet_pb2.PauseGenerationRequest(request_id=uuid4().hex, mode=common_pb2.PAUSE_MODE_KEEP, **ask),
                timeout=60,
            )
            try:
                return self.publish(name, **options)
            finally:
                c.fleet.ResumeGeneration(fleet_pb2.ResumeGenerationRequest(request_id=uuid4().hex, **ask), timeout=60)


@pytest.fixture(scope="module")
def trainer(one: Fleet, folders: dict[str, Path]) -> Iterator[Trainer]:
    made = Trainer(one, folders)
    with made.publisher:
        yield made


@pytest.fixture(scope="module")
def rollouts(one: Fleet) -> Rollouts:
    return Rollouts(one.servers["a"].url)


class Streamed:
    """A greedy request on a thread of its own; ``seen``: the newest of it. ``start`` waits until tokens come."""

    def __init__(self, rollouts: Rollouts, **options: Any) -> None:
        self.seen: VllmOutput | None = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                for self.seen in rollouts.stream(PROMPT, max_tokens=TOTAL, temperature=0, **options):
                    pass
            except BaseException as e:
                self._error = e

        self._thread = threading.Thread(target=run)

    def start(self) -> None:
        self._thread.start()
        eventually(lambda: len(self.seen.tokens) > 20 if self.seen else self._error is not None, 60, "tokens come")

    def done(self) -> VllmOutput:
        self._thread.join(120)
        assert not self._thread.is_alive() and self._error is None, self._error
        assert self.seen is not None
        return self.seen


@pytest.fixture(scope="module")
def played(trainer: Trainer, rollouts: Rollouts, folders: dict[str, Path]) -> Played:
    """Everything that is compared with fresh engines, which are started once, after it."""
    flights: dict[CachePolicy, Any] = {}
    turns: dict[CachePolicy, Any] = {}
    trainer.publish("A", cache="clear")  # the servers are shared: whoever came before left what it liked
    old = rollouts.generate(PROMPT, max_tokens=TOTAL, temperature=0)[0].tokens
    cases: list[tuple[Path, list[int], int]] = []
    for policy in POLICIES:
        for _ in range(5):  # where the machine is so busy that the hold came too late, that run shows nothing: again
            first = trainer.publish("A", cache="clear")
            salt = {"cache_salt": rollouts.salt(first)} if policy is CachePolicy.SALT else {}
            flight = Streamed(rollouts, **salt)
            second = trainer.publish_under(flight, "B", cache=policy.value.lower(), pause="keep")
            out = flight.done()
            if len(out.spans) > 1 and out.spans[-1].start + COMPARED <= TOTAL:
                break
        flights[policy] = ((first, second), out)
        cases.append((folders["B"], PROMPT + out.tokens[: out.spans[-1].start], COMPARED))
    for policy in POLICIES:
        turns[policy] = _three_turns(trainer, rollouts, policy)
        trajectory, _, last, newcomer = turns[policy]
        cases.append((folders["A"], trajectory.tokens[:-ANSWER], len(last.tokens)))
        cases.append((folders["A"], PROMPT, len(newcomer.tokens)))
    found = iter(fresh(cases))
    return Played(
        old,
        {p: Flight(versions, out, next(found)) for p, (versions, out) in flights.items()},
        {
            p: Turns(t, versions, t.reprefilled, t.lags(versions[-1]), last, next(found), newcomer, next(found))
            for p, (t, versions, last, newcomer) in turns.items()
        },
    )


def _three_turns(
    trainer: Trainer, rollouts: Rollouts, policy: CachePolicy
) -> tuple[Trajectory, list[int], VllmOutput, VllmOutput]:
    versions = [trainer.publish("A", cache="clear")]
    t = Trajectory(rollouts, policy)
    out = t.turn(PROMPT, max_tokens=ANSWER, temperature=0)
    for name, first in (("B", 11), ("A", 23)):
        versions.append(trainer.publish(name, cache=policy.value.lower()))
        out = t.turn([first + i for i in range(TURN)], max_tokens=ANSWER, temperature=0)
    newcomer = Trajectory(rollouts, policy).turn(PROMPT, max_tokens=ANSWER, temperature=0)
    return t, versions, out, newcomer


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_in_flight_keeps_its_prefix_and_its_spans_say_so(played: Played, policy: CachePolicy) -> None:
    """Trap 9. With `clear` the rest is what a fresh engine of the new weights makes of the prefix; with `keep` and
    `salt` it rides on old keys and values, which is what they say."""
    flight = played.flights[policy]
    out, (first, second) = flight.out, flight.versions
    assert len(out.tokens) == len(out.logprobs) == TOTAL and out.finish == "length", "nothing is dropped"
    assert [(s.version, s.known) for s in out.spans] == [(first, True), (second, True)], out.spans
    change = out.spans[1].start
    assert (
        out.spans[0].start == 0 and out.spans[0].stop == change > 20 and out.spans[1].stop == TOTAL >= change + COMPARED
    )
    assert out.tokens[:change] == played.old[:change], "the prefix is the old model's"
    suffix = out.tokens[change : change + COMPARED]
    if policy is CachePolicy.CLEAR:
        assert suffix == flight.continued, "the suffix is not a fresh engine's of the new weights"
    else:
        assert suffix != flight.continued, "the old cache was dropped, though it was to be kept"
    assert out.tokens[change:] != played.old[change:]


@pytest.mark.parametrize("policy", POLICIES)
def test_three_turns_across_two_publishes(
    played: Played, policy: CachePolicy, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trap 8. What each cache policy promises, what it costs in tokens computed again, and the lag when sampled."""
    t = played.turns[policy]
    one, two, three = t.versions
    assert [(s.version, s.stop - s.start) for s in t.trajectory.spans if s.known] == [
        (v, ANSWER) for v in (one, two, three)
    ]
    assert sum(s.stop - s.start for s in t.trajectory.spans if not s.known) == len(PROMPT) + 2 * TURN
    earlier = len(PROMPT) + ANSWER, len(PROMPT) + 2 * ANSWER + TURN  # tokens before the second and the third turn
    assert t.again is not None
    if policy is CachePolicy.CLEAR:
        assert t.again == sum(earlier)
        assert t.last.tokens == t.last_fresh, "the third turn is not a fresh engine's"
    else:
        assert t.again <= 2 * 33, "no more than what lies beyond the last whole block is computed again"
        assert t.last.tokens != t.last_fresh, "nothing stale was used, though the cache was to be kept"
    if policy is CachePolicy.KEEP:
        assert t.newcomer.cached_tokens and t.newcomer.cached_tokens >= 64, "the old prefix is in use for newcomers too"
    else:
        assert t.newcomer.tokens == t.newcomer_fresh, "a newcomer met old keys"
    if policy is CachePolicy.SALT:
        assert t.newcomer.cached_tokens == 0
    p50, p99 = quantile(t.lags, 0.5), quantile(t.lags, 0.99)
    assert (p50, p99) == (1, 2) and len(t.lags) == 3 * ANSWER
    record_property("reprefilled_tokens", t.again)
    record_property("lag_p50_p99", f"{p50}/{p99}")
    with capsys.disabled():
        print(f"\n3 turns, 2 publishes, cache {policy}: {t.again} tokens computed again, lag p50/p99 {p50}/{p99}")


def test_a_pause_with_abort_returns_what_was_made(trainer: Trainer, rollouts: Rollouts) -> None:
    """The partial output and its spans come back; gone on with, the whole says which version made what."""
    first = trainer.publish("A")
    whole = rollouts.generate(PROMPT, max_tokens=TOTAL, temperature=0)[0].tokens
    flight = Streamed(rollouts)
    second = trainer.publish_under(flight, "B", pause="abort")
    part = flight.done()
    made = len(part.tokens)
    assert part.finish == "abort", (part.finish, part.spans)
    assert 20 < made < TOTAL and part.tokens == whole[:made] and len(part.logprobs) == made
    assert part.spans == (Span(0, made, first),)
    (rest,) = rollouts.generate(PROMPT + part.tokens, max_tokens=TOTAL - made, temperature=0)
    assert merge([(part.spans, made), (rest.spans, TOTAL - made)]) == (
        Span(0, made, first),
        Span(made, TOTAL, second),
    )


def test_a_server_without_the_endpoint_says_how_to_get_it() -> None:
    with pytest.raises(RolloutError, match=r"127\.0\.0\.1:1"):
        Rollouts("http://127.0.0.1:1").held()


def test_labels_become_spans() -> None:
    def label(version: str, start: int, end: int) -> Any:
        return SimpleNamespace(version=version, start=start, end=end)

    assert spans_of_labels(None, 3) == (Span(0, 3, known=False),)
    assert spans_of_labels([], 0) == ()
    assert spans_of_labels([label("default", 0, 2), label("7", 2, 5)], 5) == (Span(0, 2, 0), Span(2, 5, 7))
    assert spans_of_labels([{"version": "7", "start": 0, "end": 0}, {"version": "8", "start": 0, "end": 2}], 2) == (
        Span(0, 2, 8),
    )
    told = {7: VersionTag(7, trainer_step=40, lineage="l", incarnation="i")}
    assert spans_of_labels([label("7", 0, 2)], 4, told) == (Span(0, 2, 7, 40, "l", "i"), Span(2, 4, known=False))
    for foreign in ("mine", "07", "-1", "0", "٣", "1.0", ""):
        assert spans_of_labels([label(foreign, 0, 2)], 2) == (Span(0, 2, known=False),), foreign


def test_a_salt_never_names_weights_that_the_replica_has_not_got() -> None:
    assert cache_salt(3, 5) == "3", "its own old keys serve it until it ends"
    assert cache_salt(5, 3) == "3", "a replica that is behind must not compute under a name of the future"
    with pytest.raises(ValueError, match="0 or more"):
        cache_salt(-1, 0)
    assert [quantile([0, 1, 2, 3], q) for q in (0.5, 0.99)] == [1, 3]
