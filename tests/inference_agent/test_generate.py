"""The generate endpoint: spans from tags, refusals with reasons, bounds; each token is of the version it names."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.inference_agent.models import manifest_of
from tests.inference_agent.process import demo_engine
from weightplane.controlplane.core.states import CachePolicy, Mode, PauseMode
from weightplane.inference_agent.engines.base import EngineUpdate
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.generate import GenerateServer
from weightplane.transports.digest import digest_tensor, hex_digest

BODY = {"prompts": [[1, 2], [3]], "max_new_tokens": 8, "temperature": 0.7, "seed": 3}


class Serving:
    def __init__(self, **options: Any) -> None:
        served = demo_engine()
        assert isinstance(served.engine, TorchModuleEngine) and served.generator is not None
        self.engine = served.engine
        self.model = self.engine.modules[0]
        self.server = GenerateServer(self.engine, served.generator, stop_with=served.stop_with, **options).start()

    def ask(
        self, path: str, body: object = None, raw: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        request = urllib.request.Request(f"http://{self.server.address}{path}", data=data, headers=named)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)

    def update(self, version: int, scale: float = 1.0, pause: PauseMode = PauseMode.KEEP) -> None:
        """Every parameter is scaled: other tokens, other version."""
        manifest = manifest_of(self.model)
        u = EngineUpdate(f"u{version}", version, version, "lin", Mode.STAGED, CachePolicy.CLEAR, manifest)
        self.engine.begin(u)
        names = dict(self.model.named_parameters(remove_duplicate=False))
        for index, (tensor, _) in self.engine.targets(0).items():
            tensor.copy_(names[manifest.tensors[index].name].detach() * scale)
        self.engine.prepare(u.update_id)
        self.engine.pause("update", pause)
        assert self.engine.wait_paused("update", 10)
        self.engine.apply(u.update_id)
        self.engine.commit(u.update_id)
        self.engine.resume("update")


@pytest.fixture
def serving() -> Iterator[Serving]:
    s = Serving()
    yield s
    s.engine.close()
    s.server.stop()


def test_nothing_is_generated_before_the_first_update_or_while_dirty(serving: Serving) -> None:
    code, said = serving.ask("/generate", BODY)
    assert code == 503 and "no update" in said["error"]
    no = {"routable": False, "reason": "no update has reached this engine yet"}
    assert serving.ask("/routable") == (503, no)
    serving.update(1)
    assert serving.ask("/generate", BODY)[0] == 200
    assert serving.ask("/routable") == (200, {"routable": True, "reason": ""})
    serving.engine.spoil("half of update u2 is in memory")
    code, said = serving.ask("/generate", BODY)
    assert code == 503 and said["error"] == "DIRTY: half of update u2 is in memory"
    assert serving.ask("/version")[1]["dirty"] and not serving.ask("/routable")[1]["routable"]
    serving.update(3)
    code, said = serving.ask("/generate", BODY)
    assert code == 200 and said["completions"][0]["spans"][0]["version"] == 3


def test_a_request_below_its_floor_is_refused_before_a_token_is_made(serving: Serving) -> None:
    serving.update(4)
    for floor in ("0", "3", "4"):
        assert serving.ask("/generate", BODY, weightplane_min_version=floor)[0] == 200
    code, said = serving.ask("/generate", BODY, weightplane_min_version="5")
    assert code == 503 and said["error"] == "it holds version 4, below 5"
    for odd in ("-1", "x", "", "9" * 30):
        code, said = serving.ask("/generate", BODY, weightplane_min_version=odd)
        assert code == 400 and "Weightplane-Min-Version" in said["error"], odd
    serving.update(5)
    assert serving.ask("/generate", BODY, weightplane_min_version="5")[0] == 200


def test_the_control_of_an_experiment_may_generate_unsynced() -> None:
    s = Serving(serve_unsynced=True)
    code, said = s.ask("/generate", BODY)
    assert code == 200 and said["completions"][0]["spans"] == [
        {
            "start": 0,
            "stop": 8,
            "version": 0,
            "trainer_step": -1,
            "lineage": "",
            "incarnation": "",
            "state": "KNOWN",
        }
    ]
    s.server.stop()


def test_spans_follow_a_flip_in_the_middle_and_match_a_recomputation(serving: Serving) -> None:
    """Greedy decoding across a flip: the tokens are those of v1 up to the span's end and of v2 after it."""
    serving.update(1)
    passes = 0
    flipped = threading.Event()
    enter = serving.engine.gate.forward

    def counting(request: Any = None) -> Any:
        nonlocal passes
        passes += 1
        if passes == 6 and not flipped.is_set():
            flipped.set()
            threading.Thread(target=serving.update, args=(2, -1.0), daemon=True).start()
            while serving.engine.gate.tag.version != 2:
                pass
        return enter(request)

    serving.engine.gate.forward = counting  # type: ignore[method-assign]
    body = {"prompts": [[1, 2]], "max_new_tokens": 12, "temperature": 0}
    (made,) = serving.ask("/generate", body)[1]["completions"]
    assert [(s["start"], s["stop"], s["version"]) for s in made["spans"]] == [(0, 5, 1), (5, 12, 2)]
    tokens = [1, 2, *made["tokens"]]
    for step, token in enumerate(made["tokens"]):
        sign = 1.0 if step < 5 else -1.0  # v2 is v1 negated; the live model is v2
        with torch.no_grad():
            for p in serving.model.parameters():
                p.mul_(-sign)
            logits = serving.model(torch.tensor([tokens[: 2 + step]]))[0, -1]
            for p in serving.model.parameters():
                p.mul_(-sign)
        assert int(logits.argmax()) == token, f"token {step} was not made by the version it names"


