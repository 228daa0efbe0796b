"""What cannot start is refused at once, by name: engines, labels; and an agent that nobody answers says so."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import grpc
import pytest
from torch import nn

from tests.inference_agent.server import FAST, eventually, server
from weightplane.controlplane.core.evolve import replace
from weightplane.controlplane.core.states import Liveness
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.heartbeat import HeartbeatHelper
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.serve import EngineFailed, load_engine
from weightplane.inference_agent.session import _Trouble

MODULE = """
import torch

LIMIT = 3

def raises(): raise RuntimeError("no weights")
def exits(): raise SystemExit("give me a GPU")
def needs(path, *, size=1): return None
def odd(): return 7
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import a_module_that_is_not_here\n")
    (tmp_path / f"{name}_bad.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


@pytest.mark.parametrize(
    ("spec", "words", "frame"),
    [
        ("{own}:raises", "its factory raised RuntimeError: no weights", "in raises"),
        ("{own}:exits", "its factory raised SystemExit: give me a GPU", "in exits"),
        ("{own}:needs", "missing a required argument: 'path'; it takes (path, size)", ""),
        ("{own}:odd", "returned int, expected an Engine", ""),
        ("{own}:LIMIT", "expected a function that returns an engine, found int", ""),
        ("{own}:absent", "has no 'absent'; it has LIMIT, exits", ""),
        ("{own}_broken:make", "importing it needs the module 'a_module_that_is_not_here'", "line 1"),
        ("{own}_bad:make", "importing it raised ZeroDivisionError", "1 / 0"),
        ("no.such.module:make", "there is no module 'no' in the current folder", ""),
        ("torch_module", "missing a required argument: 'module'", ""),
        ("bogus", "expected module:factory, or one of", ""),
    ],
)
def test_an_engine_that_cannot_be_made_is_one_clear_error(own: str, spec: str, words: str, frame: str) -> None:
    spec = spec.format(own=own)
    with pytest.raises(EngineFailed) as found:
        load_engine(spec)
    assert str(found.value).startswith(f"engine {spec!r}: ") and words in str(found.value)
    assert frame in found.value.frames and "inference_agent/serve.py" not in found.value.frames
    assert bool(frame) == bool(found.value.frames)


def test_options_that_a_factory_does_not_take_are_named(own: str) -> None:
    with pytest.raises(EngineFailed, match="unexpected keyword argument 'color'"):
        load_engine(f"{own}:needs", {"path": "x", "color": 1})


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"x": "a" * 70_000}, "label 'x': expected at most 256 bytes, found 70000"),
        ({"k" * 300: "v"}, "expected at most 256 bytes, found 300"),
        ({"": "v"}, "expected some text as the key"),
        ({"x": "a\nb"}, "expected no control characters"),
        ({str(i): "" for i in range(33)}, "expected at most 32 pairs, found 33"),
    ],
)
def test_labels_that_would_be_refused_are_refused_at_once(labels: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match="label") as found:
        InferenceAgent("127.0.0.1:1", "g", "r0", TorchModuleEngine(nn.Linear(2, 1)), labels=labels)
    assert words in str(found.value)


def test_labels_at_the_limit_are_taken_by_the_control_plane() -> None:
    labels = {f"{i:0>256}": "v" * 256 for i in range(32)}
    with server() as plane:
        agent = InferenceAgent(plane.address, "g", "r0", TorchModuleEngine(nn.Linear(2, 1)), labels=labels).start()
        try:
            assert agent.wait_live()
        finally:
            agent.stop()


def test_the_same_trouble_is_told_ever_more_rarely_and_another_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("weightplane.inference_agent.session.time.monotonic", lambda: now)
    trouble = _Trouble("r0", Dial("127.0.0.1:1"))
    with caplog.at_level(logging.INFO, "weightplane.inference_agent"):
        for _ in range(1200):  # ten minutes, a dial every half second
            trouble.say(grpc.StatusCode.UNAVAILABLE, "refused")
            now += 0.5
        assert 8 <= len(caplog.records) <= 16
        told = len(caplog.records)
        trouble.say(grpc.StatusCode.UNAUTHENTICATED, "no token")
        assert len(caplog.records) == told + 1 and caplog.records[-1].levelname == "ERROR"
        trouble.over()
        trouble.say(grpc.StatusCode.UNAVAILABLE, "refused")
        assert len(caplog.records) == told + 2
    assert "no control plane answers at 127.0.0.1:1" in caplog.records[-1].getMessage()


def test_an_agent_keeps_its_lease_while_its_heartbeat_process_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy machine that takes longer than a lease has."""
    caplog.set_level(logging.INFO)
    start = HeartbeatHelper.start
    monkeypatch.setattr(HeartbeatHelper, "start", lambda helper: None)
    monkeypatch.setattr(HeartbeatHelper, "alive", lambda helper: True)
    config = replace(FAST, beat_s=0.2, ttl_s=1.5)
    with server(config) as s:
        agent = InferenceAgent(s.address, "g", "a", TorchModuleEngine(nn.Linear(2, 2))).start()
        try:
            eventually(lambda: "a" in s.state().replicas, what="a is here")
            began = s.state().ticked_at
            eventually(lambda: s.state().ticked_at > began + 3 * config.ttl_s, 30.0, "three leases have passed")
            assert s.state().replicas["a"].liveness is Liveness.LIVE and "is SUSPECT" not in caplog.text
            helper = agent._helper
            assert helper is not None and helper.silent
            start(helper)
            eventually(lambda: not helper.silent, 30.0, "the helper beats")
            beats = helper.beats
            eventually(lambda: helper.beats > beats + 2, 30.0, "the helper goes on")
            assert s.state().replicas["a"].liveness is Liveness.LIVE and "is SUSPECT" not in caplog.text
        finally:
            agent.stop(leave=False)
