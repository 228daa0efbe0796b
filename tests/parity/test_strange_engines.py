"""Engines that answer what no vLLM does, or not to the end, and what else cannot be measured: each ends in time, in
words, with the documented exit, and is accused of nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weightplane.cli.main import app
from weightplane.inference_agent.engines.vllm import rollouts
from weightplane.inference_agent.engines.vllm.rollouts import RolloutError, Rollouts
from weightplane.inference_agent.engines.vllm.spans import version_of_label
from weightplane.parity.loop import LoopCheck
from weightplane.parity.probe import ProbeError, checked
from weightplane.parity.reruns import rescored
from weightplane.parity.samples import Plan, Sample, Sampling
from weightplane.parity.stats import compare
from weightplane.parity.together import together
from weightplane.v1 import fleet_pb2, update_pb2

VOCAB = 100
PLAN = Plan(((1, 2, 3),), (Sampling(1.0), Sampling(0.7)), 1, 4)


class Engine(ThreadingHTTPServer):
    """Answers as vLLM does, ``change`` applied to it; ``halt`` says that it stops in the middle."""

    daemon_threads = True
    label: Any = "1"
    halt = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.asked, self.over = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, found: Any) -> None:
        raw = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        self.answer({"weight_version": self.server.label})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["sampling_params"]
        self.server.asked.set()
        if self.server.halt:
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            while not self.server.over.wait(0.1):
                if self.server.halt == "drips":
                    self.wfile.write(b" ")
            return
        n = asked["max_tokens"]
        choice = {
            "index": 0,
            "token_ids": [5] * n,
            "logprobs": {"content": [{"logprob": -1.0} for _ in range(n)]},
            "finish_reason": "length",
            "weight_versions": [{"version": "1", "start": 0, "end": n}],
        }
        choices = [{**choice, "index": i} for i in range(asked.get("n", 1))]
        self.answer(self.server.change({"usage": {"prompt_tokens": 3}, "choices": choices}))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.over.set()
        made.shutdown()


class Fleet:
    """A publisher with one replica."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.told: list[update_pb2.ParityResult] = []

    def replicas(self, timeout: float = 10.0) -> list[fleet_pb2.ReplicaInfo]:
        return [fleet_pb2.ReplicaInfo(replica_id="a", serving_address=self.url)]

    def tell_parity(self, update_id: str, results: Sequence[update_pb2.ParityResult], timeout: float = 10.0) -> None:
        self.told += results


class Receipt:
    version, update_id, committed, ready = 1, "u1", True, ("a",)


def scorer(samples: Sequence[Sample]) -> list[list[float]]:
    assert all(0 <= t < VOCAB for s in samples for t in s.tokens), "a model would end with an IndexError"
    return [[-1.0] * len(s.tokens) for s in samples]


def found(url: str, timeout: float = 20.0) -> update_pb2.ParityResult:
    fleet = Fleet(url)
    (one,) = LoopCheck(scorer, plan=PLAN, vocab=VOCAB, timeout=timeout)(fleet, Receipt())
    assert fleet.told == [one]
    return one


def choice(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda answer: {**answer, "choices": [{**c, **fields} for c in answer["choices"]]}


def logprob(value: Any) -> Callable[[dict[str, Any]], Any]:
    return choice(logprobs={"content": [{"logprob": value}] * 4})


def spans(*rows: Any) -> Callable[[dict[str, Any]], Any]:
    return choice(weight_versions=list(rows))


WHOLE = {"version": "1", "start": 0, "end": 4}
STRANGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "bytes": (lambda _: b"\xff\xfe{", "UnicodeDecodeError"),
    "deep": (lambda _: b"[" * 100_000, "RecursionError"),
    "a list": (lambda _: [1], "expected a JSON object"),
    "no completions": (lambda a: {**a, "choices": []}, "expected 1 completions of each prompt, found 0"),
    "one too many": (lambda a: {**a, "choices": a["choices"] * 2}, "found 2"),
    "usage": (lambda a: {**a, "usage": "some"}, "not an answer"),
    "details": (lambda a: {**a, "usage": {"prompt_tokens": 3, "prompt_tokens_details": [1]}}, "not an answer"),
    "index": (choice(index="first"), "not an answer"),
    "logprobs": (choice(logprobs=[-1.0]), "not an answer"),
    "words": (logprob("likely"), "not an answer"),
    "null": (logprob(None), "not an answer"),
    "text": (choice(token_ids=["a", "b", "c", "d"]), "expected whole numbers"),
    "true": (choice(token_ids=[True] * 4), "expected whole numbers"),
    "negative": (choice(token_ids=[-1] * 4), "expected whole numbers"),
    "beyond": (choice(token_ids=[VOCAB] * 4), "expected tokens below 100, the trainer's vocabulary, found 100"),
    "too long": (choice(token_ids=[5] * 5, logprobs={"content": [{"logprob": -1.0}] * 5}), "expected 1 to 4 tokens"),
    "labels": (choice(weight_versions="1"), "not an answer"),
    "backwards": (spans({**WHOLE, "start": 4, "end": 2}), "not an answer"),
    "twice": (spans(WHOLE, WHOLE), "not an answer"),
    "huge label": (spans({**WHOLE, "version": "9" * 5000}), "version unknown"),
}