def test_a_pause_with_abort_returns_what_there_is(serving: Serving) -> None:
    serving.update(1)
    said: list[Any] = []
    body = {"prompts": [[1]], "max_new_tokens": 62, "temperature": 1}
    seen = threading.Event()
    enter = serving.engine.gate.forward

    def slow(request: Any = None) -> Any:
        seen.set()
        threading.Event().wait(0.02)
        return enter(request)

    serving.engine.gate.forward = slow  # type: ignore[method-assign]
    t = threading.Thread(target=lambda: said.append(serving.ask("/generate", body)))
    t.start()
    assert seen.wait(10)
    serving.update(2, pause=PauseMode.ABORT)
    t.join(10)
    code, answer = said[0]
    assert code == 200 and answer["aborted"] and not answer["completions"][0]["finished"]
    assert len(answer["completions"][0]["tokens"]) < 62
    assert {s["version"] for s in answer["completions"][0]["spans"]} <= {1}


def test_digests_are_read_from_memory(serving: Serving) -> None:
    serving.update(1)
    said = serving.ask("/digests")[1]
    names = dict(serving.model.named_parameters(remove_duplicate=False))
    assert said == {n: hex_digest(digest_tensor(p.detach())) for n, p in names.items()}
    with torch.no_grad():
        names["norm.weight"][0] += 1
    assert serving.ask("/digests")[1]["norm.weight"] != said["norm.weight"]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({}, "prompts"),
        ({**BODY, "prompts": []}, "prompts"),
        ({**BODY, "prompts": [[]]}, "non-empty"),
        ({**BODY, "prompts": [[1, -1]]}, "token ids"),
        ({**BODY, "prompts": [[1, True]]}, "token ids"),
        ({**BODY, "max_new_tokens": 0}, "max_new_tokens"),
        ({**BODY, "max_new_tokens": 10**9}, "max_new_tokens"),
        ({**BODY, "max_new_tokens": 999}, "max_len"),
        ({**BODY, "temperature": -1}, "temperature"),
        ({**BODY, "seed": "x"}, "seed"),
        ({**BODY, "model": "x"}, "unknown field"),
        ([1], "object"),
    ],
)
def test_bad_requests_are_refused_by_name(serving: Serving, body: object, what: str) -> None:
    serving.update(1)
    code, said = serving.ask("/generate", body)
    assert code == 400 and what in said["error"]


def test_bounds_and_routes(serving: Serving) -> None:
    assert serving.ask("/generate", raw=b"x" * ((1 << 20) + 1))[0] == 413
    assert serving.ask("/generate", raw=b"{")[0] == 400
    assert serving.ask("/nowhere")[0] == 404 and serving.ask("/nowhere", {})[0] == 404
    with pytest.raises(ValueError, match="insecure"):
        GenerateServer(serving.engine, None, host="0.0.0.0")  # type: ignore[arg-type]
