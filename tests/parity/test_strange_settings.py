"""A server that tells other settings than a vLLM has, and declarations that mean nothing: said in words, never raised
as something else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from weightplane.controlplane.core.model import Declaration
from weightplane.controlplane.core.states import CachePolicy, PauseMode
from weightplane.inference_agent.engines.vllm.conditions import conditions_of
from weightplane.inference_agent.engines.vllm.http import HttpDriver
from weightplane.inference_agent.engines.vllm.reading import EngineUnreadable, read_config, read_server
from weightplane.inference_agent.engines.vllm.settings import declared_from


class Server(ThreadingHTTPServer):
    daemon_threads = True
    info: Any = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.info is None:
            self.wfile.write(b"SSH-2.0-not\r\n")
            return
        info = self.server.info
        raw = info if isinstance(info, bytes) else json.dumps({"vllm_config": {"model_config": info}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.mark.parametrize(
    "info, reachable",
    [
        ({"generation_config": "vllm", "override_generation_config": "abc"}, True),
        ({"generation_config": "vllm", "override_generation_config": 7}, True),
        (b"[" * 100_000, True),
        (b"\xff\xfe{", True),
        (b"{", True),
        (None, False),
    ],
)
def test_what_is_no_vllm_is_unreadable_and_a_replica_tells_every_condition_as_unknown(
    server: Server, info: Any, reachable: bool
) -> None:
    server.info = info
    with pytest.raises(EngineUnreadable) as e:
        read_server(server.url, timeout=5)
    assert e.value.reachable is reachable and server.url in str(e.value)
    declared = Declaration({}, CachePolicy.CLEAR, PauseMode.KEEP)
    audit, *others = conditions_of(HttpDriver([server.url]), declared, None, 5)
    assert audit.status == "Unknown" and "the engine cannot be asked" in audit.message and len(others) > 10


def test_a_name_too_long_for_a_file_is_no_checkpoint_here() -> None:
    model = {"model": "x" * 5000, "generation_config": "auto", "override_generation_config": None}
    assert read_config({"model_config": model}).sampling_defaults is None


@pytest.mark.parametrize(
    "pair",
    [
        'sampling_defaults={"temperature": NaN}',
        'sampling_defaults={"temperature": {}}',
        "sampling_defaults=" + "[" * 100_000,
        "weight_version=" + "9" * 5000,
    ],
)
def test_a_declaration_that_nothing_can_meet_is_refused(pair: str) -> None:
    with pytest.raises(ValueError, match=pair.partition("=")[0]) as e:
        declared_from([pair])
    assert len(str(e.value)) < 400