@pytest.mark.parametrize("change", STRANGE)
def test_an_engine_that_answers_garbage_was_not_measured_and_training_goes_on(engine: Engine, change: str) -> None:
    engine.change, expected = STRANGE[change]
    one = found(engine.url)
    assert one.verdict == update_pb2.PARITY_VERDICT_NOT_MEASURED, one
    assert expected in one.reason and math.isnan(one.mean_abs)


def test_as_it_is_the_engine_is_at_parity(engine: Engine) -> None:
    assert found(engine.url).verdict == update_pb2.PARITY_VERDICT_AT_PARITY


@pytest.mark.parametrize("label", ["9" * 5000, {"a": 1}, None, ""])
def test_a_label_that_is_no_version_is_named(engine: Engine, label: Any) -> None:
    engine.label = label
    assert "which is no version of ours" in found(engine.url).reason
    assert version_of_label(label) is None and version_of_label("7") == 7 and version_of_label("07") is None


@pytest.mark.parametrize("url", ["http://h:99999", "http://[::1", "a" * 80 + ".x", "ftp://127.0.0.1:1", "\0", ","])
def test_an_address_that_cannot_be_one_was_not_measured(url: str) -> None:
    one = found(url)
    assert one.verdict == update_pb2.PARITY_VERDICT_NOT_MEASURED and "Error: " in one.reason.replace("URL", "Error")


@pytest.mark.parametrize("halt", ["hangs", "drips"])
def test_an_engine_that_stops_in_the_middle_is_waited_for_until_the_deadline_and_no_longer(
    engine: Engine, halt: str
) -> None:
    engine.halt = halt
    began = time.monotonic()
    one = found(engine.url, timeout=1.0)
    assert "no whole answer within 1 s" in one.reason and time.monotonic() - began < 10
    with pytest.raises(ProbeError, match="no whole answer within 1 s"):
        rescored(engine.url, [Sample((1, 2), (3,), (-1.0,), Sampling())], timeout=1.0)


def test_a_read_that_times_out_by_itself_is_said_as_the_deadline_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.halt = "hangs"
    monkeypatch.setattr(rollouts, "_within", lambda *_: contextlib.nullcontext(threading.Event()))
    with pytest.raises(ProbeError, match=r"no whole answer within 0\.2 s"):
        rescored(engine.url, [Sample((1, 2), (3,), (-1.0,), Sampling())], timeout=0.2)


def test_a_stream_of_garbage_is_an_error_of_the_engine(engine: Engine) -> None:
    for text in (b"data: {\n\n", b'data: {"choices": [{}]}\n\n', b"data: 7\n\n", b"\xff\n\n"):
        engine.change = lambda _, text=text: text  # type: ignore[misc]
        with pytest.raises(RolloutError, match="after 0 tokens"):
            list(Rollouts(engine.url).stream([1, 2], max_tokens=4))


@pytest.mark.parametrize("answer", [{}, {"prompt_logprobs": 7}, {"prompt_logprobs": [None]}, {"choices": [7]}])
def test_an_answer_in_another_shape_is_named(engine: Engine, answer: dict[str, Any]) -> None:
    engine.change = lambda _: answer
    with pytest.raises(RolloutError, match="no prompt_logprobs of each token"):
        Rollouts(engine.url).prompt_logprobs([1, 2], 1)
    with pytest.raises(RolloutError, match="not an answer of /inference/v1/generate"):
        Rollouts(engine.url).generate([1], max_tokens=1)


@pytest.mark.parametrize("value", [-1.7e308, -1e301])
def test_a_value_beyond_what_can_be_added_up_is_minus_infinity(value: float) -> None:
    stats = compare([[value] * 3, [-1.0]], [[-1.0] * 3, [-1.0]])
    assert stats.bad == 3 and {b.what for b in stats.named} == {"-inf"} and stats.mean_abs == 0
    assert compare([[-1.0] * 3], [[value] * 3]).outside == 3


@pytest.mark.parametrize("scores", [None, 7, [1.0], [["likely"]], [[None]], [[10**400]], [], [[-1.0, -2.0]]])
def test_what_a_scorer_gives_in_another_shape_is_named(scores: Any) -> None:
    with pytest.raises(ProbeError, match="the scorer"):
        checked([Sample((1,), (2,), (-1.0,), Sampling())], scores)


def test_a_failure_does_not_wait_for_those_that_run() -> None:
    never = threading.Event()
    begun: list[int] = []

    def work(n: int) -> int:
        begun.append(n)
        if n == 0:
            raise OSError("first")
        never.wait(60)
        return n

    began = time.monotonic()
    with pytest.raises(OSError, match="first"):
        together(work, range(100), 2, "test")
    assert time.monotonic() - began < 30
    never.set()
    assert len(begun) < 100 and together(lambda n: n * n, range(5), 2, "test") == [0, 1, 4, 9, 16]
    assert together(work, [], 2, "test") == []


