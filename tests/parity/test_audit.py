"""The audit finds each wrong setting by itself, names the flag, and does not take "not told" for "as declared"."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weightplane.cli.main import app
from weightplane.controlplane.core.model import Declaration
from weightplane.controlplane.core.states import CachePolicy
from weightplane.inference_agent.engines.vllm.audit import audit
from weightplane.inference_agent.engines.vllm.conditions import conditions_of
from weightplane.inference_agent.engines.vllm.drivers import DriverError
from weightplane.inference_agent.engines.vllm.reading import EngineUnreadable, read_config, read_server
from weightplane.inference_agent.engines.vllm.settings import Declared, EngineSettings, declared_from

GOOD = EngineSettings(
    engine_version="0.32.0",
    weight_version=7,
    logprobs_mode="processed_logprobs",
    max_logprobs=20,
    dtype="float32",
    head_dtype="float32",
    kv_cache_dtype="auto",
    quantization="",
    prefix_caching=True,
    async_scheduling=False,
    chunked_prefill=True,
    batch_invariant=False,
    generation_config="vllm",
    sampling_defaults={},
    speculative="",
    cache_policy="clear",
    pause_mode="keep",
)
DECLARED = Declared(dtype="float32", weight_version=7)
STRICT = replace(DECLARED, prefix_caching=False, chunked_prefill=False, batch_invariant=True)
GOOD_STRICT = replace(GOOD, prefix_caching=False, chunked_prefill=False, batch_invariant=True)
#: A field, a wrong value of it, the condition that must say so, a part of the setting that it must name.
WRONG: list[tuple[str, Any, str, str]] = [
    ("logprobs_mode", "raw_logprobs", "LogprobsMode", "--logprobs-mode processed_logprobs"),
    ("logprobs_mode", "processed_logits", "LogprobsMode", "--logprobs-mode"),
    ("sampling_defaults", {"temperature": 0.6, "top_k": 20}, "SamplingDefaults", "--generation-config vllm"),
    ("sampling_defaults", {"repetition_penalty": 1.05}, "SamplingDefaults", "--generation-config vllm"),
    ("prefix_caching", True, "PrefixCaching", "--no-enable-prefix-caching"),
    ("cache_policy", "keep", "CachePolicy", "cache='clear'"),
    ("pause_mode", "abort", "PauseMode", "pause='keep'"),
    ("async_scheduling", True, "AsyncScheduling", "--no-async-scheduling"),
    ("dtype", "bfloat16", "Dtype", "--dtype float32"),
    ("head_dtype", "bfloat16", "HeadDtype", '{"head_dtype": "float32"}'),
    ("kv_cache_dtype", "fp8", "KvCacheDtype", "--kv-cache-dtype auto"),
    ("quantization", "fp8", "Quantization", "no --quantization"),
    ("chunked_prefill", True, "ChunkedPrefill", "--no-enable-chunked-prefill"),
    ("batch_invariant", False, "BatchInvariance", "VLLM_BATCH_INVARIANT=1"),
    ("speculative", "ngram", "SpeculativeDecoding", "no --speculative-config"),
    ("engine_version", "0.41.0", "EngineVersion", "0.32"),
    ("weight_version", 6, "WeightVersion", "7"),
]


@pytest.mark.parametrize("page", ["vllm.md", "parity.md"])
def test_the_commands_of_the_docs_are_as_is_declared_by_default(page: str) -> None:
    """Of what vLLM does otherwise if it is not told: the audit would name it, and the flag that is missing."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    command = next(b for b in text.split("```") if "vllm.entrypoints.openai.api_server" in b)
    stock = replace(
        GOOD,
        logprobs_mode="raw_logprobs",
        sampling_defaults={"temperature": 0.6},
        generation_config="auto",
        async_scheduling=True,
        head_dtype="bfloat16",
    )
    missing = {c.type: c.setting for c in audit(stock, Declared()) if c.status == "False"}
    assert set(missing) == {"LogprobsMode", "SamplingDefaults", "AsyncScheduling", "HeadDtype"}
    assert not {kind: flag for kind, flag in missing.items() if flag not in command}, command
    assert "--host 127.0.0.1" in command, "its endpoints have no authentication"


def test_what_is_as_declared_is_found_so() -> None:
    for found, declared in ((GOOD, DECLARED), (GOOD_STRICT, STRICT)):
        assert {c.status for c in audit(found, declared)} == {"True"}
        assert not any(c.setting for c in audit(found, declared))


@pytest.mark.parametrize(("name", "value", "kind", "setting"), WRONG)
def test_each_wrong_setting_is_found_by_itself(name: str, value: Any, kind: str, setting: str) -> None:
    (wrong,) = (c for c in audit(replace(GOOD_STRICT, **{name: value}), STRICT) if c.status != "True")
    assert (wrong.type, wrong.status) == (kind, "False")
    assert setting in wrong.setting
    shown = value if isinstance(value, str) else "on" if value is True else "off" if value is False else None
    assert shown is None or shown in wrong.message


def test_every_condition_has_a_wrong_setting_here() -> None:
    assert {kind for _, _, kind, _ in WRONG} == {c.type for c in audit(GOOD, DECLARED)}


def test_what_an_engine_does_not_tell_is_unknown_and_not_good() -> None:
    assert {c.status for c in audit(EngineSettings(), Declared())} == {"Unknown"}


def test_defaults_that_leave_the_distribution_as_it_is_are_neutral() -> None:
    same = {"max_new_tokens": 9, "temperature": 1, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1}
    assert {c.status for c in audit(replace(GOOD, sampling_defaults=same), DECLARED)} == {"True"}


def test_a_cache_that_updates_keep_is_named_beside_the_policy() -> None:
    wrong = [c for c in audit(replace(GOOD, cache_policy="keep"), DECLARED) if c.status == "False"]
    assert [(c.type, c.reason) for c in wrong] == [
        ("PrefixCaching", "KeptAcrossUpdates"),
        ("CachePolicy", "NotAsDeclared"),
    ]
    kept = audit(replace(GOOD, cache_policy="keep"), replace(DECLARED, cache_policy="keep"))
    assert {c.status for c in kept} == {"True"}


def test_a_release_may_be_declared() -> None:
    by = {c.type: c for c in audit(replace(GOOD, engine_version="0.41.2"), replace(DECLARED, engine_version="0.41"))}
    assert by["EngineVersion"].status == "True"
    by = {c.type: c for c in audit(replace(GOOD, engine_version="0.4"), replace(DECLARED, engine_version="0.41"))}
    assert by["EngineVersion"].status == "False"


def test_declarations_are_read_from_words() -> None:
    words = ["dtype=bfloat16", "async_scheduling=none", 'sampling_defaults={"top_p": 0.9}', "weight_version=3"]
    assert declared_from(words) == Declared(
        dtype="bfloat16", async_scheduling=None, sampling_defaults={"top_p": 0.9}, weight_version=3
    )
    assert declared_from([]) == Declared()


@pytest.mark.parametrize(
    "word",
    [
        "dtype",
        "no=1",
        "dtype=int8",
        "cache_policy=",
        "async_scheduling=yes",
        "weight_version=-1",
        "sampling_defaults=1",
    ],
)
def test_what_cannot_be_declared_is_refused_by_name(word: str) -> None:
    with pytest.raises(ValueError, match=word.split("=")[0]):
        declared_from([word])


CONFIG: dict[str, Any] = {  # the parts that are read of what vLLM 0.32 answered on a CPU
    "model_config": {
        "model": "/not/here",
        "dtype": "torch.bfloat16",
        "quantization": None,
        "max_logprobs": 20,
        "logprobs_mode": "raw_logprobs",
        "hf_overrides": {"head_dtype": "float32"},
        "generation_config": "vllm",
        "override_generation_config": {"temperature": 0.5},
    },
    "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True},
    "scheduler_config": {"async_scheduling": False, "enable_chunked_prefill": True},
    "speculative_config": None,
}


class _Answers(http.server.BaseHTTPRequestHandler):
    answers: dict[str, Any]

    def do_GET(self) -> None:
        found = self.answers.get(self.path.partition("?")[0])
        body = json.dumps(found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def recorded() -> Iterator[tuple[str, dict[str, Any]]]:
    """A server of what a real one answered."""
    answers = {
        "/server_info": {"vllm_config": json.loads(json.dumps(CONFIG)), "vllm_env": {"VLLM_BATCH_INVARIANT": False}},
        "/version": {"version": "0.32.0"},
        "/weight_info": {"weight_version": "7"},
    }
    handler = type("Handler", (_Answers,), {"answers": answers})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_settings_are_read_from_what_vllm_answers(recorded: tuple[str, dict[str, Any]]) -> None:
    found = read_server(recorded[0])
    assert found == EngineSettings(
        engine_version="0.32.0",
        weight_version=7,
        logprobs_mode="raw_logprobs",
        max_logprobs=20,
        dtype="bfloat16",
        head_dtype="float32",
        kv_cache_dtype="auto",
        quantization="",
        prefix_caching=True,
        async_scheduling=False,
        chunked_prefill=True,
        batch_invariant=False,
        generation_config="vllm",
        sampling_defaults={"temperature": 0.5},
        speculative="",
    )


def test_what_is_not_in_a_config_is_not_known() -> None:
    found = read_config({})
    assert {f.name for f in fields(found) if getattr(found, f.name) is not None} == set()


def test_defaults_and_head_come_from_a_checkpoint_that_is_here(tmp_path: Path) -> None:
    model = {**CONFIG["model_config"], "model": str(tmp_path), "hf_overrides": {}, "generation_config": "auto"}
    config = {**CONFIG, "model_config": model}
    assert read_config(config).head_dtype == "bfloat16"
    assert read_config(config).sampling_defaults == {"temperature": 0.5}
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.8, "temperature": 0.6, "eos_token_id": 2}')
    (tmp_path / "config.json").write_text('{"head_dtype": "float32"}')
    assert read_config(config).sampling_defaults == {"top_p": 0.8, "temperature": 0.5}
    assert read_config(config).head_dtype == "float32"
    model["model"] = str(tmp_path / "elsewhere")
    assert read_config(config).sampling_defaults is None and read_config(config).head_dtype is None


def test_a_server_without_its_development_endpoints_says_what_to_do(recorded: tuple[str, dict[str, Any]]) -> None:
    del recorded[1]["/server_info"]
    with pytest.raises(EngineUnreadable, match="VLLM_SERVER_DEV_MODE") as refused:
        read_server(recorded[0])
    assert refused.value.reachable


def test_a_release_that_labels_no_weights_is_of_unknown_version(recorded: tuple[str, dict[str, Any]]) -> None:
    del recorded[1]["/weight_info"]
    assert read_server(recorded[0]).weight_version is None


def test_the_command_ends_as_the_other_commands_do(recorded: tuple[str, dict[str, Any]]) -> None:
    url = recorded[0]
    done = CliRunner().invoke(app, ["parity", "audit", "--url", url, "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 4 and not found["ok"]
    wrong = {c["type"] for c in found["conditions"] if c["status"] == "False"}
    assert wrong == {"LogprobsMode", "SamplingDefaults"}
    words = ["logprobs_mode=raw_logprobs", 'sampling_defaults={"temperature": 0.5}', "weight_version=7"]
    asked = ["parity", "audit", "--url", url, *(w for d in words for w in ("--declare", d))]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0 and "0 not as declared" in done.stdout
    done = CliRunner().invoke(app, [*asked, "--cache", "keep", "--json"])
    assert done.exit_code == 4 and "cache='clear'" in done.stdout
    assert CliRunner().invoke(app, ["parity", "audit", "--url", url, "--declare", "x=1"]).exit_code == 2
    done = CliRunner().invoke(app, ["parity", "audit", "--url", "http://127.0.0.1:9", "--json"])
    assert done.exit_code == 3 and json.loads(done.stdout)["error"]["exit"] == 3


def test_conditions_of_several_instances_are_the_worst_and_say_when_nobody_could_be_asked() -> None:
    class Told:
        name = "told"

        def __init__(self, *found: EngineSettings) -> None:
            self.found = found

        def settings(self, timeout: float) -> tuple[EngineSettings, ...]:
            if not self.found:
                raise DriverError("GET /server_info: HTTP 404")
            return self.found

    def of(driver: Any, **values: str) -> dict[str, str]:
        declared = Declaration(values, CachePolicy.KEEP)
        return {c.type: c.status for c in conditions_of(driver, declared, 3, 1.0)}

    right = EngineSettings(logprobs_mode="processed_logprobs", dtype="float32")
    two = of(Told(right, replace(right, logprobs_mode="raw_logprobs")), weight_version="3")
    assert (two["Audit"], two["LogprobsMode"], two["Dtype"]) == ("True", "False", "True")
    assert (two["CachePolicy"], two["PauseMode"]) == ("False", "True"), "as the group's updates do"
    assert two["WeightVersion"] == "True", "as the workers say where the engine labels none"
    undeclared = conditions_of(Told(replace(right, weight_version=6)), Declaration(), 3, 1.0)  # type: ignore[arg-type]
    (version,) = (c for c in undeclared if c.type == "WeightVersion")
    assert (version.status, "6" in version.message) == ("True", False), "the next update would make it a lie"
    assert of(Told(right), dtype="bfloat16")["Dtype"] == "False"
    assert (of(Told())["Audit"], of(Told())["LogprobsMode"]) == ("Unknown", "Unknown")
    odd = of(Told(right), engine_colour="blue")
    assert (odd["Audit"], odd["LogprobsMode"]) == ("Unknown", "True")