def test_one_that_failed_and_then_cannot_be_measured_is_still_checked_at_every_version(engine: Engine) -> None:
    check, fleet, receipt = LoopCheck(scorer, plan=PLAN, vocab=VOCAB), Fleet(engine.url), Receipt()
    engine.change = logprob(-2.0)
    assert check(fleet, receipt)[0].verdict == update_pb2.PARITY_VERDICT_NOT_AT_PARITY
    engine.change = lambda _: b"{"
    assert check(fleet, receipt)[0].verdict == update_pb2.PARITY_VERDICT_NOT_MEASURED
    assert check.due(2), "nobody has seen it well"
    engine.change = lambda answer: answer
    assert check(fleet, receipt)[0].verdict == update_pb2.PARITY_VERDICT_AT_PARITY
    assert not check.due(2)


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "own.py").write_text("def ok(samples):\n    return [[-1.0] * len(s.tokens) for s in samples]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shape = ["--vocab", "100", "--prompts", "1", "--prompt-tokens", "8", "--tokens", "4"]
    return ["parity", "check", "--url", engine.url, "--scorer", "own:ok", *shape]


def ended(arguments: list[str]) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output.replace("\n", " ")


def test_who_cannot_be_reached_is_exit_3_and_who_answers_garbage_exit_4(command: list[str], engine: Engine) -> None:
    assert ended([*command, "--url", "127.0.0.1:1"])[0] == 3
    code, text = ended([*command, "--url", "http://h:99999"])
    assert code == 3 and "99999" in text
    engine.change = lambda _: b"{"
    assert ended(command)[0] == 4
    engine.change = lambda answer: answer
    assert ended(command)[0] == 0


def test_a_report_that_cannot_be_written_is_said_before_anything_is_measured(
    command: list[str], engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/below", "/proc/none/below"):
        code, text = ended([*command, "--report", folder])
        assert code == 2 and "--report" in text, text
    assert not engine.asked.is_set()


@pytest.mark.parametrize(
    "option, words",
    [
        (("--bound", "mean_abs=nan"), "bound mean_abs: expected a number"),
        (("--bound", "mean_abs=-1"), "bound mean_abs: expected a number"),
        (("--sampling", "inf"), "expected a finite temperature"),
        (("--head-dtype", "float8"), "--head-dtype: expected one of"),
    ],
)
def test_a_number_that_bounds_nothing_is_refused(command: list[str], option: tuple[str, str], words: str) -> None:
    code, text = ended([*command, *option])
    assert code == 2 and words in " ".join(text.replace("│", " ").split()), text


def test_a_bound_that_is_infinite_is_none(command: list[str], tmp_path: Path) -> None:
    assert ended([*command, "--bound", "kl=inf", "--bound", "mean_abs=inf", "--report", str(tmp_path / "r")])[0] == 0
    assert json.loads((tmp_path / "r" / "parity.json").read_text())["thresholds"]["mean_abs"] is None


@pytest.mark.parametrize("config", ["[1]", "7", '{"vocab_size": null}', '{"text_config": [1]}', "{"])
def test_a_checkpoint_without_a_vocabulary_is_named(command: list[str], tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    arguments = [*command, "--scorer", "", "--vocab", "0", "--checkpoint", str(tmp_path)]
    code, text = ended(arguments)
    assert code == 2 and "vocab_size" in text, text


def until_it_sleeps(pid: int) -> None:
    """Until the main thread was found asleep for half a second: it waits for something that does not come."""
    end, asleep = time.monotonic() + 30, 0
    while asleep < 25:
        assert time.monotonic() < end, "its main thread never slept"
        state = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(") ")[2][0]
        asleep = asleep + 1 if state == "S" else 0
        time.sleep(0.02)


@pytest.mark.parametrize("woken", [True, False], ids=["a wait is woken", "a wait is not woken"])
@pytest.mark.parametrize("halt", ["hangs", "drips"])
def test_ctrl_c_ends_a_check_at_once_whatever_the_engine_does(
    command: list[str], engine: Engine, halt: str, woken: bool
) -> None:
    engine.halt = halt
    # A signal between Python's last look for one and the wait in the kernel wakes nobody: siginterrupt makes that sure.
    script = f"import signal; signal.siginterrupt(signal.SIGINT, {woken}); from weightplane.cli.main import app; app()"
    run = subprocess.Popen(
        [sys.executable, "-c", script, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        text=True,
    )
    try:
        assert engine.asked.wait(60), "it never asked"
        if not woken:
            until_it_sleeps(run.pid)
        run.send_signal(signal.SIGINT)
        text = run.communicate(timeout=20)[0]  # a request's own timeout is 120 s
        assert run.returncode == 130 and "interrupted: nothing was measured" in text, text
    finally:
        run.kill()
